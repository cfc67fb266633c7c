"""One process a run: the lock of its directory."""

import fcntl
import os
import pathlib
import time

_LOCK = "lock"
# Environment variable: the descriptor of a lock that a process was started with.
INHERITED = "MIXER_JAX_LOCK"


def hold(path: pathlib.Path) -> int | None:
  """Holds a run's directory, so that no two processes train in it.

  The kernel lets go when the last process that has the descriptor ends, however it ends.

  Returns:
    A file descriptor, or None if somebody else holds it. A process that inherits the descriptor
    holds the directory, too; if it finds its number in `INHERITED` this function returns it.
  """
  descriptor = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR)
  if (inherited := _inherited(descriptor)) is not None:
    os.close(descriptor)
    return inherited
  for _ in range(5):  # somebody may just be looking (`held`)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      time.sleep(0.05)
    else:
      return descriptor
  os.close(descriptor)
  return None


def _inherited(descriptor: int) -> int | None:
  """The descriptor this process was started with, if it is of the same file."""
  number = os.environ.get(INHERITED, "")
  try:
    same = os.path.sameopenfile(descriptor, int(number))
  except (ValueError, OSError):  # none, or closed since
    return None
  return os.dup(int(number)) if same else None


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
