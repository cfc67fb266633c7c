"""Burgers' equation: Galerkin attention and FNO with five equally tuned optimizers.

  python -m mixer_jax.study --study=configs/studies/burgers.py --workdir=DIR

Every operator sees 1,024 functions on 512 points for 100 epochs of 1cycle, and is tested on 512 and
on 2,048 points. Six settings of each optimizer are drawn from a quasi-random sequence and tried for
20 epochs on 924 of the functions, on 128 points; the best on the other 100 is run with three seeds.
Published (Cao, NeurIPS 2021): about 1e-3 for Galerkin attention, four times that for FNO.
"""

import pathlib

from mixer_jax import config as config_lib
from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
_TRIALS = 6
_HOLD_OUT = {
  "data.train_split": "train[:924]",
  "data.test_split": "train[924:]",
  "data.extra_test_steps": "",
  "data.step": 64,
  "num_epochs": 20,
}
# Those of configs/burgers.py beside the rate, and for K-FAC the periods of frontier.py.
_SETTINGS = {
  "adam": dict(clip_norm=0.999),
  "kfac": dict(factor_decay=0.8, factor_period=10, inverse_period=50),
  "ekfac": dict(factor_decay=0.8, factor_period=10, inverse_period=50, eigenvalues="batch"),
  "kfac_adam": dict(factor_decay=0.8),
}
# Lowest and highest values; logarithms are drawn uniformly.
_ADAM = {"learning_rate": (3e-4, 1e-2)}
_KFAC = {"learning_rate": (1e-3, 1e-1), "damping": (1e-4, 1e-1)}
_GRAFT = {"magnitude.learning_rate": (3e-4, 1e-2), "direction.damping": (1e-4, 1e-1)}
_SEARCH = {"adam": _ADAM, "kfac": _KFAC, "ekfac": _KFAC, "kfac_adam": _ADAM, "graft": _GRAFT}


def config(operator, optimizer):
  config = study.read_config(_HERE.parent / "burgers.py", f"{operator}_1d")
  if optimizer == "graft":  # Adam's lengths, K-FAC's directions
    config.optimizer = config_lib.grafted(*(_settings(side) for side in ("adam", "kfac")))
  else:
    config.optimizer = _settings(optimizer)
  return config


def _settings(optimizer):
  name = "kfac" if optimizer == "ekfac" else optimizer
  return config_lib.optimizer(name, 1e-3, weight_decay=0.0, **_SETTINGS[optimizer])


def get_study():
  return study.Study(
    title="Burgers' equation on 512 points",
    config=config,
    axes={"operator": ("galerkin", "fno"), "optimizer": tuple(_SEARCH)},
    lines=("operator", "optimizer"),
    tuning=study.Tuning(study.halton(_SEARCH, _TRIALS), hold_out=_HOLD_OUT),
    target_of="adam",
    notes=[
      "Relative L2 error over 100 test functions, the mean; lower is better. Each optimizer had six"
      " tries of a rate, K-FAC of its damping, too. The target is the mean error with which tuned"
      " Adam ends.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
