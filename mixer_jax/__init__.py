"""All-MLP models and second-order training in JAX."""

__version__ = "0.1.0"


def __getattr__(name):
  """`load_run`, imported when it is used: a script of the optimizers needs no reader of runs."""
  if name == "load_run":
    from mixer_jax.training.restore import load_run

    return load_run
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
