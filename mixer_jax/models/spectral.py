"""Convolutions of functions on a grid by their lowest Fourier modes.

Li et al., "Fourier neural operator for parametric partial differential equations", ICLR 2021,
https://arxiv.org/abs/2010.08895.
"""

from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.models import layers


def smallest_grid(modes: int, rank: int) -> tuple[int, ...]:
  """The fewest points along each of one or two axes that so many modes need.

  Along the last axis a mode stands for both signs of its frequency, along the other for one.
  """
  return (2 * modes, max(2 * modes - 2, 1))[-rank:]


def too_small(grid: tuple[int, ...], modes: int) -> bool:
  """Whether a grid has too few points for the modes."""
  return any(n < least for n, least in zip(grid, smallest_grid(modes, len(grid)), strict=True))


def shown(grid: tuple[int, ...]) -> str:
  """A grid for a message: "64x32"."""
  return "x".join(map(str, grid))


class SpectralConv(nn.Module):
  """y = irfft(W rfft(x)): a complex matrix W for each low mode, zero for the others (Equation 4).

  A mode's matrix is stored as the real kernel [Re W; Im W], [2 * channels, features], and acts on
  two rows an example, [Re x, -Im x] to Re y and [Im x, Re x] to Im y. So each mode has a dense layer
  over two tokens, and K-FAC has its factors. In two dimensions the modes are
  0 to modes - 1 along both axes, then -modes to -1 along the first.

  The transforms divide by the number of points on the way there: any division that returns gives
  the same function, and this one makes the rows Fourier coefficients, alike on every grid.
  """

  features: int
  modes: int
  kernel_init: Callable
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [batch, *grid, channels] to [batch, *grid, features], one or two axes of a grid.

    Raises a ValueError if the grid has too few points for the modes.
    """
    grid, modes = x.shape[1:-1], self.modes
    if too_small(grid, modes):
      least = shown(smallest_grid(modes, len(grid)))
      raise ValueError(
        f"{shown(grid)} points are too few for {modes} modes; allowed: {least} or more"
      )
    # Transforms are float32 always.
    x = _spectrum(x.astype(jnp.float32), modes)  # [modes, batch, 2, channels]
    rows = jnp.concatenate([x, jnp.stack([-x[:, :, 1], x[:, :, 0]], axis=2)], axis=-1)
    y = self._of_each_mode(rows).astype(jnp.float32)
    return _function(y, modes, grid).astype(self.dtype)

  def _of_each_mode(self, rows: jax.Array) -> jax.Array:
    """Maps [modes, batch, 2, 2 * channels] to [modes, batch, 2, features]."""
    dense = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
    fields = dict(use_bias=False, kernel_init=self.kernel_init, dtype=self.dtype)
    return dense(self.features, **fields, dot_general=layers.flat_product, name="modes")(rows)


# Products with matrices of waves, not FFTs, since few modes are kept: they take a half to a tenth of
# the time on a CPU, forward and backward, and the channels stay the last axis.


def _spectrum(x: jax.Array, modes: int) -> jax.Array:
  """Low Fourier coefficients of [batch, *grid, channels]: [modes, batch, 2, channels].

  The 2 are real and imaginary part. In two dimensions the modes of the last axis run fastest.
  """
  batch, grid, channels = len(x), x.shape[1:-1], x.shape[-1]
  waves = _waves(np.arange(modes), grid[-1]).conj() / grid[-1]
  x = layers.along(-2, np.concatenate([waves.real, waves.imag]), x)
  if len(grid) == 1:
    return x.reshape(batch, 2, modes, channels).transpose(2, 0, 1, 3)
  x = x.reshape(batch, grid[0] * 2, modes * channels)
  x = layers.along(1, _real(_waves(_signed(modes), grid[0]).conj() / grid[0]), x)
  x = x.reshape(batch, 2 * modes, 2, modes, channels).transpose(1, 3, 0, 2, 4)
  return x.reshape(2 * modes**2, batch, 2, channels)


def _function(y: jax.Array, modes: int, grid: tuple[int, ...]) -> jax.Array:
  """The real function [batch, *grid, channels] of such coefficients, zero beyond them."""
  batch, channels = y.shape[1], y.shape[-1]
  if len(grid) == 1:
    y = y.transpose(1, 2, 0, 3)
  else:
    y = y.reshape(2 * modes, modes, batch, 2, channels).transpose(2, 0, 3, 1, 4)
    waves = _real(_waves(_signed(modes), grid[0]).T)
    y = layers.along(1, waves, y.reshape(batch, 4 * modes, modes * channels))
  y = y.reshape(batch, *grid[:-1], 2 * modes, channels)
  k = np.arange(modes)
  # All but the mean and the Nyquist frequency stand for both signs.
  waves = np.where((k == 0) | (2 * k == grid[-1]), 1, 2) * _waves(k, grid[-1]).T
  return layers.along(-2, np.concatenate([waves.real, -waves.imag], axis=1), y)


def _signed(modes: int) -> np.ndarray:
  return np.concatenate([np.arange(modes), np.arange(-modes, 0)])


def _waves(frequencies: np.ndarray, points: int) -> np.ndarray:
  """exp(2 pi i k n / points), [frequencies, points]; remainders keep long grids as accurate."""
  return np.exp(2j * np.pi / points * (frequencies[:, None] * np.arange(points) % points))


def _real(matrix: np.ndarray) -> np.ndarray:
  """A complex matrix [m, n] as a real one of pairs (real, imaginary): [2 m, 2 n]."""
  parts = np.array([[matrix.real, -matrix.imag], [matrix.imag, matrix.real]])
  return parts.transpose(2, 0, 3, 1).reshape(2 * len(matrix), -1)


class SpectralBlock(nn.Module):
  """activation(SpectralConv(x) + x V + b); dropout acts only on the x of the first term."""

  features: int
  modes: int
  kernel_init: Callable
  activation: Callable = nn.silu
  dropout_rate: float = 0.0
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, *grid, channels] to [batch, *grid, features]."""
    start = layers.uniform_start(x.shape[-1])
    y = layers.Dense(self.features, dtype=self.dtype, name="skip", **start)(x)
    x = layers.Dropout(self.dropout_rate, deterministic=not train)(x)
    conv = SpectralConv(self.features, self.modes, self.kernel_init, self.dtype, name="conv")
    return self.activation(conv(x) + y)
