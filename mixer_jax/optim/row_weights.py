"""Weights of the rows of outputs: padding and hidden tokens have 0."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def like(weights: Any, outputs: Any) -> Any:
  """Weights without trailing axes of 1, which must begin the shape of the outputs."""
  shape = weights.shape
  while len(shape) > 1 and shape[-1] == 1:
    shape = shape[:-1]
  if shape != outputs.shape[: len(shape)] or not shape:
    raise ValueError(
      f"weights have shape {tuple(weights.shape)}; allowed for outputs {tuple(outputs.shape)}:"
      f" {', '.join(str(outputs.shape[:n]) for n in range(1, outputs.ndim + 1))}"
    )
  return weights.reshape(shape) if hasattr(weights, "reshape") else weights


def rows(weights: jax.Array | None, outputs: jax.Array) -> jax.Array:
  """The sum of the weights of rows; a row of outputs with weights of their own has the largest."""
  if weights is None:
    return jnp.float32(math.prod(outputs.shape[:-1]))
  if weights.ndim == outputs.ndim:
    total = weights.max(axis=-1).sum()
  else:
    total = weights.sum() * math.prod(outputs.shape[weights.ndim : -1])
  return jnp.maximum(total, 1e-30)  # a batch of padding alone


def scales(weights: jax.Array | None, y: jax.Array) -> jax.Array:
  """The square roots of the weights, as outputs y are scaled by them."""
  if weights is None:
    return jnp.ones(())
  return jnp.sqrt(weights).reshape(*weights.shape, *(1,) * (y.ndim - weights.ndim))
