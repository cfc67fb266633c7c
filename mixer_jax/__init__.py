"""All-MLP models and second-order training in JAX."""

from mixer_jax import extras as _extras

__version__ = "0.2.0"
_extras.announce_missing()


def __getattr__(name):
  """`load_run`, imported when it is used: a script of the optimizers needs no reader of runs."""
  if name == "load_run":
    from mixer_jax.training.restore import load_run

    return load_run
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
