"""The width of floats of a run: JAX has one switch for the whole process."""

from typing import Any, Mapping

import jax

_SWITCHED = False  # by us: a user's own JAX_ENABLE_X64 stays as it is


def take(config: Mapping[str, Any]) -> None:
  """Allows float64 for a run whose config has `float64=True`, before its first array is made.

  It is not allowed any more for the next run of the process that lacks it; of runs that
  take turns in one process all should have the same width.
  """
  global _SWITCHED
  wanted = bool(config.get("float64", False))
  if wanted and not jax.config.jax_enable_x64:
    jax.config.update("jax_enable_x64", True)
    _SWITCHED = True
  elif _SWITCHED and not wanted:
    jax.config.update("jax_enable_x64", False)
    _SWITCHED = False
