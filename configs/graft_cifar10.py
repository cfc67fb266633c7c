"""Grafting on CIFAR-10: Table 4 of the K-FAC study.

  python -m mixer_jax.main --config=configs/graft_cifar10.py:s16,sgd,kfac

The model, then the optimizer that gives the norm of each tensor's step, then the
one that gives its direction; each is complete, with the settings it has alone.
"""

import pathlib

from mixer_jax import config as config_lib
from mixer_jax import recipes, study
from mixer_jax.errors import UserError

_HERE = pathlib.Path(__file__).parent


def get_config(choice="s16,sgd,kfac"):
  variant, *names = choice.split(",")
  if len(names) != 2 or not set(names) <= {"sgd", "kfac"}:
    raise UserError(
      f"the config takes {choice!r}; allowed: MODEL,MAGNITUDE,DIRECTION with optimizers sgd, kfac"
    )
  sides = [study.read_config(_HERE / f"{name}_cifar10.py", variant).optimizer for name in names]
  config = recipes.kfac_study("cifar10", variant)
  config.optimizer = config_lib.grafted(*sides)
  return config
