"""Cheaper K-FAC: its step with less exact damping, fewer examples or fewer sides, on S/4 and B/4.

  python -m benchmarks costs --study=configs/studies/costs.py --run='s4-*' --rounds=3

The images are the bundled sample's, in batches of 64. Factors are renewed every 10 steps, inverses
and bases every 100, as published.
"""

import pathlib

from mixer_jax import config as config_lib
from mixer_jax import study

_CONFIG = pathlib.Path(__file__).parent.parent / "kfac_cifar10.py"
_QUARTER = dict(factor_fraction=0.25)
_FACTORED = dict(damping_type="factored")
_KFAC = dict(factor_period=10, inverse_period=100)
_BASIS = dict(factor_period=10, basis_period=100)
_WIDTH = {"s4": 512, "b4": 768}
_OPTIMIZERS = {
  "sgd": ("sgd", {}),
  "muon": ("muon", {}),
  "kfac": ("kfac", _KFAC),
  "kfac_quarter": ("kfac", _KFAC | _QUARTER),
  "kfac_factored": ("kfac", _KFAC | _FACTORED),
  "kfac_factored_quarter": ("kfac", _KFAC | _FACTORED | _QUARTER),
  "kfac_one_sided": ("kfac", _KFAC),
  "kfac_one_sided_quarter": ("kfac", _KFAC | _QUARTER),
  "kfac_adam": ("kfac_adam", _BASIS),
  "kfac_adam_one_sided": ("kfac_adam", _BASIS),
  "kfac_adam_one_sided_quarter": ("kfac_adam", _BASIS | _QUARTER),
  "kfac_muon_one_sided_quarter": ("kfac_muon", _BASIS | _QUARTER),
}


def config(model, optimizer):
  config = study.read_config(_CONFIG, model)
  config.data = config_lib.data("sample")
  name, settings = _OPTIMIZERS[optimizer]
  config.optimizer = config_lib.optimizer(name, 1e-3, **settings)
  if "one_sided" in optimizer:
    # Channel mixing's hidden side has K-FAC's diagonal alone, and no basis.
    config.optimizer.max_factor = _WIDTH[model] + 1
  return config


def get_study():
  return study.Study(
    title="Cheaper K-FAC",
    config=config,
    axes={"model": tuple(_WIDTH), "optimizer": tuple(_OPTIMIZERS)},
    seeds=(0,),
  )


def get_config(run):
  return get_study().run_config(run)
