"""Transformers of operators, with attention of Galerkin, Fourier, softmax or linear type.

Cao, "Choose a Transformer: Fourier or Galerkin", NeurIPS 2021, https://arxiv.org/abs/2105.14995,
and its code (scaomath/galerkin-transformer), whose numbers of parameters the variants have. Three
differences: attention weights are never dropped (`OperatorAttention`); dropout does not depend on
the kind of attention (there it is 0.1 around softmax and linear); the coarse grids are those of
the training grid at any resolution.
"""

from typing import Annotated, Any

import flax.linen as nn
import jax

from mixer_jax.errors import UserError
from mixer_jax.models import attention, blocks, family, interpolate, layers, operator_model
from mixer_jax.models.operator_model import with_positions
from mixer_jax.models.spectral import shown
from mixer_jax.options import Option, one_of

# The settings of the three published examples, for 512 to 8,192 points, 141x141 and 141x141.
_DARCY = dict(layer_norm_epsilon=1e-7, dropout_rate=0.05, extractor="cnn", num_heads=4, axes=(2,))
_VARIANTS = {
  "galerkin_1d": dict(
    axes=(1,), hidden_dim=96, num_blocks=4, num_heads=1, ffn_dim=192, decoder="spectral",
    decoder_dim=48, decoder_layers=2, decoder_mlp_dim=48, modes=16, position_features=False,
  ),
  "galerkin_2d": dict(
    hidden_dim=128, num_blocks=6, ffn_dim=256, decoder="spectral", decoder_dim=32,
    decoder_layers=2, decoder_mlp_dim=128, modes=12, coarse=43, dirichlet=True, **_DARCY,
  ),
  "galerkin_inverse": dict(
    hidden_dim=192, num_blocks=6, ffn_dim=384, decoder="pointwise", decoder_dim=192,
    decoder_layers=1, decoder_dropout=0.05, coarse=36, refine=False, activation="silu", **_DARCY,
  ),
}  # fmt: skip
_Kind = one_of("kind of attention, see `OperatorAttention`", tuple(attention.KINDS))
_ACTIVATIONS = {"relu": nn.relu, "silu": nn.silu}
_EXTRACTOR = "features before the blocks: a linear layer, or convolutions to a coarser grid"
_REFINE = "decode on the grid, else on the coarse one, and interpolate the outputs"
_GAIN = "gain of Xavier's law at the start of queries, keys, values; None: published, by attention"


class GalerkinBlock(nn.Module):
  """Attention, then an MLP with ReLU, each residual; only the attention has LayerNorms."""

  ffn_dim: int
  num_heads: int
  attention: str
  init_gain: float | None = None
  init_diagonal: float = 1e-2
  layer_norm_epsilon: float = 1e-5
  dropout_rate: float = 0.0
  dtype: Any = "float32"

  @nn.compact
  def __call__(
    self, x: jax.Array, positions: jax.Array, *, drop_rate: Any = 0.0, train: bool = False
  ) -> jax.Array:
    """Maps x, [batch, points, channels], to the same shape.

    `positions` are [1, points, axes]. If `train`, stochastic depth at `drop_rate`, a number, and
    dropout act, dropout after the ReLU as well.
    """
    drop = lambda y: layers.Dropout(self.dropout_rate, deterministic=not train)(y)
    depth = lambda y: layers.StochasticDepth(rescale=True)(drop(y), drop_rate, train=train)
    fields = (self.init_gain, self.init_diagonal, self.layer_norm_epsilon, True, self.dtype)
    attend = attention.OperatorAttention(self.attention, self.num_heads, *fields, name="attention")
    x = x + depth(attend(x, positions))
    dense = lambda n, y: layers.Dense(n, dtype=self.dtype, **layers.uniform_start(y.shape[-1]))(y)
    y = drop(nn.relu(dense(self.ffn_dim, x)))
    return x + depth(dense(x.shape[-1], y))


class Galerkin(operator_model.Decoded, kw_only=True):
  """Features, attention over the points of a grid, a decoder.

  Every grid is taken that has enough points for the decoder's modes. With the extractor
  "cnn" attention is on `coarse` points along each axis; their positions are interpolated.
  """

  hidden_dim: family.width("channels of a point")
  num_blocks: family.NumBlocks
  ffn_dim: family.width("hidden width of the MLPs")
  num_heads: family.width("heads of the attention; they divide hidden_dim")
  attention: _Kind = "galerkin"
  init_gain: Annotated[float | None, Option(_GAIN, 0)] = None
  init_diagonal: Annotated[float, Option("multiple of the identity added to it")] = 1e-2
  layer_norm_epsilon: family.Epsilon = 1e-5
  dropout_rate: family.rate("dropout in the blocks and the convolutions before them") = 0.0
  stochastic_depth: family.StochasticDepth = 0.0
  extractor: one_of(_EXTRACTOR, ("linear", "cnn")) = "linear"
  activation: one_of("activation of the convolutions to a coarser grid", tuple(_ACTIVATIONS)) = (
    "relu"
  )
  coarse: Annotated[int, Option("points along each axis of the coarser grid", 2)] = 43
  refine: Annotated[bool, Option(_REFINE)] = True
  remat: family.Remat = False
  scan_blocks: family.ScanBlocks = False
  periodic = {"dirichlet": False, "extractor": "linear"}
  unread_with = operator_model.Decoded.unread_with | {
    ("extractor", "linear"): ("coarse", "activation", "refine")
  }

  def __post_init__(self):
    super().__post_init__()
    if self.extractor == "cnn" and min(self.grid) < self.coarse:
      raise UserError(
        f"model.coarse is {self.coarse}; allowed: 2 to the {shown(self.grid)} points of the grid"
      )

  def attention_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
    return (self.coarse,) * len(grid) if self.extractor == "cnn" else grid

  def encode(self, values: jax.Array, positions: jax.Array, train: bool) -> jax.Array:
    fine, rank = values.shape[1:-1], len(self.grid)
    coarse, between = (self.coarse,) * rank, interpolate.between(self.grid, self.coarse)
    fields = dict(dtype=self.dtype)
    if self.extractor == "cnn":
      activation = _ACTIVATIONS[self.activation]
      stem = (self.hidden_dim, (between, coarse), activation, self.dropout_rate)
      x = interpolate.Coarsening(*stem, **fields, name="stem")(values, train=train)
    else:
      x = with_positions(values, positions) if self.position_features else values
      x = self.dense(self.hidden_dim, x, "stem")
    x, grid = self.drop(x, train), x.shape[1:-1]
    places = interpolate.resize(positions[None], grid).reshape(1, -1, rank)
    x = layers.as_tokens(x)
    x = blocks.apply(self, GalerkinBlock, x, places, train=train)
    x = x.reshape(len(x), *grid, self.hidden_dim)
    if self.extractor == "cnn":
      # The published grid on the way back has one point less, and none is between without one.
      back = (tuple(n - 1 for n in between), fine) if self.refine else (coarse, coarse)
      refine = interpolate.Refinement(back, self.decoder_dropout, **fields, name="refinement")
      x = refine(x, train=train)
    return self.drop(x, train)


FAMILY = family.Family(
  variants=family.variants(Galerkin, _VARIANTS),
  layers={
    **operator_model.LAYERS,
    "GalerkinBlock/attention": family.TOKENS,
    "refinement": family.TOKENS,
  },
)
