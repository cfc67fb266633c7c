"""A small Mixer learns 5,000 real CIFAR-10 images in one to five minutes on a CPU.

  python -m mixer_jax.main --config=configs/quickstart.py[:kfac_muon|kfac_adam|kfac|muon|sgd|adam]

Muon in K-FAC's metric is the default. Rates, weight decays and K-FAC's damping are those that
eight tries of each optimizer found (configs/studies/quickstart.py). The rate of the default is 0.0145,
not their 0.02: a rate three times as high then costs less (docs/results.md).
"""

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

OPTIMIZERS = {
  # Without the wide sides of channel MLPs a step costs less and is no worse. Larger patches than 8
  # keep both sides of the stem.
  "kfac_muon": dict(
    learning_rate=0.0145, weight_decay=3.9e-3, max_factor=257, full_factors="^stem/"
  ),
  "kfac_adam": dict(learning_rate=0.016, weight_decay=1.3e-5),
  "kfac": dict(learning_rate=0.039, damping=0.012, weight_decay=3.9e-3),
  "muon": dict(learning_rate=9.6e-3, weight_decay=2.8e-3),
  "sgd": dict(learning_rate=0.045, weight_decay=1.5e-3),
  "adam": dict(learning_rate=3.8e-3, weight_decay=1.9e-4),
}


def get_config(optimizer="kfac_muon"):
  if optimizer not in OPTIMIZERS:
    allowed = ", ".join(OPTIMIZERS)
    raise UserError(f"the config takes the optimizer {optimizer!r}; allowed: {allowed}")
  config = config_lib.default()
  config.num_epochs = 10
  config.model = config_lib.model(
    "mixer_small",
    patch_size=8,
    hidden_dim=256,
    num_blocks=4,
    tokens_mlp_dim=64,
    channels_mlp_dim=512,
  )
  config.data = config_lib.data("sample")
  config.optimizer = config_lib.optimizer(optimizer, **OPTIMIZERS[optimizer])
  config.schedule.update(name="cosine", warmup_epochs=0.5)
  config.target = 0.45
  return config
