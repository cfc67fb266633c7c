"""AdamW, Muon and K-FAC's family on sentiment, equally tuned; `mlm_optimizers.py` is on words.

  python -m mixer_jax.study --study=configs/studies/sst2_optimizers.py --workdir=DIR

A small gMLP learns from scratch from the bundled part of SST-2, 6,697 sentences. Six settings of
each optimizer are drawn from quasi-random sequences and tried on the dev set; the best is run with
three seeds and tested on the test set.
"""

import functools
import pathlib

from mixer_jax import config as config_lib
from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
_TRIALS = 6
# A factor over all words would take longer than the rest of the step.
_FAMILY = dict(max_factor=2048, factor_decay=0.8)
_SETTINGS = {
  # "expand", since sentences are padded.
  "ekfac": dict(
    eigenvalues="batch", token_averaging="expand", factor_period=10, inverse_period=50, **_FAMILY
  ),
  "kfac_adam": _FAMILY,
  "kfac_muon": _FAMILY,
}
# Lowest and highest values; logarithms are drawn uniformly.
_DECAY = {"weight_decay": (1e-3, 1.0)}
_RATES = {"learning_rate": (3e-4, 1e-2)} | _DECAY
_SEARCH = {
  "adamw": _RATES,
  "muon": _RATES,
  "ekfac": {"learning_rate": (1e-3, 1e-1), "damping": (1e-4, 1e-1)},
  "kfac_adam": _RATES,
  "kfac_muon": _RATES,
}


def _config(task, num_epochs, optimizer):
  config = study.read_config(_HERE.parent / f"{task}.py", "gmlp_text_small,adamw")
  name = "kfac" if optimizer == "ekfac" else optimizer
  config.optimizer = config_lib.optimizer(name, 1e-3, **_SETTINGS.get(optimizer, {}))
  config.data.update(max_length=64, validation_split="", test_split="test")
  config.num_epochs = num_epochs
  config.eval_epochs = config.schedule.warmup_epochs = num_epochs / 10
  return config


def of_task(title, task, num_epochs):
  """The study of configs/TASK.py."""
  return study.Study(
    title=title,
    config=functools.partial(_config, task, num_epochs),
    axes={"optimizer": tuple(_SEARCH)},
    lines=("optimizer",),
    tuning=study.Tuning(study.halton(_SEARCH, _TRIALS), hold_out={"data.test_split": "dev"}),
    target_of="adamw",
    notes=["Each optimizer had six tries. The target is the mean with which tuned AdamW ends."],
  )


def get_study():
  return of_task("Optimizers on the sentiment of SST-2, from scratch", "sst2", 3)


def get_config(run):
  return get_study().run_config(run)
