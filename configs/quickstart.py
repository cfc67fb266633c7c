"""A small Mixer learns 5,000 real CIFAR-10 images with K-FAC on a CPU.

  python -m mixer_jax.main --config=configs/quickstart.py[:sgd|adam|kfac]
"""

from mixer_jax import config as config_lib

_OPTIMIZERS = {
    "sgd": dict(learning_rate=0.05, weight_decay=1e-4),
    "adam": dict(learning_rate=1e-3, weight_decay=1e-4),
    "kfac": dict(learning_rate=0.01, inverse_period=20),
}


def get_config(optimizer="kfac"):
  config = config_lib.default()
  config.num_epochs = 10
  config.model = config_lib.model(
      "mixer_small", hidden_dim=128, num_blocks=4, tokens_mlp_dim=64, channels_mlp_dim=256
  )
  config.data = config_lib.data("sample")
  config.optimizer = config_lib.optimizer(optimizer, **_OPTIMIZERS[optimizer])
  config.schedule.update(name="cosine", warmup_epochs=0.5)
  return config
