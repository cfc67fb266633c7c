"""Features by convolutions between a grid and a coarser one, with linear interpolation.

Cao, NeurIPS 2021, Appendix C, https://arxiv.org/abs/2105.14995, in two dimensions; here in one as
well. All convolutions see the three nearest points along each axis, zeros outside, without a bias.
"""

from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.models import layers


def resize(x: jax.Array, grid: tuple[int, ...], periodic: bool = False) -> jax.Array:
  """Interpolates [batch, *any grid, channels] linearly onto another grid of the same domain."""
  for axis, points in enumerate(grid, 1):
    if x.shape[axis] != points:
      x = layers.along(axis, _weights(x.shape[axis], points, periodic), x)
  return x


def _weights(old: int, new: int, periodic: bool) -> np.ndarray:
  """The matrix [new, old] of linear interpolation; ends stay ends, or the grids go round."""
  places = np.arange(new) * (old / new) if periodic else np.linspace(0, old - 1, new)
  distance = np.abs(places[:, None] - np.arange(old))
  distance = np.minimum(distance, old - distance) if periodic else distance
  return np.maximum(0, 1 - distance)


def between(fine: tuple[int, ...], coarse: int) -> tuple[int, ...]:
  """The grid halfway, by the geometric mean: 78 points between 141 and 43, as published."""
  return tuple(round((points * coarse) ** 0.5) for points in fine)


class _ConvBlock(nn.Module):
  """A convolution, dropout, the activation."""

  features: int
  activation: Callable
  dropout_rate: float
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    size = (3,) * (x.ndim - 2)
    start = layers.uniform_start(3 ** len(size) * x.shape[-1])["kernel_init"]
    fields = dict(use_bias=False, kernel_init=start, dtype=self.dtype, name="conv")
    x = nn.Conv(self.features, size, padding="SAME", **fields)(x)
    return self.activation(layers.Dropout(self.dropout_rate, deterministic=not train)(x))


class Coarsening(nn.Module):
  """From a grid to a coarser one: a convolution, a grid between, three convolutions, the coarse.

  The three read one another and each gives a third of the features. The grids after the first
  convolution are the same whatever grid is given, so that the others see the same distances.
  """

  features: int
  grids: tuple[tuple[int, ...], tuple[int, ...]]  # between, coarse
  activation: Callable = nn.relu
  dropout_rate: float = 0.0
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, *grid, channels] to [batch, *coarse grid, features]."""
    conv = lambda n, name: _ConvBlock(n, self.activation, self.dropout_rate, self.dtype, name=name)
    x = self.activation(resize(conv(self.features, "conv0")(x, train), self.grids[0]))
    third, parts = self.features // 3, []
    for i, width in enumerate((third, third, self.features - 2 * third), 1):
      x = conv(width, f"conv{i}")(x, train)
      parts.append(x)
    return self.activation(resize(jnp.concatenate(parts, axis=-1), self.grids[1]))


class Refinement(nn.Module):
  """From a coarse grid to a finer one: a grid between, a convolution, SiLU twice, the fine."""

  grids: tuple[tuple[int, ...], tuple[int, ...]]  # between, fine
  dropout_rate: float = 0.0
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, *coarse grid, channels] to [batch, *fine grid, channels]."""
    conv = _ConvBlock(x.shape[-1], nn.silu, self.dropout_rate, self.dtype, name="conv0")
    x = conv(resize(x, self.grids[0]), train)
    x = nn.silu(layers.Dropout(self.dropout_rate, deterministic=not train)(x))
    return resize(x, self.grids[1])
