"""A study of one's own: two widths of the quickstart's Mixer, two optimizers with equal tuning.

  python -m mixer_jax.study --study=docs/own_study.py --workdir=runs/widths
  python -m mixer_jax.report study --workdir=runs/widths

Each optimizer has eight tries in each width, on nine tenths of the training images; the best on the
last tenth is trained on all of them with three seeds and tested: 44 runs.
"""

import pathlib

from mixer_jax import study

_CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "quickstart.py"
_WIDTHS = {"narrow": 64, "wide": 256}
# Lowest and highest values of fields of config.optimizer.
_SEARCH = {
  "adam": {"learning_rate": (1e-4, 1e-2), "weight_decay": (1e-5, 1e-2)},
  "kfac_muon": {"learning_rate": (1e-3, 1e-1), "weight_decay": (1e-5, 1e-2)},
}


def config(width, optimizer):
  """The config of a cell, by a value of each axis; tuning and seeds are set by the study."""
  config = study.read_config(_CONFIG, optimizer)
  config.model.update(hidden_dim=_WIDTHS[width], channels_mlp_dim=2 * _WIDTHS[width])
  config.target = 0.0  # Adam's last accuracy is the target, see `target_of`
  return config


def get_study():
  return study.Study(
    title="Two widths",
    config=config,
    axes={"width": tuple(_WIDTHS), "optimizer": tuple(_SEARCH)},
    tuning=study.Tuning(study.halton(_SEARCH, number=8)),
    target_of="adam",
  )


def get_config(run):
  return get_study().run_config(run)
