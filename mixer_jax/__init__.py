"""All-MLP models and second-order training in JAX."""

from typing import TYPE_CHECKING

from mixer_jax import extras as _extras

__all__ = ("LoadedRun", "__version__", "load_run")
__version__ = "0.2.0"
"""The version of the package."""
_extras.announce_missing()

if TYPE_CHECKING:  # for those who read this file without running it
  from mixer_jax.training.restore import LoadedRun, load_run


def __getattr__(name):
  """Reads runs, imported when they are used: a script of the optimizers needs no reader of runs."""
  if name in ("LoadedRun", "load_run"):
    from mixer_jax.training import restore

    return getattr(restore, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
