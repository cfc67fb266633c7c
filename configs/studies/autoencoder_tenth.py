"""The small deep autoencoder in about a tenth of the time of `autoencoder.py`.

  python -m mixer_jax.study --study=configs/studies/autoencoder_tenth.py --workdir=DIR

Does K-FAC reach in this time the training loss that Adam has at the end of `autoencoder.py`? On one
core of an AMD EPYC a run trains for about a second. Each optimizer has as many tries as there. K-FAC
alone has other ranges, with higher rates and lower dampings, and factored damping, with which a step
costs less.
"""

import pathlib

from mixer_jax import study

_STUDY = pathlib.Path(__file__).parent / "autoencoder.py"
_TRIALS = 8
_EPOCHS = {
  "b100": {"sgd": 20, "adam": 17, "kfac": 7, "kfac_adam": 5},
  "b500": {"sgd": 30, "adam": 30, "kfac": 18, "kfac_adam": 14},
}
_SEARCH = {
  "sgd": {"learning_rate": (1e-4, 5e-2), "momentum": (0.9, 0.99)},
  "adam": {"learning_rate": (2e-4, 2e-2)},
  "kfac": {
    "learning_rate": (2e-2, 2.0),
    "damping": (1e-4, 1e-2),
    "norm_constraint": (1e-3, 0.1),
  },
  "kfac_adam": {"learning_rate": (3e-4, 3e-2), "b2": (0.9, 0.99)},
}


def config(batch, optimizer):
  config = study.read_config(_STUDY, f"sample-{batch}-{optimizer}-seed0")
  config.num_epochs = config.checkpoint_epochs = _EPOCHS[batch][optimizer]
  config.eval_epochs = config.num_epochs / 10  # equal numbers of steps
  if optimizer == "kfac":
    config.optimizer.damping_type = "factored"
  return config


def get_study():
  return study.Study(
    title="A deep autoencoder in about a tenth of the time",
    config=config,
    axes={"batch": tuple(_EPOCHS), "optimizer": tuple(_SEARCH)},
    lines=("batch", "optimizer"),
    tuning=study.Tuning(
      study.halton(_SEARCH, _TRIALS), hold_out={"data.test_split": "train", "eval_epochs": 300.0}
    ),
  )


def get_config(run):
  return get_study().run_config(run)
