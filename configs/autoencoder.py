"""Deep autoencoders, on which second-order methods were first compared with SGD.

  python -m mixer_jax.main --config=configs/autoencoder.py[:sample|cifar10|mnist[,kfac|kfac_adam|adam|sgd]]

Hinton and Salakhutdinov (Science, 2006) trained them layer by layer, Martens and
Grosse (2015, https://arxiv.org/abs/1503.05671) with K-FAC from scratch. `sample`
is a small one for the bundled images, grey at 16x16 pixels; `cifar10` has the
widths of the published one for MNIST, grey at 32x32; `mnist` is that one, of
sigmoid units and the cross-entropy of pixels.
"""

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

# Of 500 images a quarter is enough for averages of the factors.
_FACTORS = dict(factor_period=5, factor_fraction=0.25)
_ALL = {
  "kfac": dict(factor_decay=0.8, inverse_period=20, weight_decay=0.0, **_FACTORS),
  "kfac_adam": _FACTORS,
}
# For factors of 1,025 rows: two products a step instead of four, and no basis of the widest sides.
_WIDE = {"kfac": dict(damping_type="factored"), "kfac_adam": dict(max_factor=600)}
# The best of eight settings with batches of 500 and eight with batches of 100, by the study
# configs/studies/autoencoder.py; K-FAC had batches of 500 alone on the wide nets. Runs on the wide
# nets have two to eight epochs. Of 100 images the factors take all: factor_fraction=None.
OPTIMIZERS = {
  "sample": {
    "kfac": dict(learning_rate=0.018, damping=3.6e-3, norm_constraint=0.021),
    "kfac_adam": dict(learning_rate=2.7e-3, b2=0.92),
    "adam": dict(batch_size=100, learning_rate=3.2e-3),
    "sgd": dict(batch_size=100, learning_rate=1.9e-3, momentum=0.92),
  },
  "cifar10": {
    "kfac": dict(learning_rate=0.056, damping=9.9e-3, norm_constraint=3.3e-3, **_WIDE["kfac"]),
    "kfac_adam": dict(
      batch_size=100, factor_fraction=None, learning_rate=8.4e-4, b2=0.97, **_WIDE["kfac_adam"]
    ),
    "adam": dict(batch_size=100, learning_rate=5.6e-4),
    "sgd": dict(batch_size=100, learning_rate=1.9e-4, momentum=0.9),
  },
  "mnist": {
    "kfac": dict(learning_rate=0.1, damping=2.1e-3, norm_constraint=0.01, **_WIDE["kfac"]),
    "kfac_adam": dict(learning_rate=8.4e-3, b2=0.94, **_WIDE["kfac_adam"]),
    "adam": dict(batch_size=100, learning_rate=5.6e-3),
    "sgd": dict(batch_size=100, learning_rate=1.9e-3, momentum=0.92),
  },
}
SETS = {
  "sample": dict(model="autoencoder_small", num_epochs=100),
  "cifar10": dict(model="autoencoder_mnist", num_epochs=50, image_size=32),
  "mnist": dict(
    model="autoencoder_mnist",
    num_epochs=50,
    image_size=28,
    likelihood="bernoulli",
    activation="sigmoid",
    initializer="sparse",
  ),
}


def get_config(choice="sample,kfac"):
  name, comma, optimizer = choice.partition(",")
  optimizer = optimizer if comma else "kfac"
  if name not in SETS or optimizer not in OPTIMIZERS[name]:
    allowed = f"SET,OPTIMIZER of {', '.join(SETS)} and {', '.join(OPTIMIZERS['sample'])}"
    raise UserError(f"the config takes {choice!r}; allowed: {allowed}")
  settings = dict(SETS[name])
  config = config_lib.default("autoencoding", settings.pop("model"))
  config.data.name = name
  own = _ALL.get(optimizer, {}) | OPTIMIZERS[name][optimizer]
  config.batch_size = own.pop("batch_size", 500)
  config.schedule.update(name="cosine", warmup_epochs=config.batch_size / 1000)
  for field, value in settings.items():
    group = next((g for g in (config.model, config.data) if field in g), config)
    group[field] = value
  config.optimizer = config_lib.optimizer(optimizer, **own)
  return config
