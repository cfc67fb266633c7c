"""A convolutional network on small images: a teacher for `configs/distill_cifar.py`.

  python -m mixer_jax.main --config=configs/resnet_cifar.py[:resnet_20|resnet_56] \
      --workdir=runs/teacher [--config.data.name=cifar10]

SGD with momentum, cosine, padded crops and flips; 5,000 images of the bundled sample by default.
"""

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

MODELS = ("resnet_20", "resnet_56")


def get_config(model="resnet_20"):
  if model not in MODELS:
    raise UserError(f"the config takes the model {model!r}; allowed: {', '.join(MODELS)}")
  config = config_lib.default(model=model)
  config.data = config_lib.data("sample")
  config.num_epochs, config.batch_size = 50, 128
  config.optimizer = config_lib.optimizer("sgd", learning_rate=0.1, momentum=0.9, weight_decay=5e-4)
  config.schedule.name = "cosine"
  return config
