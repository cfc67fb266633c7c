"""A task with a collection that the loss changes, one that is frozen, and a validation split."""

import jax
import jax.numpy as jnp

from docs.own_task import Derivative

KEPT = 0.9  # of the running mean at a step


class WithCollections(Derivative):
  """Derivatives of functions from which a running mean is taken, plus frozen ones."""

  def datasets(self):
    further = {"validation": self.data.split(2, 64), "noisy": self.data.split(3, 40)}
    return super().datasets() | further

  def init(self, key):
    points = self.data.points
    frozen = {"offset": jax.random.normal(key, (points,))}
    return super().init(key) | {"statistics": {"mean": jnp.zeros(points)}, "frozen": frozen}

  def _own(self, variables, batch):
    """Parameters alone, and the batch as the model sees it."""
    x = batch["x"] - variables["statistics"]["mean"] + variables["frozen"]["offset"]
    return {"params": variables["params"]}, batch | {"x": x}

  def loss(self, variables, batch, key):
    loss, aux = super().loss(*self._own(variables, batch), key)
    mean = KEPT * variables["statistics"]["mean"] + (1 - KEPT) * jnp.mean(batch["x"], axis=0)
    return loss, aux._replace(collections={"statistics": {"mean": mean}})

  def predict(self, variables, batch):
    if "statistics" in variables:
      variables, batch = self._own(variables, batch)
    return super().predict(variables, batch)
