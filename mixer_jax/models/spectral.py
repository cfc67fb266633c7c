"""Convolutions of functions on a grid by their lowest Fourier modes.

Li et al., "Fourier neural operator for parametric partial differential equations", ICLR 2021,
https://arxiv.org/abs/2010.08895.
"""

from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

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

    A ValueError if the grid has too few points for the modes.
    """
    grid, modes = x.shape[1:-1], self.modes
    axes = tuple(range(2, x.ndim))
    if too_small(grid, modes):
      least = shown(smallest_grid(modes, len(grid)))
      raise ValueError(
        f"{shown(grid)} points are too few for {modes} modes; allowed: {least} or more"
      )
    # Transforms are float32 always.
    x = jnp.moveaxis(x, -1, 1).astype(jnp.float32)
    x = jnp.fft.rfftn(x, axes=axes, norm="forward")[..., :modes]
    if len(grid) == 2:
      x = jnp.concatenate([x[:, :, :modes], x[:, :, -modes:]], axis=2)
    low = x.shape[2:]
    x = jnp.moveaxis(x.reshape(*x.shape[:2], -1), 2, 0)  # [modes, batch, channels]
    rows = [jnp.concatenate(pair, axis=-1) for pair in ((x.real, -x.imag), (x.imag, x.real))]
    y = self._of_each_mode(jnp.stack(rows, axis=2)).astype(jnp.float32)
    y = jnp.moveaxis(jax.lax.complex(y[:, :, 0], y[:, :, 1]), 0, 2)
    y = _among_zeros(y.reshape(*y.shape[:2], *low), modes, grid)
    y = jnp.fft.irfftn(y, grid, axes=axes, norm="forward")
    return jnp.moveaxis(y, 1, -1).astype(self.dtype)

  def _of_each_mode(self, rows: jax.Array) -> jax.Array:
    """Maps [modes, batch, 2, 2 * channels] to [modes, batch, 2, features]."""
    dense = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
    fields = dict(use_bias=False, kernel_init=self.kernel_init, dtype=self.dtype)
    return dense(self.features, **fields, dot_general=layers.flat_product, name="modes")(rows)


def _among_zeros(y: jax.Array, modes: int, grid: tuple[int, ...]) -> jax.Array:
  """The half spectrum [batch, channels, ...] of a grid whose low modes are y."""
  last = [(0, 0)] * (y.ndim - 1) + [(0, grid[-1] // 2 + 1 - modes)]
  if len(grid) == 2:
    zeros = jnp.zeros((*y.shape[:2], grid[0] - 2 * modes, modes), y.dtype)
    y = jnp.concatenate([y[:, :, :modes], zeros, y[:, :, modes:]], axis=2)
  return jnp.pad(y, last)


class SpectralBlock(nn.Module):
  """activation(SpectralConv(x) + x V + b); dropout acts on the first term's x alone."""

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
    x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
    conv = SpectralConv(self.features, self.modes, self.kernel_init, self.dtype, name="conv")
    return self.activation(conv(x) + y)
