"""A task of seconds whose batches come in buckets: the next number of a row, token by token."""

import dataclasses
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

from mixer_jax import tasks
from mixer_jax.data.dataset import Arrays, Bucketed
from mixer_jax.options import Option
from mixer_jax.tasks.metrics import WeightedSum

NUMBERS, LONGEST = 7, 12


class Net(nn.Module):
  width: Annotated[int, Option("channels", 1, 100)] = 8

  @nn.compact
  def __call__(self, ids):
    x = nn.tanh(nn.Dense(self.width)(nn.Embed(NUMBERS, self.width)(ids)))
    return nn.Dense(NUMBERS)(x)


@dataclasses.dataclass(frozen=True)
class Rows:
  examples: Annotated[int, Option("of training", 1, 1000)] = 150
  batch_tokens: Annotated[int, Option("of a batch", 1, 1000)] = 96


class NextNumber(tasks.BaseTask):
  options = {"model": Net, "data": Rows}
  metrics = (tasks.Metric("loss", higher_is_better=False),)
  likelihood = "categorical"

  def __init__(self, config):
    self.data, self.model = config.data, Net(config.model.width)

  def datasets(self):
    train, test = self._rows(0, self.data.examples), self._rows(1, 40)
    own = (train["length"][:, None], self.data.batch_tokens, 3)
    return {"train": Bucketed(train, *own), "test": Arrays(test)}

  def _rows(self, seed, n):
    """Numbers that go up by one, with mistakes, and rubbish from their length on."""
    rng = np.random.default_rng(seed)
    ids = (rng.integers(NUMBERS, size=(n, 1)) + np.arange(LONGEST)) % NUMBERS
    wrong = rng.uniform(size=ids.shape) < 0.1
    ids = np.where(wrong, rng.integers(NUMBERS, size=ids.shape), ids).astype(np.int32)
    length = np.minimum(2 + rng.geometric(0.3, n), LONGEST).astype(np.int32)
    length[0] = LONGEST
    return {"ids": ids, "length": length}

  def init(self, key):
    return self.model.init(key, jnp.zeros((1, 2), jnp.int32))

  def prepare(self, key, examples, *, train):
    targets = examples["ids"][:, 1:]
    real = jnp.arange(1, targets.shape[1] + 1) < examples["length"][:, None]
    return {"ids": examples["ids"][:, :-1], "targets": targets, "weights": real * 1.0}

  def loss(self, variables, batch, key):
    loss = self.evaluate(variables, batch, jnp.ones(len(batch["ids"])))["loss"]
    return loss, tasks.Aux({"loss": loss})

  def predict(self, variables, batch):
    logits = self.model.apply(variables, batch["ids"])
    return tasks.Prediction(logits, batch["targets"], batch["weights"])

  def evaluate(self, variables, batch, mask):
    logits, targets, weights, _ = self.predict(variables, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return {"loss": WeightedSum.of(losses, weights * mask[:, None])}
