"""The processors that data are made with."""

import os


def available() -> int:
  """How many this process may use: a study that runs some at a time gives each its share."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
