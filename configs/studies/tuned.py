"""SGD, Adam and K-FAC with an equal budget of tuning, on CIFAR-10.

  python -m mixer_jax.study --study=configs/studies/tuned.py --workdir=DIR \
      --set=data.dir=FOLDER

Eight settings of each optimizer are drawn and tried on nine tenths of the training
set; the best on the last tenth is trained on the whole set with three seeds and
tested. Learning rates are drawn from eight equal parts of a range of two decades,
so that no optimizer has better luck with them than another.
"""

import pathlib

import numpy as np

from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
# Lowest and highest values; logarithms are drawn uniformly.
_RATES = {"sgd": (1e-2, 1.0), "adam": (1e-4, 1e-2), "kfac": (2e-3, 0.2)}
_DECAYS = (1e-5, 1e-2)
_DAMPINGS = (1e-4, 1e-1)
_SCHEDULES = ("cosine", "linear")
_TRIALS = 8


def config(model, optimizer):
  config = study.read_config(_HERE / "small.py", f"{model}-{optimizer}-seed0")
  config.num_epochs = 3
  config.data.train_split = "train"
  return config


def _candidates(optimizer):
  """The settings that are tried, the same at every call."""
  rng = np.random.default_rng(sorted(_RATES).index(optimizer))

  def draw(low, high, part=0, parts=1):
    return study.between(low, high, (part + rng.uniform()) / parts)

  candidates = []
  for i in range(_TRIALS):
    settings = {
      "optimizer.learning_rate": draw(*_RATES[optimizer], i, _TRIALS),
      "optimizer.weight_decay": draw(*_DECAYS),
      "schedule.name": str(rng.choice(_SCHEDULES)),
    }
    if optimizer == "kfac":
      settings["optimizer.damping"] = draw(*_DAMPINGS)
    candidates.append(settings)
  return candidates


def get_study():
  return study.Study(
    title="SGD, Adam and K-FAC, equally tuned, on CIFAR-10",
    config=config,
    axes={"model": ("mini8",), "optimizer": tuple(_RATES)},
    tuning=study.Tuning({name: _candidates(name) for name in _RATES}),
    notes=[
      "Each optimizer had eight tries. Learning rates are one from each eighth of a range of two"
      " decades, 0.01 to 1 (SGD), 1e-4 to 0.01 (Adam), 0.002 to 0.2 (K-FAC); drawn with them were the"
      " weight decay, 1e-5 to 0.01, the schedule, cosine or linear, and K-FAC's damping, 1e-4 to 0.1."
      " K-FAC has one setting more to find with the same number of tries.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
