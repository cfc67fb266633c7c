"""The processors that read and make data."""

import os


def available() -> int:
  """Number of CPUs that this process may use; a study gives each of its runs a share."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
