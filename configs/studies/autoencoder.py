"""The deep autoencoder of the bundled images: a training loss over seconds, equally tuned.

  python -m mixer_jax.study --study=configs/studies/autoencoder.py --workdir=DIR
  python -m mixer_jax.report compare --log \
      --runs='DIR/sgd-seed*,DIR/adam-seed*,DIR/kfac-seed*,DIR/kfac_adam-seed*'

Each optimizer trains for numbers of epochs that took about fifteen seconds on two busy cores when
they were chosen (7 to 9 in docs/results.md; Adam in K-FAC's basis takes no more time than Adam), and
has eight tries. The one with the lowest loss of the whole training set after its last epoch is run with three
seeds. Learning rates are drawn from eight equal parts of a range of two decades. Another optimizer
is another line of `_RULES`.
"""

import pathlib
from typing import Any, Mapping, NamedTuple

import numpy as np

from mixer_jax import config as config_lib
from mixer_jax import study

_CONFIG = pathlib.Path(__file__).parent.parent / "autoencoder.py"
_TRIALS = 8


class Rule(NamedTuple):
  """An optimizer with its epochs, its settings and the ranges of drawn settings."""

  epochs: int
  learning_rate: tuple[float, float]  # logarithms are drawn uniformly
  drawn: Mapping[str, tuple[float, float]] = {}
  settings: Mapping[str, Any] = {}


_FACTORS = dict(factor_fraction=0.25)  # of 500 images, for factors of 257 rows and fewer
_KFAC = dict(factor_decay=0.8, factor_period=5, inverse_period=20, weight_decay=0.0) | _FACTORS
_RULES = {
  "sgd": Rule(300, (1e-4, 1e-2), dict(momentum=(0.9, 0.99))),
  "adam": Rule(300, (2e-4, 2e-2)),
  "kfac": Rule(130, (1e-2, 1.0), dict(damping=(1e-3, 0.1), norm_constraint=(1e-3, 0.1)), _KFAC),
  "kfac_adam": Rule(140, (1e-3, 0.1), dict(b2=(0.9, 0.99)), dict(factor_period=5) | _FACTORS),
}


def config(optimizer):
  config, rule = study.read_config(_CONFIG), _RULES[optimizer]
  config.optimizer = config_lib.optimizer(optimizer, rule.learning_rate[0], **rule.settings)
  config.num_epochs = config.checkpoint_epochs = rule.epochs
  config.eval_epochs = rule.epochs / 100
  config.save_best = False  # a hundred times, it would take as long as the steps of K-FAC
  return config


def _candidates(optimizer):
  """The settings that are tried, the same at every call."""
  rng, rule = np.random.default_rng(0), _RULES[optimizer]

  def draw(low, high, part=0, parts=1):
    return study.between(low, high, (part + rng.uniform()) / parts)

  return [
    {"optimizer.learning_rate": draw(*rule.learning_rate, i, _TRIALS)}
    | {f"optimizer.{name}": draw(*ends) for name, ends in rule.drawn.items()}
    for i in range(_TRIALS)
  ]


def get_study():
  tried = {name: _candidates(name) for name in _RULES}
  return study.Study(
    title="A deep autoencoder: equal times, equal tuning",
    config=config,
    axes={"optimizer": tuple(_RULES)},
    # Optimizers are compared as such: by the loss of the set that they minimise it on.
    tuning=study.Tuning(tried, hold_out={"data.test_split": "train", "eval_epochs": 50.0}),
    notes=[
      "5,000 CIFAR-10 images, grey at 16x16 pixels, through a net of 256-128-64-32-64-128-256 tanh"
      " units with a linear code and outputs; batches of 500, cosine. The loss is the sum of squares"
      " of an image. Runs know epochs, not seconds: their numbers were chosen to take about fifteen"
      " seconds each on two busy cores, and no more in K-FAC's basis than for Adam. Learning rates are"
      " one from each eighth of two decades; drawn with them were SGD's momentum, and K-FAC's damping"
      " and norm constraint.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
