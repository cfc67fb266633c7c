"""Ctrl-C and SIGTERM as a request to stop, which a second one of a kind enforces."""

import contextlib
import os
import signal
import sys
import threading
from typing import Iterator

_HEEDED = (signal.SIGINT, signal.SIGTERM)


class Request:
  """Whether a run has been asked to stop.

  Attributes:
    number: of the signal that asked first; None: nobody did.
  """

  number: signal.Signals | None = None

  def __call__(self) -> bool:
    return self.number is not None

  @property
  def exit_code(self) -> int:
    """As shells have it: 130 after SIGINT, 143 after SIGTERM (of this or another process)."""
    return 128 + (self.number or signal.SIGTERM)

  @property
  def name(self) -> str:
    """Of the signal."""
    return self.number.name if self.number else "a signal to another process"


@contextlib.contextmanager
def heeded() -> Iterator[Request]:
  """Within it the first signal makes the request true, a second of its kind ends the process.

  Python runs a handler between two of its instructions only, and a compilation is one: so a
  thread learns of signals through `signal.set_wakeup_fd` and ends the process at once. Ignored
  signals stay so. Outside the main thread, which alone may do this, signals keep their meaning.
  """
  request = Request()
  if threading.current_thread() is not threading.main_thread():
    yield request
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  outer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  heed = [s for s in _HEEDED if signal.getsignal(s) not in (signal.SIG_IGN, None)]
  handlers = {s: signal.signal(s, lambda *_: None) for s in heed}
  thread = threading.Thread(target=_watch, args=(reader, request), daemon=True)
  thread.start()
  try:
    yield request
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(outer)
    os.close(writer)  # which ends the thread
    thread.join()
    os.close(reader)


def _watch(reader: int, request: Request) -> None:
  seen = set()
  while byte := os.read(reader, 1):
    number = byte[0]
    if number in seen:
      os._exit(128 + number)
    if number in _HEEDED:
      seen.add(number)
      came = signal.Signals(number)
      request.number = request.number or came
      print(f"\n{came.name}: stopping with a checkpoint; a second ends at once", file=sys.stderr)
