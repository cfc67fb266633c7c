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

# The best of eight settings each on the sample, by configs/studies/autoencoder.py. Adam's is the
# second: with the first, 6e-3, one of three seeds ended at a loss of 1.33, the others at 1.10.
OPTIMIZERS = {
  "kfac": dict(
    learning_rate=0.014,
    damping=3.5e-3,
    norm_constraint=1.2e-3,
    factor_decay=0.8,
    factor_period=5,
    inverse_period=20,
    weight_decay=0.0,
  ),
  "kfac_adam": dict(learning_rate=1.8e-3, b2=0.9, factor_period=5),
  "adam": dict(learning_rate=3.2e-3),
  "sgd": dict(learning_rate=8e-4, momentum=0.96),
}
# For factors of 1,025 rows: two products a step instead of four, and no basis of the widest sides.
CHEAPER = {"kfac": dict(damping_type="factored"), "kfac_adam": dict(max_factor=600)}
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
  if name not in SETS or optimizer not in OPTIMIZERS:
    allowed = f"SET,OPTIMIZER of {', '.join(SETS)} and {', '.join(OPTIMIZERS)}"
    raise UserError(f"the config takes {choice!r}; allowed: {allowed}")
  settings = dict(SETS[name])
  config = config_lib.default("autoencoding", settings.pop("model"))
  config.data.name = name
  config.batch_size = 500
  config.schedule.update(name="cosine", warmup_epochs=0.5)
  for field, value in settings.items():
    group = next((g for g in (config.model, config.data) if field in g), config)
    group[field] = value
  config.optimizer = config_lib.optimizer(optimizer, **OPTIMIZERS[optimizer])
  if optimizer.startswith("kfac"):
    config.optimizer.factor_fraction = 0.25  # enough of 500 examples for averages of these factors
  if name != "sample":
    config.optimizer.update(CHEAPER.get(optimizer, {}))
  return config
