"""ResMLP: residual MLPs without normalisation statistics, and the paper's ablations.

Touvron et al., "ResMLP: Feedforward networks for image classification with
data-efficient training", TPAMI 2022, https://arxiv.org/abs/2105.03404. Where the
paper's text is open, this follows its Algorithm 1 and the released code
(facebookresearch/deit): Equations 2 and 3 end a branch with Aff, both of those
with LayerScale, which has no bias.
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import blocks, layers

# What each field may be; the first is the paper's model, the others are the
# ablations of its Table 3.
CHOICES = {
  "normalization": ("affine", "layer_norm"),
  "pooling": ("average", "class_mlp"),
  "patch_communication": ("linear", "none", "mlp", "conv3x3", "depthwise", "separable"),
  "gelu": ("exact", "tanh"),
}

_S = dict(hidden_dim=384, channels_mlp_dim=1536)
_B = dict(hidden_dim=768, channels_mlp_dim=3072)

# Tables 3 and D.3. LayerScale starts as in the released models S12, S24, S36 and
# B24/8. B24 at patch 16 was not released: the paper's rule (CaiT's) for 24 blocks.
VARIANTS = {
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
    x: [batch, tokens, channels].
    kind: "linear", one matrix over the tokens shared by the channels; "mlp", two
      with GELU and four times the tokens in between (Appendix A); "conv3x3"; or
      "depthwise", 3x3 per channel; or "separable", the same followed by the layer
      "cross_patch_pointwise" over channels, with nothing in between.
    grid: rows and columns of patches; their product is the number of tokens.
    dropout_rate: dropout in the MLP.
    gelu: of the MLP, "exact" or "tanh".
    dtype: the dtype of the computation.
    use_bias: whether the layers have biases (those of the MLP always do).
    train: whether dropout acts.

  Returns:
    [batch, tokens, channels].
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


class ResMlpBlock(nn.Module):
  """Patch communication, then an MLP over channels, each residual (Equations 2 and 3).

  Without communication ("none") the whole first branch is absent. The fields are
  those of `ResMlp`, but for

  Attributes:
    grid: rows and columns of patches.
  """

  grid: tuple[int, int]
  channels_mlp_dim: int
  layer_scale_init: float
  normalization: str = "affine"
  patch_communication: str = "linear"
  dropout_rate: float = 0.0
  gelu: str = "exact"
  layer_norm_epsilon: float = 1e-6
  dtype: Any = "float32"

  @nn.compact
  def __call__(
    self, x: jax.Array, *, drop_rate: float | jax.Array = 0.0, train: bool = False
  ) -> jax.Array:
    """Maps [batch, tokens, channels] to the same shape; drops each branch at drop_rate."""

    def norm(x, name):
      return _normalization(self.normalization, self.layer_norm_epsilon, self.dtype, name)(x)

    def residual(x, y, name):
      y = layers.LayerScale(self.layer_scale_init, self.dtype, name=name)(y)
      return x + layers.StochasticDepth(rescale=True)(y, drop_rate, train=train)

    if self.patch_communication != "none":
      y = communicate(
        norm(x, "norm1"),
        self.patch_communication,
        self.grid,
        dropout_rate=self.dropout_rate,
        gelu=self.gelu,
        dtype=self.dtype,
        train=train,
      )
      x = residual(x, y, "layer_scale_1")
    y = layers.MlpBlock(
      self.channels_mlp_dim,
      self.dropout_rate,
      self.gelu,
      self.dtype,
      kernel_init=_LINEAR_INIT,
      name="cross_channel",
    )(norm(x, "norm2"), train=train)
    return residual(x, y, "layer_scale_2")


class ClassToken(nn.Module):
  """A learned token, the same for every example.

  Attributes:
    dtype: the dtype of the computation; parameters are float32.
  """

  dtype: Any = "float32"
  curvature: ClassVar[str] = "gradient"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """The class token [batch, 1, channels] for tokens [batch, tokens, channels]."""
    embedding = self.param("embedding", _LINEAR_INIT, x.shape[-1:])
    return jnp.broadcast_to(embedding.astype(self.dtype), (x.shape[0], 1, x.shape[-1]))


class ClassMlpBlock(nn.Module):
  """One of the two layers of class-MLP pooling (Section 2), after CaiT's class attention.

  Only the class token changes. Where CaiT attends to class token and patches, one
  linear layer, shared by the channels, sums them up. The paper says this in words
  only; its parameter counts (Tables 3 and D.3) leave room for the two channel MLPs
  and at most 36,000 numbers more: neither for a d x d matrix nor for one over
  tokens that is square. As in CaiT, nothing is dropped here.

  The fields are those of `ResMlp`.
  """

  channels_mlp_dim: int
  layer_scale_init: float
  normalization: str = "affine"
  gelu: str = "exact"
  layer_norm_epsilon: float = 1e-6
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, token: jax.Array, patches: jax.Array) -> jax.Array:
    """The new class token.

    Args:
      token: the class token, [batch, 1, channels].
      patches: [batch, tokens, channels].

    Returns:
      [batch, 1, channels].
    """

    def norm(x, name):
      return _normalization(self.normalization, self.layer_norm_epsilon, self.dtype, name)(x)

    def scale(y, name):
      return layers.LayerScale(self.layer_scale_init, self.dtype, name=name)(y)

    y = jnp.swapaxes(norm(jnp.concatenate([token, patches], axis=1), "norm1"), 1, 2)
    y = layers.Dense(1, kernel_init=_LINEAR_INIT, dtype=self.dtype, name="cross_patch")(y)
    token = token + scale(jnp.swapaxes(y, 1, 2), "layer_scale_1")
    mlp = layers.MlpBlock(
      self.channels_mlp_dim,
      gelu=self.gelu,
      dtype=self.dtype,
      kernel_init=_LINEAR_INIT,
      name="cross_channel",
    )
    return token + scale(mlp(norm(token, "norm2")), "layer_scale_2")


class ResMlp(nn.Module):
  """ResMLP for images, and the ablations of Table 3.

  At 224x224 and 1,000 classes all published parameter counts are met, and all
  published multiply-adds but one: with patch communication "mlp" S12 takes 4.249 G,
  printed as 4.3.

  Attributes:
    num_classes: size of the output.
    patch_size: side of a square patch in pixels; it divides height and width.
    hidden_dim: channels d of a token.
    num_blocks: number of blocks.
    channels_mlp_dim: hidden width of the MLP over channels, 4d in the paper.
    layer_scale_init: initial value of LayerScale, smaller for deeper nets.
    normalization: "affine", or "layer_norm" in all its places.
    pooling: "average" of the tokens, or "class_mlp", a class token that two
      more layers update.
    patch_communication: "linear", or "none", "mlp", "conv3x3", "depthwise",
      "separable" (see `communicate`).
    dropout_rate: dropout in the MLPs; zero in the paper.
    stochastic_depth: drop rate of every branch, the same at all depths, kept
      branches rescaled (deit, timm).
    gelu: "exact", as in the public models, or "tanh".
    layer_norm_epsilon: for "layer_norm"; 1e-6 in CaiT.
    remat: compute the inside of each block again in the backward pass, which saves
      memory; on a CPU only together with scan_blocks.
    scan_blocks: loop over one program of a block; `blocks.stacked` says how its
      parameters are laid out.
    dtype: the dtype of the computation; parameters and logits are float32.

  Raises:
    ValueError: a field has an unknown value.
  """

  num_classes: int
  patch_size: int
  hidden_dim: int
  num_blocks: int
  channels_mlp_dim: int
  layer_scale_init: float
  normalization: str = "affine"
  pooling: str = "average"
  patch_communication: str = "linear"
  dropout_rate: float = 0.0
  stochastic_depth: float = 0.0
  gelu: str = "exact"
  layer_norm_epsilon: float = 1e-6
  remat: bool = False
  scan_blocks: bool = False
  dtype: Any = "float32"

  def __post_init__(self):
    for field, known in CHOICES.items():
      value = getattr(self, field)
      if value not in known:
        raise ValueError(f"{field} is {value!r}; known: {', '.join(known)}")
    super().__post_init__()

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, height, width, 3] to float32 logits [batch, num_classes].

    The patch tokens after the last block, [batch, tokens, channels], are sown as
    "tokens" into the collection "intermediates".
    """
    x = layers.image_tokens(images, self.patch_size, self.hidden_dim, self.dtype)
    shared = dict(
      channels_mlp_dim=self.channels_mlp_dim,
      layer_scale_init=self.layer_scale_init,
      normalization=self.normalization,
      gelu=self.gelu,
      layer_norm_epsilon=self.layer_norm_epsilon,
      dtype=self.dtype,
    )
    own = dict(
      grid=(images.shape[1] // self.patch_size, images.shape[2] // self.patch_size),
      patch_communication=self.patch_communication,
      dropout_rate=self.dropout_rate,
    )
    drop_rates = [self.stochastic_depth] * self.num_blocks
    options = dict(train=train, remat=self.remat, scan=self.scan_blocks)
    x = blocks.apply(ResMlpBlock, own | shared, x, drop_rates=drop_rates, **options)
    self.sow("intermediates", "tokens", x)
    if self.pooling == "class_mlp":
      token = ClassToken(self.dtype, name="class_token")(x)
      for i in range(2):
        token = ClassMlpBlock(name=f"ClassMlpBlock_{i}", **shared)(token, x)
      x = token
    x = _normalization(self.normalization, self.layer_norm_epsilon, self.dtype, "norm")(x)
    x = jnp.mean(x, axis=1, dtype=jnp.float32)
    # A zero head starts training at the uniform prediction, as in the other models.
    return nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros, name="head")(x)
