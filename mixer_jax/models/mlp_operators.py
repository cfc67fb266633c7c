"""All-MLP models of operators: patches of neighbouring points are tokens of a fixed grid.

The blocks are those of the families for images. A convolution makes tokens of the values and
positions in a patch, a dense layer gives each point of a patch its features back, and the decoders
are those of the transformers (`operator_model.Decoded`).
"""

import functools
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.errors import UserError
from mixer_jax.models import family, gmlp, layers, mixer, operator_model, resmlp
from mixer_jax.models.operator_model import with_positions
from mixer_jax.models.spectral import shown
from mixer_jax.options import Option

_SIZE = dict(hidden_dim=128, num_blocks=6, patch_size=8, decoder="spectral", decoder_dim=48)
_SIZE |= dict(decoder_layers=2, decoder_mlp_dim=96, modes=12)


class PatchOperator(operator_model.Decoded, family.Stack, kw_only=True):
  """Patches, blocks (`mix`), a normalisation, points, a decoder.

  The last points of an axis are repeated to fill the last patch.
  """

  patch_size: Annotated[int, Option("side of a patch in points", 1)]

  def __post_init__(self):
    super().__post_init__()
    if self.patch_size > min(self.grid):
      allowed = f"1 to the {shown(self.grid)} points of the grid"
      raise UserError(f"model.patch_size is {self.patch_size}; allowed: {allowed}")

  def encode(self, values: jax.Array, positions: jax.Array, train: bool) -> jax.Array:
    grid, rank, side = values.shape[1:-1], len(self.grid), self.patch_size
    if grid != self.grid:
      own = shown(self.grid)
      raise ValueError(f"trained on {own} points, called with {shown(grid)}; allowed: {own}")
    tokens = tuple(-(-n // side) for n in grid)
    more = [(0, side * t - n) for t, n in zip(tokens, grid)]
    x = jnp.pad(with_positions(values, positions), [(0, 0), *more, (0, 0)], mode="edge")
    size = (side,) * rank
    stem = dict(strides=size, padding="VALID", dtype=self.dtype, name="stem")
    x = layers.as_tokens(nn.Conv(self.hidden_dim, size, **stem)(x))
    x = self.dense(side**rank * self.decoder_dim, self.pool(self.mix(x, train)), "points")
    # [batch, rows, columns, side, side, channels] to [batch, rows, side, columns, side, channels].
    x = x.reshape(len(x), *tokens, *size, self.decoder_dim)
    order = [axis for i in range(1, rank + 1) for axis in (i, i + rank)]
    x = x.transpose(0, *order, 2 * rank + 1)
    x = x.reshape(len(x), *(side * t for t in tokens), self.decoder_dim)
    return self.drop(x[(slice(None), *map(slice, grid))], train)


class MixerOperator(mixer.MixerStack, PatchOperator, kw_only=True):
  """Mixer over patches of points."""


class GmlpOperator(gmlp.GmlpStack, PatchOperator, kw_only=True):
  """gMLP over patches of points."""


class ResMlpOperator(resmlp.ResMlpStack, PatchOperator, kw_only=True):
  """ResMLP over patches of points, without convolutions and class token."""


_MODELS = {
  "mixer_operator": (MixerOperator, dict(tokens_mlp_dim=128, channels_mlp_dim=256)),
  "gmlp_operator": (GmlpOperator, dict(ffn_dim=256)),
  "resmlp_operator": (ResMlpOperator, dict(channels_mlp_dim=256, layer_scale_init=0.1)),
}
FAMILY = family.Family(
  variants={name: functools.partial(cls, **_SIZE | own) for name, (cls, own) in _MODELS.items()},
  layers=operator_model.LAYERS,
)
