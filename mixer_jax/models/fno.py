"""The Fourier neural operator.

Li et al., ICLR 2021, https://arxiv.org/abs/2010.08895, as in its code of August 2021 (zongyi-li/
fourier_neural_operator, fd7b0de): GELU, and zeros beyond the end of a domain that is not periodic.
"""

from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import family, operator_model, spectral
from mixer_jax.options import Option

_PADDING = "points of zeros after the last of each axis, on the training grid"
_VARIANTS = {
  "fno_1d": dict(axes=(1,), hidden_dim=64, modes=16),
  "fno_2d": dict(axes=(2,), hidden_dim=32, modes=12, padding=9),
}


def _uniform(scale: float) -> nn.initializers.Initializer:
  """The published start: real and imaginary parts uniform in [0, scale]."""
  return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, 0.0, scale)


class Fno(operator_model.Operator, kw_only=True):
  """A layer over values and positions, spectral convolutions with GELU between them, a hidden layer.

  The model takes every grid of enough points for the modes; the zeros are the same part of each.
  """

  hidden_dim: family.width("channels of a point")
  num_blocks: family.NumBlocks = 4
  modes: operator_model.Modes
  mlp_dim: family.width("hidden width after spectral convolutions") = 128
  padding: Annotated[int, Option(_PADDING, 0)] = 0
  periodic = {"dirichlet": False, "padding": 0}

  def __post_init__(self):
    super().__post_init__()
    self.check_modes(self.modes, self.padding)

  def features(self, values: jax.Array, positions: jax.Array, train: bool) -> jax.Array:
    grid = values.shape[1:-1]
    x = self.dense(self.hidden_dim, operator_model.with_positions(values, positions), "stem")
    more = [(0, round(self.padding * n / own)) for n, own in zip(grid, self.grid)]
    x = jnp.pad(x, [(0, 0), *more, (0, 0)])
    start = _uniform(self.hidden_dim**-2)
    for i in range(self.num_blocks):
      activation = _gelu if i < self.num_blocks - 1 else lambda x: x
      sizes = (self.hidden_dim, self.modes, start, activation)
      x = spectral.SpectralBlock(*sizes, dtype=self.dtype, name=f"SpectralBlock_{i}")(x)
    x = x[(slice(None), *map(slice, grid))]
    return _gelu(self.dense(self.mlp_dim, x, "decoder_out"))


def _gelu(x: jax.Array) -> jax.Array:
  return nn.gelu(x, approximate=False)


FAMILY = family.Family(
  variants=family.variants(Fno, _VARIANTS),
  layers=operator_model.LAYERS,
)
