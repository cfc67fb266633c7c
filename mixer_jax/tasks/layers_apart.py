"""A model as K-FAC sees it: one block after the other, where training loops over them."""

from typing import Any, Callable

import flax.linen as nn

from mixer_jax import models
from mixer_jax.tasks.task import Batch, Prediction, Variables

Predict = Callable[[Variables, Batch], Prediction]


def view(model: nn.Module, predict: Callable[[nn.Module], Predict]) -> tuple[Predict, Any]:
  """A task's `curvature_view`: `predict` of the model with its blocks apart, and their layout."""
  apart = predict(models.apart(model))
  if not getattr(model, "scan_blocks", False):
    return apart, None
  from mixer_jax.optim import Layout  # of all optimizers' code only K-FAC's needs it

  return apart, Layout(models.unrolled, models.stacked)
