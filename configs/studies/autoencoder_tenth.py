"""The small deep autoencoder in about a tenth of the time of `autoencoder.py`.

  python -m mixer_jax.study --study=configs/studies/autoencoder_tenth.py --workdir=DIR

Does K-FAC reach in this time the training loss that Adam has at the end of `autoencoder.py`? On one
core of an AMD EPYC a run trains for about a second. The optimizers have the tries of that study.
K-FAC alone has as many others, with higher rates and lower dampings, and factored damping, with
which a step costs less.
"""

import dataclasses
import pathlib

from mixer_jax import study

_LONG = pathlib.Path(__file__).parent / "autoencoder.py"
_EPOCHS = {
  "b100": {"sgd": 20, "adam": 17, "kfac": 7, "kfac_adam": 5},
  "b500": {"sgd": 30, "adam": 30, "kfac": 18, "kfac_adam": 14},
}
_SEARCH = {
  "kfac": {
    "learning_rate": (2e-2, 2.0),
    "damping": (1e-4, 1e-2),
    "norm_constraint": (1e-3, 0.1),
  },
}


def config(batch, optimizer):
  config = study.read_config(_LONG, f"sample-{batch}-{optimizer}-seed0")
  config.num_epochs = config.checkpoint_epochs = _EPOCHS[batch][optimizer]
  config.eval_epochs = config.num_epochs / 10  # equal numbers of steps
  if optimizer == "kfac":
    config.optimizer.damping_type = "factored"
  return config


def get_study():
  tuning = study.load(str(_LONG)).tuning
  own = study.halton(_SEARCH, len(tuning.candidates["kfac"]))
  return study.Study(
    title="A deep autoencoder in about a tenth of the time",
    config=config,
    axes={"batch": tuple(_EPOCHS), "optimizer": tuple(tuning.candidates)},
    lines=("batch", "optimizer"),
    tuning=dataclasses.replace(tuning, candidates={**tuning.candidates, **own}),
  )


def get_config(run):
  return get_study().run_config(run)
