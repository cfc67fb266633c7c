"""gMLP: MLPs with spatial gating; with Toeplitz matrices (tMLP), with attention (aMLP).

Liu et al., "Pay Attention to MLPs", NeurIPS 2021, https://arxiv.org/abs/2105.08050. The blocks take
token masks and shorter sequences, so that text models share them.
"""

import functools
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import blocks, family, layers
from mixer_jax.options import Option, one_of

# s(Z) for the projection over tokens f (Section 2.1 and Table 3).
GATINGS = {
  "linear": lambda z, f: f,
  "additive": lambda z, f: z + f,
  "multiplicative": lambda z, f: z * f,
  "split": lambda z, f: z * f,  # z and f of one half of the channels each
}
SPATIALS = ("dense", "toeplitz")

# Table 1 of the paper; the `small` nets, of the size of `mixer_small`, are to
# train from scratch on 32x32 images. At 224x224 and 1,000 classes gMLP-Ti, S and B
# have 5.87, 19.42 and 73.08 million parameters, as in timm. The paper prints 5.9,
# 19.5 and 73.4; the cause of the 0.4% more of S and B is not known.
_SIZES = {
  "ti16": dict(patch_size=16, hidden_dim=128, ffn_dim=768, num_blocks=30),
  "s16": dict(patch_size=16, hidden_dim=256, ffn_dim=1536, num_blocks=30),
  "b16": dict(patch_size=16, hidden_dim=512, ffn_dim=3072, num_blocks=30),
  "small": dict(patch_size=4, hidden_dim=256, ffn_dim=1536, num_blocks=8),
}
# The paper has images for gMLP only; it tries the others on text.
_KINDS = {"gmlp": {}, "amlp": dict(attention_dim=64), "tmlp": dict(spatial="toeplitz")}

_VARIANTS = {
  f"{kind}_{size}": fields | own for kind, own in _KINDS.items() for size, fields in _SIZES.items()
}


class ToeplitzDense(nn.Module):
  """y = W x + b over the last axis, W constant along its diagonals.

  W[i, j] = diagonals[i - j + n - 1] for output i and input j: 2n - 1 numbers, first the one of the
  upper right corner, in the middle the main diagonal.
  """

  kernel_init: Any
  bias_init: Any = nn.initializers.zeros
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., n] to [..., n]."""
    n = x.shape[-1]
    diagonals = self.param("diagonals", self.kernel_init, (2 * n - 1,), jnp.float32)
    bias = self.param("bias", self.bias_init, (n,), jnp.float32)
    index = jnp.arange(n)
    matrix = diagonals.astype(self.dtype)[index[:, None] - index + n - 1]
    return x.astype(self.dtype) @ matrix.T + bias.astype(self.dtype)


class TinyAttention(nn.Module):
  """Single-head softmax self-attention of aMLP (Figure 4 and its pseudo-code).

  `attention_dim` channels of queries, keys and values; the softmax is float32.
  """

  attention_dim: int
  out_dim: int
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Maps [batch, tokens, channels] to [batch, tokens, out_dim].

    The weights [batch, tokens, tokens] are sown as "attention" into "intermediates".
    """
    qkv = layers.Dense(3 * self.attention_dim, dtype=self.dtype, name="qkv")(x)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    scores = jnp.einsum("bnd,bmd->bnm", q, k, preferred_element_type=jnp.float32)
    scores = scores * self.attention_dim**-0.5
    if mask is not None:
      scores = jnp.where(mask[:, None, :], scores, jnp.finfo(scores.dtype).min)
    weights = nn.softmax(scores)
    self.sow("intermediates", "attention", weights)
    y = jnp.einsum("bnm,bmd->bnd", weights.astype(v.dtype), v)
    return layers.Dense(self.out_dim, dtype=self.dtype, name="out")(y)


class SpatialGatingUnit(nn.Module):
  """s(Z): a gate from a linear projection f over tokens (Section 2.1).

  f(Z) = W LN(Z) + b along tokens. Products start as the identity, with W near zero and b one, as
  the paper says. Of the other two it says nothing: the sum starts as the identity as well, with b
  zero; the linear unit with W at the usual scale, since near zero it would shut the block.

  W has the size `max_tokens`; of n tokens, fewer, its leading n x n part is used. `GATINGS` says
  the kinds of s, and `SPATIALS` the kinds of W.
  """

  max_tokens: int
  gating: str = "split"
  spatial: str = "dense"
  epsilon: float = 1e-5
  dtype: Any = "float32"

  @nn.compact
  def __call__(
    self, z: jax.Array, mask: jax.Array | None = None, attention: jax.Array | None = None
  ) -> jax.Array:
    """Maps z, [batch, tokens, channels], to the same, or to half the channels if split.

    `mask` [batch, tokens] is True for a real token; `attention` is added to f, of its shape.
    """
    z, f = jnp.split(z, 2, axis=-1) if self.gating == "split" else (z, z)
    f = nn.LayerNorm(epsilon=self.epsilon, dtype=self.dtype, name="norm")(f)
    f = self._over_tokens(f, mask)
    if attention is not None:
      f = f + attention
    return GATINGS[self.gating](z, f)

  def _over_tokens(self, f: jax.Array, mask: jax.Array | None) -> jax.Array:
    """W f + b along tokens."""
    size = self.max_tokens
    scale = size**-0.5 if self.gating == "linear" else 1e-6
    bias = float(self.gating in ("multiplicative", "split"))
    layer = ToeplitzDense if self.spatial == "toeplitz" else functools.partial(layers.Dense, size)
    layer = layer(
      kernel_init=nn.initializers.normal(scale),
      bias_init=nn.initializers.constant(bias),
      dtype=self.dtype,
    )
    return layers.over_tokens(layer, f, size, mask)


class GmlpBlock(nn.Module):
  """Channel expansion, GELU, spatial gating, and back; pre-normalised and residual.

  Fields are as in `GmlpStack`; `max_tokens` is as in `MixerBlock`.
  """

  ffn_dim: int
  max_tokens: int = 0
  gating: str = "split"
  spatial: str = "dense"
  attention_dim: int = 0
  gelu: str = "exact"
  layer_norm_epsilon: float = 1e-6
  gate_epsilon: float = 1e-5
  dtype: Any = "float32"

  @nn.compact
  def __call__(
    self, x: jax.Array, mask: jax.Array | None = None, *, drop_rate: Any = 0.0, train: bool = False
  ) -> jax.Array:
    """Maps x, [batch, tokens, channels], to the same shape.

    Args:
      mask: [batch, tokens], True for a real token; others influence no real one.
      drop_rate: of stochastic depth, a number; it acts if `train`, and needs the rng "dropout".

    Raises:
      ValueError: gating "split" has an odd ffn_dim, or there are too many tokens.
    """
    if self.gating == "split" and self.ffn_dim % 2:
      raise ValueError(f"ffn_dim is {self.ffn_dim}; gating 'split' needs an even one")
    dim = x.shape[-1]
    y = nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name="norm")(x)
    attention = None
    if self.attention_dim:  # from the block's normalised input, into the gate
      width = self.ffn_dim // 2 if self.gating == "split" else self.ffn_dim
      tiny = TinyAttention(self.attention_dim, width, dtype=self.dtype, name="tiny_attention")
      attention = tiny(y, mask)
    y = layers.gelu(layers.Dense(self.ffn_dim, dtype=self.dtype)(y), self.gelu)
    fields = (
      self.max_tokens or x.shape[1],
      self.gating,
      self.spatial,
      self.gate_epsilon,
      self.dtype,
    )
    y = SpatialGatingUnit(*fields, name="spatial_gating")(y, mask, attention)
    y = layers.Dense(dim, dtype=self.dtype)(y)
    return x + layers.StochasticDepth(rescale=True)(y, drop_rate, train=train)


class GmlpStack(family.Stack, kw_only=True):
  """The blocks of gMLPs of images, text and functions."""

  ffn_dim: family.width("channels inside a block")
  gating: one_of("how the projection over tokens gates the channels", tuple(GATINGS)) = "split"
  spatial: one_of("projection over tokens; Toeplitz: constant along diagonals (tMLP)", SPATIALS) = (
    "dense"
  )
  attention_dim: family.width("width of the tiny attention (aMLP: 64); 0: none", 0) = 0
  gate_epsilon: Annotated[float, Option("epsilon of LayerNorm in the gates", 0)] = 1e-5

  def mix(self, x: jax.Array, train: bool, mask: Any = None, grid: Any = ()) -> Any:
    return blocks.apply(self, GmlpBlock, x, mask, train=train)


class Gmlp(GmlpStack, family.Model, kw_only=True):
  """gMLP, aMLP and tMLP for images.

  Liu et al., 2021, https://arxiv.org/abs/2105.08050. Stochastic depth has one rate for all blocks
  and rescales the branches that it keeps, as in timm; the paper gives only survival probabilities
  (Ti 1, S 0.95, B 0.8). The epsilons are timm's.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    model = models.Gmlp(num_classes=10, patch_size=8, hidden_dim=8, num_blocks=1, ffn_dim=16)
    images = jnp.zeros((2, 32, 32, 3))
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), images)
    ```
  """


FAMILY = family.Family(
  variants=family.variants(Gmlp, _VARIANTS),
  layers={
    "GmlpBlock/tiny_attention": family.TOKENS,
    "GmlpBlock/spatial_gating": family.TOKENS,
    "GmlpBlock/spatial_gating/Dense_0": family.TOKENS_SQUARE,
  },
  image_sizes={name: 32 for name in _VARIANTS if name.endswith("_small")},
)
