"""The inverse of Darcy flow: from the pressure, measured with noise, to the coefficient.

  python -m mixer_jax.main --config=configs/darcy_inverse.py[:MODEL[,OPTIMIZER]] \
      [--config.data.noise=0.1]

MODEL is galerkin_inverse or another one of `models.OPERATORS` for two axes. The noise is a share of
the pressure's standard deviation at each point, drawn once for each function, of the test set, too.
The coefficient is averaged over the cells of a coarse grid, that of attention. Sizes are those of
`configs/darcy.py`: 85x85 points and 29x29; Cao (NeurIPS 2021) has `--config.data.step=3
--config.data.output_step=12 --config.model.coarse=36`.
"""

from mixer_jax import config as config_lib

OPTIMIZERS = {
  "kfac_adam": dict(learning_rate=1e-3, factor_decay=0.8),
  "adam": dict(learning_rate=1e-3, clip_norm=0.99),
}


def get_config(choice="galerkin_inverse"):
  model, optimizer = config_lib.model_and_optimizer(choice, OPTIMIZERS)
  config = config_lib.default("operator_learning", model)
  config.batch_size, config.eval_batch_size = 4, 20
  config.num_epochs = 100
  config.eval_epochs = 5.0
  config.normalise = "pointwise"
  config.data.update(name="darcy", step=5, output_step=15, inverse=True, noise=0.01)
  config.model.dirichlet = False  # coefficients are not 0 at the boundary
  if model.startswith("galerkin"):
    config.model.coarse = 29
  config.optimizer = optimizer
  config.schedule.update(name="onecycle", rise=0.3, start=1e-4, end=1e-8)
  return config
