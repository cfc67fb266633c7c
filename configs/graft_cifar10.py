"""Grafting on CIFAR-10: Table 4 of the K-FAC study.

  python -m mixer_jax.main --config=configs/graft_cifar10.py:s16,sgd,kfac

The model, then the optimizer that gives the norm of each tensor's step, then the
one that gives its direction; each is complete, with the settings it has alone.
"""

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

SIDES = {
  "sgd": dict(learning_rate=1e-2, momentum=0.9),
  "kfac": dict(
    learning_rate=1e-3,
    momentum=0.9,
    damping=1e-3,
    norm_constraint=1e-2,
    factor_decay=0.95,
    factor_period=10,
    inverse_period=100,
    decay_from=200,
  ),
}


def get_config(choice="s16,sgd,kfac"):
  variant, *names = choice.split(",")
  if len(names) != 2 or not set(names) <= set(SIDES):
    raise UserError(
      f"the config takes {choice!r}; allowed: MODEL,MAGNITUDE,DIRECTION with optimizers sgd, kfac"
    )
  magnitude, direction = (
    config_lib.optimizer(name, weight_decay=1e-4, decay="all", **SIDES[name]) for name in names
  )
  config = config_lib.study("cifar10", variant)
  config.optimizer = config_lib.grafted(magnitude, direction)
  return config
