"""The solution operator of Darcy flow: from the coefficient to the pressure.

  python -m mixer_jax.main --config=configs/darcy.py[:MODEL[,OPTIMIZER]]

MODEL is galerkin_2d or another one of `models.OPERATORS` for two axes. Coefficients are 3 and 12,
piecewise constant, on 421x421 points, which are generated at the first start. Every 5th point is
taken, 85x85, and attention sees 29x29: the small setting of Cao (NeurIPS 2021). The large one has
`--config.data.step=3 --config.model.coarse=43`.
"""

from mixer_jax import config as config_lib

OPTIMIZERS = {
  "kfac_adam": dict(learning_rate=1e-3, weight_decay=0.0, factor_decay=0.8),
  "adam": dict(learning_rate=1e-3, clip_norm=0.99),
}


def get_config(choice="galerkin_2d"):
  model, optimizer = config_lib.model_and_optimizer(choice, OPTIMIZERS)
  config = config_lib.default("operator_learning", model)
  config.batch_size, config.eval_batch_size = 4, 20
  config.num_epochs = 100
  config.eval_epochs = 5.0
  config.update(h1=0.5, normalise="pointwise")
  config.data.update(name="darcy", step=5)
  if model.startswith("galerkin"):
    config.model.coarse = 29
  config.optimizer = optimizer
  config.schedule.update(name="onecycle", rise=0.3, start=1e-4, end=1e-8)
  return config
