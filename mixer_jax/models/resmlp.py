"""ResMLP: residual MLPs without normalisation statistics, and the paper's ablations.

Touvron et al., "ResMLP: Feedforward networks for image classification with data-efficient
training", TPAMI 2022, https://arxiv.org/abs/2105.03404. Where the paper leaves a choice, this
follows its Algorithm 1 and the released code (facebookresearch/deit): a branch ends with
LayerScale, which has no bias, and not with Aff, as in Equations 2 and 3. The stem starts as timm's
(LeCun's normal distribution, no bias); the released code leaves it to PyTorch: uniform, a third of
the variance.
"""

import functools
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import blocks, family, layers
from mixer_jax.options import Option, one_of

# The first is the paper's model, the others are the ablations of its Table 3.
NORMALIZATIONS = ("affine", "layer_norm")
POOLINGS = ("average", "class_mlp")
COMMUNICATIONS = ("linear", "none", "mlp", "conv3x3", "depthwise", "separable")
LayerScaleInit = Annotated[float, Option("start of LayerScale; smaller for deeper nets")]

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


class _DepthwiseConv(nn.Conv):
  """A convolution of each channel by itself: its kernel is no matrix over patches."""


def normalise(module: Any, x: jax.Array, name: str) -> jax.Array:
  """Aff or LayerNorm, as the field `normalization` of the calling module says."""
  if module.normalization == "affine":
    return layers.Affine(dtype=module.dtype, name=name)(x)
  return nn.LayerNorm(epsilon=module.layer_norm_epsilon, dtype=module.dtype, name=name)(x)


class _Block(nn.Module):
  """Fields and layers of both blocks below; the fields are as in `ResMlp`."""

  channels_mlp_dim: int
  layer_scale_init: float
  normalization: str = "affine"
  dropout_rate: float = 0.0
  gelu: str = "exact"
  layer_norm_epsilon: float = 1e-6
  dtype: Any = "float32"
  use_bias: ClassVar[bool] = True  # of the layers over patches

  def _norm(self, x: jax.Array, name: str) -> jax.Array:
    return normalise(self, x, name)

  def _scaled(self, y: jax.Array, name: str) -> jax.Array:
    return layers.LayerScale(self.layer_scale_init, dtype=self.dtype, name=name)(y)

  def _mlp(self, width: int, name: str) -> nn.Module:
    fields = dict(gelu=self.gelu, dtype=self.dtype, kernel_init=_LINEAR_INIT, name=name)
    return layers.MlpBlock(width, self.dropout_rate, **fields)

  def _over_channels(self, x: jax.Array, train: bool) -> jax.Array:
    y = self._mlp(self.channels_mlp_dim, "cross_channel")(self._norm(x, "norm2"), train=train)
    return self._scaled(y, "layer_scale_2")


class ResMlpBlock(_Block, kw_only=True):
  """Patch communication, then an MLP over channels, each residual (Equations 2 and 3).

  Fields are as in `ResMlp`; `max_tokens` is as in `MixerBlock`, and `grid` has the rows and columns
  of patches, for convolutions. `patch_communication` is "linear", one matrix over the tokens shared
  by the channels; "mlp", two with GELU and four times the tokens in between (Appendix A);
  "conv3x3"; "depthwise", 3x3 per channel; "separable", the same followed by the layer
  "cross_patch_pointwise" over channels, with nothing in between; or "none", without the branch.
  """

  grid: tuple[int, ...] = ()
  max_tokens: int = 0
  patch_communication: str = "linear"

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    mask: jax.Array | None = None,
    *,
    drop_rate: Any = 0.0,
    train: bool = False,
  ) -> jax.Array:
    """Maps [batch, tokens, channels] to the same shape; drops each branch at drop_rate.

    `mask` [batch, tokens] is True for a real token; convolutions do not read it.
    """
    keep = lambda y: layers.StochasticDepth(rescale=True)(y, drop_rate, train=train)
    if self.patch_communication != "none":
      y = self._over_patches(self._norm(x, "norm1"), mask, train)
      x = x + keep(self._scaled(y, "layer_scale_1"))
    return x + keep(self._over_channels(x, train))

  def _over_patches(self, x: jax.Array, mask: jax.Array | None, train: bool) -> jax.Array:
    kind, (batch, tokens, channels) = self.patch_communication, x.shape
    size = self.max_tokens or tokens
    options = dict(use_bias=self.use_bias, dtype=self.dtype)
    dense = functools.partial(layers.Dense, kernel_init=_LINEAR_INIT, **options)
    if kind == "linear":
      return layers.over_tokens(dense(size, name="cross_patch"), x, size, mask)
    if kind == "mlp":
      mlp = functools.partial(self._mlp(4 * size, "cross_patch"), train=train)
      return layers.over_tokens(mlp, x, size, mask)
    if kind == "conv3x3":
      layer = nn.Conv
    else:
      layer = functools.partial(_DepthwiseConv, feature_group_count=channels)
    conv = layer(channels, (3, 3), padding="SAME", name="cross_patch", **options)
    y = conv(x.reshape(batch, *self.grid, channels)).reshape(x.shape)
    return dense(channels, name="cross_patch_pointwise")(y) if kind == "separable" else y


class ClassToken(nn.Module):
  """A learned token, the same for every example; float32, computed in `dtype`."""

  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """The class token [batch, 1, channels] for tokens [batch, tokens, channels]."""
    embedding = self.param("embedding", _LINEAR_INIT, x.shape[-1:], jnp.float32)
    return jnp.broadcast_to(embedding.astype(self.dtype), (x.shape[0], 1, x.shape[-1]))


class ClassMlpBlock(_Block):
  """One of the two layers of class-MLP pooling (Section 2), after CaiT's class attention.

  Only the class token changes. Where CaiT attends to class token and patches, one linear layer,
  shared by the channels, sums them up. The paper says this in words only; its parameter counts
  (Tables 3 and D.3) leave room for the two channel MLPs and at most 36,000 numbers more: neither
  for a d x d matrix nor for one over tokens that is square. As in CaiT, nothing is dropped here.
  """

  @nn.compact
  def __call__(self, token: jax.Array, patches: jax.Array) -> jax.Array:
    """The new class token: [batch, 1, channels] from itself and [batch, tokens, channels]."""
    y = jnp.concatenate([token, patches], axis=1)
    y = jnp.swapaxes(self._norm(y, "norm1"), 1, 2)
    options = dict(use_bias=self.use_bias, dtype=self.dtype, name="cross_patch")
    y = layers.Dense(1, kernel_init=_LINEAR_INIT, **options)(y)
    token = token + self._scaled(jnp.swapaxes(y, 1, 2), "layer_scale_1")
    return token + self._over_channels(token, train=False)


class ResMlpStack(family.Stack, kw_only=True):
  """The blocks and the last normalisation of ResMLPs of images, text and functions."""

  channels_mlp_dim: family.MlpDim
  layer_scale_init: LayerScaleInit
  normalization: one_of("Aff of the paper, or LayerNorm in its place", NORMALIZATIONS) = "affine"
  patch_communication: one_of(
    "how tokens interact, see `ResMlpBlock`", ("linear", "mlp", "none")
  ) = "linear"
  dropout_rate: family.DropoutRate = 0.0
  block = ResMlpBlock

  def mix(self, x: jax.Array, train: bool, mask: Any = None, grid: Any = ()) -> Any:
    return blocks.apply(self, self.block, x, mask, train=train, grid=grid)

  def pool(self, x: jax.Array) -> jax.Array:
    return normalise(self, x, self.last_norm)


class ResMlp(ResMlpStack, family.Model, kw_only=True):
  """ResMLP for images, and the ablations of its Table 3.

  Touvron et al., 2022, https://arxiv.org/abs/2105.03404. At 224x224 and 1,000 classes all published
  parameter counts are met, and all published multiply-adds but one: with patch communication "mlp"
  S12 takes 4.249 G, printed as 4.3. Stochastic depth has one rate at all depths and rescales the
  branches that it keeps (deit, timm).

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    sizes = dict(hidden_dim=8, num_blocks=1, channels_mlp_dim=16, layer_scale_init=0.1)
    model = models.ResMlp(num_classes=10, patch_size=8, **sizes)
    images = jnp.zeros((2, 32, 32, 3))
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), images)
    ```
  """

  pooling: one_of("mean of the tokens, or a class token with two more layers", POOLINGS) = "average"
  patch_communication: one_of("how patches interact, see `ResMlpBlock`", COMMUNICATIONS) = "linear"
  class_block = ClassMlpBlock
  head_init = staticmethod(_LINEAR_INIT)

  def pool(self, x: jax.Array) -> jax.Array:
    return super().pool(self._pooled(x))

  def _pooled(self, x: jax.Array) -> jax.Array:
    """The class token after its two layers, if the model has one, else the patches."""
    if self.pooling == "average":
      return x
    token = ClassToken(self.dtype, name="class_token")(x)
    fields = blocks.fields_of(self, self.class_block)
    for i in range(2):
      token = self.class_block(name=f"ClassMlpBlock_{i}", **fields)(token, x)
    return token


FAMILY = family.Family(
  variants=family.variants(ResMlp, _VARIANTS),
  layers={
    # A convolution has more axes, and fits any number of tokens.
    "ResMlpBlock/cross_patch": family.TOKENS_SQUARE,
    "ResMlpBlock/cross_patch/Dense_0": family.TOKENS_IN,
    "ResMlpBlock/cross_patch/Dense_1": family.TOKENS_OUT,
    "ResMlpBlock/cross_patch_pointwise": family.TOKENS,
    "ClassMlpBlock/cross_patch": family.TOKENS,
    "class_token": family.STEM,
  },
)
