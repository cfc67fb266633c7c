"""Burgers' equation by other operators than `burgers.py`: kinds of attention, and all-MLPs.

  python -m mixer_jax.study --study=configs/studies/operators.py --workdir=DIR

Every operator sees 1,024 functions on 512 points for 100 epochs of 1cycle, with the rates that
configs/burgers.py has for FNO, softmax attention with half of them, and is tested on 512 and, if its
grid is free, on 2,048 points.
"""

import pathlib

from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
_ATTENTION = ("fourier", "softmax", "linear")
_OPERATORS = (*_ATTENTION, "mixer", "gmlp", "resmlp")


def config(operator, optimizer):
  name = "galerkin_1d" if operator in _ATTENTION else f"{operator}_operator"
  config = study.read_config(_HERE.parent / "burgers.py", f"{name},{optimizer}")
  if optimizer == "kfac_adam":
    config.optimizer.learning_rate = 2.5e-3
  if operator in _ATTENTION:
    config.model.attention = operator
  if operator == "softmax":
    config.optimizer.learning_rate /= 2
  return config


def get_study():
  return study.Study(
    title="Burgers' equation on 512 points, by other operators",
    config=config,
    axes={"operator": _OPERATORS, "optimizer": ("adam", "kfac_adam")},
    lines=("operator", "optimizer"),
    notes=["Relative L2 error over 100 test functions, the mean; lower is better."],
  )


def get_config(run):
  return get_study().run_config(run)
