"""ResMLP: residual MLPs without normalisation statistics, and the paper's ablations.

Touvron et al., "ResMLP: Feedforward networks for image classification with
data-efficient training", TPAMI 2022, https://arxiv.org/abs/2105.03404. Where the
paper leaves a choice, this follows its Algorithm 1 and the released code
(facebookresearch/deit): a branch ends with LayerScale, which has no bias, and not
with Aff, as in Equations 2 and 3.
"""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import blocks, family, layers
from mixer_jax.options import Option

# The first is the paper's model, the others are the ablations of its Table 3.
NORMALIZATIONS = ("affine", "layer_norm")
POOLINGS = ("average", "class_mlp")
COMMUNICATIONS = ("linear", "none", "mlp", "conv3x3", "depthwise", "separable")
Normalization = family.one_of("Aff of the paper, or LayerNorm in its place", NORMALIZATIONS)
Pooling = family.one_of("mean of the tokens, or a class token with two more layers", POOLINGS)
Communication = family.one_of("how patches interact, see `resmlp.communicate`", COMMUNICATIONS)

_S = dict(hidden_dim=384, channels_mlp_dim=1536)
_B = dict(hidden_dim=768, channels_mlp_dim=3072)

# Tables 3 and D.3. LayerScale starts as in the released models S12, S24, S36 and
# B24/8. B24 at patch 16 was not released: the paper's rule (CaiT's) for 24 blocks.
_VARIANTS = {
  "resmlp_s12": dict(patch_size=16, num_blocks=12, layer_scale_init=0.1, **_S),
  "resmlp_s24": dict(patch_size=16, num_blocks=24, layer_scale_init=1e-5, **_S),
  "resmlp_s36": dict(patch_size=16, num_blocks=36, layer_scale_init=1e-6, **_S),
  "resmlp_b24": dict(patch_size=16, num_blocks=24, layer_scale_init=1e-5, **_B),
  "resmlp_s12_14": dict(patch_size=14, num_blocks=12, layer_scale_init=0.1, **_S),
  "resmlp_s12_8": dict(patch_size=8, num_blocks=12, layer_scale_init=0.1, **_S),
  "resmlp_b24_8": dict(patch_size=8, num_blocks=24, layer_scale_init=1e-6, **_B),
}

# The released code truncates at 100 standard deviations: in effect, not at all.
_LINEAR_INIT = nn.initializers.normal(0.02)


def communicate(
  x: jax.Array,
  kind: str,
  grid: tuple[int, int],
  *,
  dropout_rate: float = 0.0,
  gelu: str = "exact",
  dtype: Any = "float32",
  use_bias: bool = True,
  train: bool = False,
) -> jax.Array:
  """Lets patches interact, by the layer "cross_patch" of the calling module.

  Args:
    x: [batch, tokens, channels]; the result has this shape.
    kind: "linear", one matrix over the tokens shared by the channels; "mlp", two
      with GELU and four times the tokens in between (Appendix A); "conv3x3"; or
      "depthwise", 3x3 per channel; or "separable", the same followed by the layer
      "cross_patch_pointwise" over channels, with nothing in between.
    grid: rows and columns of patches; their product is the number of tokens.
    dropout_rate: in the MLP, which takes `gelu` and always has biases.
    gelu: "exact" or "tanh".
    dtype: of the computation.
    use_bias: whether the other layers have biases.
    train: whether dropout acts.
  """
  batch, tokens, channels = x.shape
  options = dict(use_bias=use_bias, dtype=dtype)
  if kind in ("linear", "mlp"):
    y = jnp.swapaxes(x, 1, 2)
    if kind == "linear":
      y = layers.Dense(tokens, kernel_init=_LINEAR_INIT, name="cross_patch", **options)(y)
    else:
      mlp = layers.MlpBlock(
        4 * tokens, dropout_rate, gelu, dtype, kernel_init=_LINEAR_INIT, name="cross_patch"
      )
      y = mlp(y, train=train)
    return jnp.swapaxes(y, 1, 2)
  groups = 1 if kind == "conv3x3" else channels
  conv = nn.Conv(
    channels, (3, 3), padding="SAME", feature_group_count=groups, name="cross_patch", **options
  )
  y = conv(x.reshape(batch, *grid, channels)).reshape(x.shape)
  if kind == "separable":
    y = layers.Dense(channels, kernel_init=_LINEAR_INIT, name="cross_patch_pointwise", **options)(y)
  return y


def _normalization(kind: str, epsilon: float, dtype: Any, name: str) -> nn.Module:
  if kind == "affine":
    return layers.Affine(dtype=dtype, name=name)
  return nn.LayerNorm(epsilon=epsilon, dtype=dtype, name=name)


class _Block(nn.Module):
  """Fields and layers of both blocks below; the fields are as in `ResMlp`."""

  channels_mlp_dim: int
  layer_scale_init: float
  normalization: str = "affine"
  dropout_rate: float = 0.0
  gelu: str = "exact"
  layer_norm_epsilon: float = 1e-6
  dtype: Any = "float32"

  def _norm(self, x: jax.Array, name: str) -> jax.Array:
    return _normalization(self.normalization, self.layer_norm_epsilon, self.dtype, name)(x)

  def _scaled(self, y: jax.Array, name: str) -> jax.Array:
    return layers.LayerScale(self.layer_scale_init, self.dtype, name=name)(y)

  def _over_channels(self, x: jax.Array, train: bool) -> jax.Array:
    fields = dict(gelu=self.gelu, dtype=self.dtype, kernel_init=_LINEAR_INIT, name="cross_channel")
    mlp = layers.MlpBlock(self.channels_mlp_dim, self.dropout_rate, **fields)
    return self._scaled(mlp(self._norm(x, "norm2"), train=train), "layer_scale_2")


class ResMlpBlock(_Block, kw_only=True):
  """Patch communication, then an MLP over channels, each residual (Equations 2 and 3).

  Without communication ("none") the whole first branch is absent. The fields are as
  in `ResMlp`, and `grid`: rows and columns of patches.
  """

  grid: tuple[int, int]
  patch_communication: str = "linear"

  @nn.compact
  def __call__(
    self, x: jax.Array, *, drop_rate: float | jax.Array = 0.0, train: bool = False
  ) -> jax.Array:
    """Maps [batch, tokens, channels] to the same shape; drops each branch at drop_rate."""
    keep = lambda y: layers.StochasticDepth(rescale=True)(y, drop_rate, train=train)
    if self.patch_communication != "none":
      options = dict(dropout_rate=self.dropout_rate, gelu=self.gelu, dtype=self.dtype, train=train)
      y = communicate(self._norm(x, "norm1"), self.patch_communication, self.grid, **options)
      x = x + keep(self._scaled(y, "layer_scale_1"))
    return x + keep(self._over_channels(x, train))


class ClassToken(nn.Module):
  """A learned token, the same for every example; float32, computed in `dtype`."""

  dtype: Any = "float32"
  curvature: ClassVar[str] = "gradient"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """The class token [batch, 1, channels] for tokens [batch, tokens, channels]."""
    embedding = self.param("embedding", _LINEAR_INIT, x.shape[-1:])
    return jnp.broadcast_to(embedding.astype(self.dtype), (x.shape[0], 1, x.shape[-1]))


class ClassMlpBlock(_Block):
  """One of the two layers of class-MLP pooling (Section 2), after CaiT's class attention.

  Only the class token changes. Where CaiT attends to class token and patches, one
  linear layer, shared by the channels, sums them up. The paper says this in words
  only; its parameter counts (Tables 3 and D.3) leave room for the two channel MLPs
  and at most 36,000 numbers more: neither for a d x d matrix nor for one over
  tokens that is square. As in CaiT, nothing is dropped here.
  """

  @nn.compact
  def __call__(self, token: jax.Array, patches: jax.Array) -> jax.Array:
    """The new class token: [batch, 1, channels] from itself and [batch, tokens, channels]."""
    y = jnp.concatenate([token, patches], axis=1)
    y = jnp.swapaxes(self._norm(y, "norm1"), 1, 2)
    y = layers.Dense(1, kernel_init=_LINEAR_INIT, dtype=self.dtype, name="cross_patch")(y)
    token = token + self._scaled(jnp.swapaxes(y, 1, 2), "layer_scale_1")
    return token + self._over_channels(token, train=False)


class ResMlp(family.Model):
  """ResMLP for images, and the ablations of Table 3.

  At 224x224 and 1,000 classes all published parameter counts are met, and all
  published multiply-adds but one: with patch communication "mlp" S12 takes 4.249 G,
  printed as 4.3. Stochastic depth has one rate at all depths and rescales the branches
  that it keeps (deit, timm). `blocks.stacked` says how the parameters of scanned blocks
  are laid out.
  """

  num_classes: int
  patch_size: family.PatchSize
  hidden_dim: family.HiddenDim
  num_blocks: family.NumBlocks
  channels_mlp_dim: family.MlpDim
  layer_scale_init: Annotated[float, Option("start of LayerScale; smaller for deeper nets")]
  normalization: Normalization = "affine"
  pooling: Pooling = "average"
  patch_communication: Communication = "linear"
  dropout_rate: family.DropoutRate = 0.0
  stochastic_depth: family.StochasticDepth = 0.0
  gelu: family.Gelu = "exact"
  layer_norm_epsilon: family.LayerNormEpsilon = 1e-6
  remat: family.Remat = False
  scan_blocks: family.ScanBlocks = False
  dtype: family.Dtype = "float32"

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, height, width, 3] to float32 logits [batch, num_classes].

    The patch tokens after the last block, [batch, tokens, channels], are sown as
    "tokens" into the collection "intermediates".
    """
    x = layers.image_tokens(images, self.patch_size, self.hidden_dim, self.dtype)
    drop_rates = [self.stochastic_depth] * self.num_blocks
    grid = tuple(side // self.patch_size for side in images.shape[1:3])
    x = blocks.apply(self, ResMlpBlock, x, drop_rates=drop_rates, train=train, grid=grid)
    self.sow("intermediates", "tokens", x)
    if self.pooling == "class_mlp":
      fields = blocks.fields_of(self, ClassMlpBlock)
      token = ClassToken(self.dtype, name="class_token")(x)
      for i in range(2):
        token = ClassMlpBlock(name=f"ClassMlpBlock_{i}", **fields)(token, x)
      x = token
    x = _normalization(self.normalization, self.layer_norm_epsilon, self.dtype, "norm")(x)
    return layers.mean_logits(x, self.num_classes)


_NORMS = ("norm1", "layer_scale_1", "norm2", "layer_scale_2")
_BLOCK = {"cross_patch": family.TOKENS, "cross_channel": family.CHANNELS}
_BLOCK |= dict.fromkeys(_NORMS, family.NORM)
FAMILY = family.Family(
  variants=family.variants(ResMlp, _VARIANTS),
  layers={
    "stem": family.STEM,
    **{f"ResMlpBlock/{name}": layer for name, layer in _BLOCK.items()},
    # A convolution has more axes, and fits any number of tokens.
    "ResMlpBlock/cross_patch": family.TOKENS_SQUARE,
    "ResMlpBlock/cross_patch/Dense_0": family.TOKENS_IN,
    "ResMlpBlock/cross_patch/Dense_1": family.TOKENS_OUT,
    "ResMlpBlock/cross_patch_pointwise": family.TOKENS,
    "class_token": family.STEM,
    **{f"ClassMlpBlock/{name}": layer for name, layer in _BLOCK.items()},
    "norm": family.NORM,
    "head": family.HEAD,
  },
  image_sizes={},
)
VARIANTS = FAMILY.variants
