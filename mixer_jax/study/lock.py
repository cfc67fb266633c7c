"""One process a run: the lock of its directory."""

import fcntl
import os
import pathlib
import time

_LOCK = "lock"


def hold(path: pathlib.Path) -> int | None:
  """Holds a run's directory, so that no two processes train in it.

  Args:
    path: the run's directory, which exists.

  Returns:
    A file descriptor, or None if somebody else holds it. A process that inherits
    the descriptor holds the directory for as long as it lives.
  """
  descriptor = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR)
  for _ in range(5):  # somebody may just be looking (`held`)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      time.sleep(0.05)
    else:
      return descriptor
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
