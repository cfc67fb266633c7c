"""The lock of a run's directory, which one process at a time may hold."""

import contextlib
import fcntl
import os
import pathlib
import time

_LOCK = "lock"
# Environment variable: the descriptor of a lock that a process was started with.
INHERITED = "MIXER_JAX_LOCK"


def hold(path: pathlib.Path) -> int | None:
  """Holds a run's directory: a file descriptor, or None if somebody else holds it.

  The kernel lets go when the last process that has the descriptor ends, however it ends. A process
  that inherits the descriptor, and finds its number in `INHERITED`, gets a duplicate of that.
  """
  descriptor = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR)
  with contextlib.suppress(ValueError, OSError):  # there is none, or it is closed
    inherited = int(os.environ.get(INHERITED, ""))
    if os.path.sameopenfile(descriptor, inherited):
      own = os.dup(inherited)
      os.close(descriptor)
      return own
  for _ in range(5):  # somebody may just be looking (`held`)
    with contextlib.suppress(BlockingIOError):
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      return descriptor
    time.sleep(0.05)
  os.close(descriptor)
  return None


def held(path: pathlib.Path) -> bool:
  """Whether somebody holds a run's directory, which may not exist."""
  try:
    with (path / _LOCK).open() as file:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except FileNotFoundError:
    return False
  except BlockingIOError:
    return True
  return False
