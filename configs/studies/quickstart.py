"""The quickstart's optimizers with equal budgets of tuning, and ten seeds of each.

  python -m mixer_jax.study --study=configs/studies/quickstart.py --workdir=DIR

Eight settings of each optimizer are tried on four fifths of the 5,000 bundled images; the best on
the last fifth is trained on all of them and tested. Learning rates are drawn from eight equal parts
of two decades.
"""

import pathlib

import numpy as np

from mixer_jax import study

_CONFIG = pathlib.Path(__file__).parent.parent / "quickstart.py"
# Lowest and highest values; logarithms are drawn uniformly.
_RATES = {
  "kfac_muon": (1e-3, 1e-1),
  "kfac_adam": (1e-3, 1e-1),
  "kfac": (2e-3, 0.2),
  "muon": (1e-3, 1e-1),
  "sgd": (1e-2, 1.0),
  "adam": (1e-4, 1e-2),
}
_DECAYS, _DAMPINGS = (1e-5, 1e-2), (1e-3, 1e-1)
_TRIALS = 8
_HOLD_OUT = {"data.train_split": "train[:80%]", "data.test_split": "train[80%:]"}


def config(optimizer):
  config = study.read_config(_CONFIG, optimizer)
  config.target = 0.0
  return config


def _candidates(optimizer):
  """The settings that are tried, the same at every call."""
  rng = np.random.default_rng(0)  # every optimizer has the same luck

  def draw(low, high, part=0, parts=1):
    return study.between(low, high, (part + rng.uniform()) / parts)

  tried = []
  for i in range(_TRIALS):
    rate, decay, damping = draw(*_RATES[optimizer], i, _TRIALS), draw(*_DECAYS), draw(*_DAMPINGS)
    own = {"optimizer.damping": damping} if optimizer == "kfac" else {}
    tried.append({"optimizer.learning_rate": rate, "optimizer.weight_decay": decay} | own)
  return tried


def get_study():
  return study.Study(
    title="The quickstart, equally tuned",
    config=config,
    axes={"optimizer": tuple(_RATES)},
    seeds=tuple(range(10)),
    tuning=study.Tuning({name: _candidates(name) for name in _RATES}, hold_out=_HOLD_OUT),
    target_of="adam",
    notes=[
      "Each optimizer had eight tries of a learning rate, one from each eighth of two decades, and a"
      " weight decay of 1e-5 to 0.01; K-FAC of a damping of 0.001 to 0.1, too. The target is the mean"
      " accuracy with which tuned Adam ends.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
