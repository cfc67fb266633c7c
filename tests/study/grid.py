"""A study that is cheap to plan; no net is ever trained in it."""

from mixer_jax import config as config_lib


def tiny(model, optimizer):
  """A config that is cheap to make; nothing trains it."""
  config = config_lib.default()
  config.num_epochs = 3
  config.model.num_blocks = int(model[1:])
  config.optimizer = config_lib.optimizer(optimizer, learning_rate=0.1)
  config.target_accuracy = 0.5
  return config


GRID = dict(title="t", config=tiny, axes={"model": ("m1", "m2"), "optimizer": ("sgd", "adam")})
