"""Burgers' equation: attention of four kinds, FNO and all-MLPs, with Adam and Adam in K-FAC's basis.

  python -m mixer_jax.study --study=configs/studies/burgers.py --workdir=DIR

Every operator sees 1,024 functions on 512 points for 100 epochs of 1cycle, and is tested on 512 and
on 2,048. Published (Cao, NeurIPS 2021): about 1e-3 for Galerkin attention, four times that for FNO.
"""

import pathlib

from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
_ATTENTION = ("galerkin", "fourier", "softmax", "linear")
_OPERATORS = (*_ATTENTION, "fno", "mixer", "gmlp", "resmlp")


def config(operator, optimizer):
  model = {"fno": "fno_1d"} | {name: "galerkin_1d" for name in _ATTENTION}
  name = model.get(operator, f"{operator}_operator")
  config = study.read_config(_HERE.parent / "burgers.py", f"{name},{optimizer}")
  if operator in _ATTENTION:
    config.model.attention = operator
  if operator == "fourier":
    config.model.init_gain = 1e-3
  if operator in ("mixer", "gmlp", "resmlp"):
    config.data.extra_test_steps = ""  # their grid is fixed
  if operator == "softmax":
    config.optimizer.learning_rate /= 2
  return config


def get_study():
  return study.Study(
    title="Burgers' equation on 512 points",
    config=config,
    axes={"operator": _OPERATORS, "optimizer": ("adam", "kfac_adam")},
    lines=("operator", "optimizer"),
    notes=["Relative L2 error over 100 test functions, the mean; lower is better."],
  )


def get_config(run):
  return get_study().run_config(run)
