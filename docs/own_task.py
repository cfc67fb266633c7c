"""A task of your own, outside the package: regression of functions on a grid, trained with K-FAC.

  python -m mixer_jax.main --config=docs/own_task.py --workdir=runs/waves

Each example is a sum of waves, sampled where its mask is 1. The task is to give its
derivative there. `mixer_jax.evaluate`, `predict`, `report` and studies take it as any other.
"""

import dataclasses
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from mixer_jax import config as config_lib
from mixer_jax import tasks
from mixer_jax.data.dataset import Arrays
from mixer_jax.options import Option


class Mlp(nn.Module):
  """From values on a grid [batch, points] and their mask to values there."""

  width: Annotated[int, Option("units of both hidden layers", 1, 10**4)] = 128

  @nn.compact
  def __call__(self, values, mask):
    x = jnp.concatenate([values * mask, mask], axis=1)
    for _ in range(2):
      x = nn.tanh(nn.Dense(self.width)(x))
    return nn.Dense(values.shape[1])(x)


@dataclasses.dataclass(frozen=True)
class Waves:
  """Random functions and their derivatives on a grid."""

  points: Annotated[int, Option("points of the grid", 8, 10**4)] = 32
  examples: Annotated[int, Option("training functions; a quarter as many test it", 64, 10**7)] = (
    2048
  )

  def split(self, seed: int, n: int) -> Arrays:
    rng = np.random.default_rng(seed)
    grid, k = np.arange(self.points) / self.points, np.arange(1, 4)
    size, shift = rng.normal(size=(2, n, 3, 1)) * np.array([1, np.pi])[:, None, None, None]
    angle = 2 * np.pi * k[:, None] * grid + shift
    arrays = dict(
      x=(size / k[:, None] * np.sin(angle)).sum(1),
      y=(size * np.cos(angle)).sum(1),
      mask=rng.uniform(size=(n, self.points)) < 0.9,
    )
    return Arrays({name: array.astype(np.float32) for name, array in arrays.items()})


class Derivative(tasks.BaseTask):
  options = {"model": Mlp, "data": Waves}
  metrics = (tasks.Metric("error", higher_is_better=False),)  # root mean square
  likelihood = "normal"

  def __init__(self, config):
    self.model, self.data = Mlp(**config.model), Waves(**config.data)

  def datasets(self):
    n = self.data.examples
    return {"train": self.data.split(0, n), "test": self.data.split(1, n // 4)}

  def init(self, key):
    example = jnp.zeros((1, self.data.points))
    return self.model.init(key, example, example)

  def prepare(self, key, examples, *, train):
    return examples

  def loss(self, variables, batch, key):
    squares = jnp.square(self.model.apply(variables, batch["x"], batch["mask"]) - batch["y"])
    error = tasks.RootMeanSquare.of(squares, batch["mask"])
    return tasks.WeightedSum.of(squares, batch["mask"]), tasks.Aux({"error": error})

  def predict(self, variables, batch):
    outputs = self.model.apply(variables, batch["x"], batch["mask"])
    return tasks.Prediction(outputs, batch["y"], batch["mask"])

  def evaluate(self, variables, batch, mask):
    outputs, targets, weights, _ = self.predict(variables, batch)
    weights = weights * mask[:, None]
    return {"error": tasks.RootMeanSquare.of(jnp.square(outputs - targets), weights)}


def get_config():
  config = config_lib.default("docs.own_task:Derivative")
  config.num_epochs = 10
  config.optimizer = config_lib.optimizer(
    "kfac", learning_rate=0.05, damping=1e-2, factor_decay=0.8
  )
  config.schedule.update(name="cosine", warmup_epochs=0.5)
  return config
