"""All-MLP models of operators: patches of neighbouring points are tokens of a fixed grid.

The blocks are those of the families for images. A convolution makes tokens of the values and
positions in a patch, a dense layer gives each point of a patch its features back, and the decoders
are those of the transformers (`operator_model.Decoded`).
"""

from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.errors import UserError
from mixer_jax.models import blocks, family, gmlp, mixer, operator_model, resmlp, text
from mixer_jax.models.operator_model import with_positions
from mixer_jax.models.spectral import shown
from mixer_jax.options import Option

_SIZE = dict(hidden_dim=128, num_blocks=6, patch_size=8, decoder="spectral", decoder_dim=48)
_SIZE |= dict(decoder_layers=2, decoder_mlp_dim=96, modes=12)


class PatchOperator(operator_model.Decoded, family.Stack, kw_only=True):
  """Patches, blocks, a normalisation, points, a decoder; a family has its blocks in `mix`.

  The last points of an axis are repeated to fill the last patch.
  """

  patch_size: Annotated[int, Option("side of a patch in points", 1, family.SIDE)]

  def __post_init__(self):
    super().__post_init__()
    if self.patch_size > min(self.grid):
      allowed = f"1 to the {shown(self.grid)} points of the grid"
      raise UserError(f"model.patch_size is {self.patch_size}; allowed: {allowed}")

  def encode(self, values: jax.Array, positions: jax.Array, train: bool) -> jax.Array:
    grid, rank, side = values.shape[1:-1], len(self.grid), self.patch_size
    if grid != self.grid:
      raise ValueError(
        f"trained on {shown(self.grid)} points, called with {shown(grid)};"
        f" allowed: {shown(self.grid)}"
      )
    tokens = tuple(-(-n // side) for n in grid)
    more = [(0, side * t - n) for t, n in zip(tokens, grid)]
    x = jnp.pad(with_positions(values, positions), [(0, 0), *more, (0, 0)], mode="edge")
    size = (side,) * rank
    stem = dict(strides=size, padding="VALID", dtype=self.dtype, name="stem")
    x = nn.Conv(self.hidden_dim, size, **stem)(x).reshape(len(x), -1, self.hidden_dim)
    x = self.dense(side**rank * self.decoder_dim, self.pool(self.mix(x, train)), "points")
    # [batch, rows, columns, side, side, channels] to [batch, rows, side, columns, side, channels].
    x = x.reshape(len(x), *tokens, *size, self.decoder_dim)
    order = [axis for i in range(1, rank + 1) for axis in (i, i + rank)]
    x = x.transpose(0, *order, 2 * rank + 1)
    x = x.reshape(len(x), *(side * t for t in tokens), self.decoder_dim)
    return self.drop(x[(slice(None), *map(slice, grid))], train)

  def mix(self, x: jax.Array, train: bool) -> jax.Array:
    """Applies the blocks to tokens [batch, tokens, channels]."""
    raise NotImplementedError


class MixerOperator(PatchOperator, kw_only=True):
  """Mixer over patches of points; fields as in `mixer.Mixer`."""

  tokens_mlp_dim: family.width("hidden width of the MLP over tokens")
  channels_mlp_dim: family.MlpDim
  dropout_rate: family.DropoutRate = 0.0
  stochastic_depth: mixer.StochasticDepth = 0.0
  gelu: family.Gelu = "tanh"
  last_norm = "pre_head_layer_norm"

  def mix(self, x: jax.Array, train: bool) -> jax.Array:
    return blocks.apply(self, mixer.MixerBlock, x, drop_rates=mixer.drop_rates(self), train=train)


class GmlpOperator(PatchOperator, kw_only=True):
  """gMLP over patches of points; fields as in `gmlp.Gmlp`."""

  ffn_dim: gmlp.FfnDim
  gating: gmlp.Gating = "split"
  spatial: gmlp.Spatial = "dense"
  attention_dim: gmlp.AttentionDim = 0
  gate_epsilon: gmlp.GateEpsilon = 1e-5

  def mix(self, x: jax.Array, train: bool) -> jax.Array:
    options = dict(drop_rates=[self.stochastic_depth] * self.num_blocks, train=train)
    return blocks.apply(self, gmlp.GmlpBlock, x, max_tokens=x.shape[1], **options)


class ResMlpOperator(PatchOperator, kw_only=True):
  """ResMLP over patches of points; fields as in `resmlp.ResMlp`, without convolutions."""

  channels_mlp_dim: family.MlpDim
  layer_scale_init: resmlp.LayerScaleInit
  normalization: resmlp.Normalization = "affine"
  patch_communication: text.Communication = "linear"
  dropout_rate: family.DropoutRate = 0.0

  def mix(self, x: jax.Array, train: bool) -> jax.Array:
    options = dict(drop_rates=[self.stochastic_depth] * self.num_blocks, train=train)
    # The family's `grid` is of patches, for convolutions.
    return blocks.apply(self, resmlp.ResMlpBlock, x, grid=(), **options)

  def pool(self, x: jax.Array) -> jax.Array:
    return resmlp.normalise(self, x, self.last_norm)


_MODELS = {
  "mixer_operator": (MixerOperator, dict(tokens_mlp_dim=128, channels_mlp_dim=256)),
  "gmlp_operator": (GmlpOperator, dict(ffn_dim=256)),
  "resmlp_operator": (ResMlpOperator, dict(channels_mlp_dim=256, layer_scale_init=0.1)),
}
FAMILY = family.Family(
  variants={
    name: model
    for name, (cls, own) in _MODELS.items()
    for name, model in family.variants(cls, {name: _SIZE | own}).items()
  },
  layers=operator_model.LAYERS,
  decayed=gmlp.FAMILY.decayed,
)
