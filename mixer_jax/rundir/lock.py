"""The lock of a run's directory, which one process at a time may hold."""

import contextlib
import errno
import fcntl
import functools
import logging
import os
import pathlib
import time

_LOG = logging.getLogger(__name__)
_LOCK = "lock"
# Errors of a file system that has no locks, as some mounts of NFS, Lustre and buckets.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Environment variable: the descriptor of a lock that a process was started with.
INHERITED = "MIXER_JAX_LOCK"


def hold(path: pathlib.Path) -> int | None:
  """Holds a run's directory: a file descriptor, or None if somebody else holds it.

  The kernel lets go when the last process that has the descriptor ends, however it ends. A process
  that inherits the descriptor, and finds its number in `INHERITED`, gets a duplicate of that. On a
  file system without locks everybody gets a descriptor, and a warning says so once.
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
      _lock(descriptor, fcntl.LOCK_EX)
      return descriptor
    time.sleep(0.05)
  os.close(descriptor)
  return None


def held(path: pathlib.Path) -> bool:
  """Whether somebody holds a run's directory, which may not exist."""
  try:
    with (path / _LOCK).open() as file:
      _lock(file.fileno(), fcntl.LOCK_SH)
  except FileNotFoundError:
    return False
  except BlockingIOError:
    return True
  return False


def _lock(descriptor: int, kind: int) -> None:
  """Locks a file if its file system can; a BlockingIOError if somebody else holds it."""
  try:
    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
  except OSError as error:
    if error.errno not in _NO_LOCKS:
      raise
    _warn(error.strerror)


@functools.cache
def _warn(reason: str) -> None:
  line = (
    "the file system has no locks (%s): nothing keeps a second process out of a run's directory"
  )
  _LOG.warning(line, reason)
