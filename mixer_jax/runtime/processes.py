"""Several processes as one program: joining, who writes, signals, stopping together."""

import contextlib
import math
import os
import re
import select
import signal
import sys
import threading
import time
from typing import Any, Callable, Iterator, TypeVar

import jax
from jax.experimental import multihost_utils
import numpy as np

from mixer_jax.errors import UserError, as_user_error, reason
from mixer_jax.runtime import mesh as mesh_lib

T = TypeVar("T")
# Slurm sends SIGUSR1 before the end of a job (`--signal`), and a terminal that closes SIGHUP.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ONE_REQUEST = 1.0  # seconds: a shell, or `timeout`, signals a process and its group


def join(
  address: str | None = None,
  number: int | None = None,
  index: int | None = None,
  detect: bool = False,
) -> None:
  """Makes this process one of several, before JAX touches a device; does nothing without arguments.

  Only the first process prints and writes then.

  Args:
    address: HOST:PORT of the first process.
    number: of processes.
    index: of this process, from 0.
    detect: ask SLURM, Open MPI, Kubernetes or Cloud TPU for all three.

  Raises:
    UserError: not all three are given, the address has no port, or the processes do not find each
      other.
  """
  if not detect and None in (given := (address, number, index)):
    if given == (None, None, None):
      return
    raise UserError(
      "--coordinator_address, --num_processes and --process_id belong together; or --distributed"
      " alone, where SLURM, Open MPI, Kubernetes or Cloud TPU knows them"
    )
  if address is not None and not re.fullmatch(r".+:\d+", address):
    raise UserError(f"--coordinator_address is {address!r}; allowed: HOST:PORT")
  # Its handler of SIGTERM would take the place of that of `stop_signals`.
  jax.config.update("jax_enable_preemption_service", False)
  # After so long a silence a process is taken for dead, and the others end.
  seconds = dict(heartbeat_timeout_seconds=30, shutdown_timeout_seconds=60)
  with as_user_error("the processes do not find each other", RuntimeError, ValueError):
    jax.distributed.initialize(address, number, index, **seconds)
  if not is_first():
    sys.stdout = open(os.devnull, "w")


def is_first() -> bool:
  """Whether this process prints and writes."""
  return jax.process_index() == 0


def on_first(action: Callable[[], T]) -> T | None:
  """Calls `action` in the first process and returns its result; None in the others, which wait.

  A UserError of `action` ends all processes.
  """
  if jax.process_count() == 1:
    return action()
  result = error = None
  try:
    result = action() if is_first() else None
  except UserError as e:
    error = e
  failed = multihost_utils.broadcast_one_to_all(np.array(error is not None))
  if error is not None:
    raise error
  if failed:
    raise UserError(f"process {jax.process_index()} ends with the first, which says why")
  return result


@contextlib.contextmanager
def together() -> Iterator[None]:
  """Turns the error of losing another process into a `UserError`."""
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if jax.process_count() == 1:
      raise
    raise UserError(
      f"process {jax.process_index()} of {jax.process_count()} lost the others or failed"
      f" ({reason(e)}); start all again to resume from the last checkpoint"
    ) from e


class Request:
  """Whether any process was asked to stop by a signal, known to all of them at the same step.

  All processes call it equally often, in the same order with their other work on the devices, which
  are those of the mesh. `number` is the signal that came first to this one.
  """

  number: signal.Signals | None = None

  def __init__(self, mesh: jax.sharding.Mesh):
    self._split, everywhere = mesh_lib.batched(mesh), mesh_lib.replicated(mesh)
    self._any = jax.jit(lambda flags: flags.any(), out_shardings=everywhere)
    self._pending: Any = None

  def soon(self) -> bool:
    """Returns the answer of the call before this one, so that no process waits for another."""
    if jax.process_count() == 1:
      return self.number is not None
    known, self._pending = self._pending, self._ask()
    return known is not None and bool(known)

  def now(self) -> bool:
    """Returns the answer; all processes wait for each other."""
    return self.number is not None if jax.process_count() == 1 else bool(self._ask())

  def _ask(self) -> jax.Array:
    flags = np.full(jax.local_device_count(), self.number is not None)
    return self._any(jax.make_array_from_process_local_data(self._split, flags))

  @property
  def exit_code(self) -> int:
    """128 and the number of the signal, as shells have it; 143 if another process had it."""
    return 128 + (self.number or signal.SIGTERM)

  @property
  def name(self) -> str:
    """The name of the signal."""
    return self.number.name if self.number else "a signal to another process"


@contextlib.contextmanager
def stop_signals(mesh: jax.sharding.Mesh) -> Iterator[Request]:
  """Within it the first signal makes the request true, a second of its kind ends the process.

  A second one within a second of the first belongs to it.
  Python runs a handler between two of its instructions only, and a compilation is one: so a
  thread learns of signals through `signal.set_wakeup_fd` and ends the process at once. Ignored
  signals stay so. Outside the main thread, which alone may do this, signals keep their meaning.
  """
  request = Request(mesh)
  if threading.current_thread() is not threading.main_thread():
    yield request
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  outer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  taken = [s for s in SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
  handlers = {s: signal.signal(s, lambda *_: None) for s in taken}

  def watch():
    seen: dict[int, float] = {}
    while byte := os.read(reader, 1):
      number = byte[0]
      if time.monotonic() - seen.get(number, math.inf) > _ONE_REQUEST:
        os._exit(128 + number)
      if number in SIGNALS and number not in seen:
        seen[number] = time.monotonic()
        came = signal.Signals(number)
        request.number = request.number or came
        _leave_closed_terminal()
        print(f"\n{came.name}: stopping with a checkpoint; a second ends at once", file=sys.stderr)

  thread = threading.Thread(target=watch, daemon=True)
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


def _leave_closed_terminal() -> None:
  """Drops what is printed from now on to a terminal that is gone: a write to it would fail."""
  streams = select.poll()
  for stream in (1, 2):
    streams.register(stream, 0)
  for stream, event in streams.poll(0):
    if event & select.POLLHUP:
      os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
