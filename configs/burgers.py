"""The solution operator of Burgers' equation, from the function at time 0 to that at time 1.

  python -m mixer_jax.main --config=configs/burgers.py[:MODEL[,OPTIMIZER]]

MODEL is galerkin_1d, fno_1d, mixer_operator or another one of `models.OPERATORS` for one axis. The 1,024
training and 100 test functions are generated at the first start, on 8,192 points, and every 16th
is taken: `--config.data.step=4` trains on 2,048. OPTIMIZER is kfac_adam, at the rate that tuning
found for Galerkin attention, or, for all other operators, for FNO; ekfac, whose tuned settings are
those of both; or adam, at the published rate. 1cycle, 100 epochs and batches of 8 are those of Cao
(NeurIPS 2021).
"""

from mixer_jax import config as config_lib

OPTIMIZERS = {
  "kfac_adam": dict(learning_rate=2.5e-3, factor_decay=0.8, weight_decay=0.0),
  "adam": dict(learning_rate=1e-3, clip_norm=0.999),
  # With K-FAC's own eigenvalues Galerkin attention diverges (docs/results.md).
  "ekfac": dict(
    name="kfac",
    learning_rate=5e-3,
    damping=1.5e-3,
    factor_decay=0.8,
    factor_period=10,
    inverse_period=50,
    eigenvalues="batch",
    weight_decay=0.0,
  ),
}


def get_config(choice="galerkin_1d"):
  model, optimizer = config_lib.model_and_optimizer(choice, OPTIMIZERS)
  config = config_lib.default("operator_learning", model)
  config.batch_size, config.eval_batch_size = 8, 20
  config.num_epochs = 100
  config.eval_epochs = 5.0
  config.h1 = 0.1
  config.data.update(name="burgers", step=16)
  if model.startswith(("galerkin", "fno")):  # all-MLPs keep to one grid
    config.data.extra_test_steps = "4"
  config.optimizer = optimizer
  if optimizer.name == "kfac_adam" and model.startswith("galerkin"):
    config.optimizer.learning_rate = 3.8e-3
  config.schedule.update(name="onecycle", rise=0.2, start=1e-4, end=1e-8)
  return config
