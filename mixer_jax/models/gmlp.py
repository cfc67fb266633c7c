"""gMLP: MLPs with spatial gating; with Toeplitz matrices (tMLP), with attention (aMLP).

Liu et al., "Pay Attention to MLPs", NeurIPS 2021, https://arxiv.org/abs/2105.08050.
The blocks take token masks and shorter sequences, so that text models share them.
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import blocks, layers

# s(Z) for the projection over tokens f (Section 2.1 and Table 3).
GATINGS = {
  "linear": lambda z, f: f,
  "additive": lambda z, f: z + f,
  "multiplicative": lambda z, f: z * f,
  "split": lambda z, f: z * f,  # z and f of one half of the channels each
}
SPATIALS = ("dense", "toeplitz")
CHOICES = {"gating": tuple(GATINGS), "spatial": SPATIALS}

# Table 1 of the paper; the `small` nets, of the size of `mixer_small`, are to
# train from scratch on 32x32 images. At 224x224 and 1,000 classes gMLP-Ti, S and B
# have 5.87, 19.42 and 73.08 million parameters, as in timm. The paper prints 5.9,
# 19.5 and 73.4; what makes its S and B 0.4% larger is not known.
_SIZES = {
  "ti16": dict(patch_size=16, hidden_dim=128, ffn_dim=768, num_blocks=30),
  "s16": dict(patch_size=16, hidden_dim=256, ffn_dim=1536, num_blocks=30),
  "b16": dict(patch_size=16, hidden_dim=512, ffn_dim=3072, num_blocks=30),
  "small": dict(patch_size=4, hidden_dim=256, ffn_dim=1536, num_blocks=8),
}
# The paper has images for gMLP only; it tries the others on text.
_FAMILIES = {"gmlp": {}, "amlp": dict(attention_dim=64), "tmlp": dict(spatial="toeplitz")}

VARIANTS = {
  f"{family}_{size}": fields | own
  for family, own in _FAMILIES.items()
  for size, fields in _SIZES.items()
}


class ToeplitzDense(nn.Module):
  """y = W x + b over the last axis, W constant along its diagonals.

  W[i, j] = diagonals[i - j + n - 1] for output i and input j: 2n - 1 numbers,
  first the one of the upper right corner, in the middle the main diagonal.

  Attributes:
    kernel_init: initialiser of `diagonals`, [2n - 1].
    bias_init: initialiser of `bias`, [n].
    dtype: the dtype of the computation; parameters are float32.
  """

  kernel_init: Any
  bias_init: Any = nn.initializers.zeros
  dtype: Any = "float32"
  # Tied entries have no Kronecker-factored curvature: W is no free matrix.
  curvature: ClassVar[str] = "gradient"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., n] to [..., n]."""
    n = x.shape[-1]
    diagonals = self.param("diagonals", self.kernel_init, (2 * n - 1,))
    bias = self.param("bias", self.bias_init, (n,))
    index = jnp.arange(n)
    matrix = diagonals.astype(self.dtype)[index[:, None] - index + n - 1]
    return x.astype(self.dtype) @ matrix.T + bias.astype(self.dtype)


class TinyAttention(nn.Module):
  """Single-head softmax self-attention of aMLP (Figure 4 and its pseudo-code).

  Attributes:
    attention_dim: channels of queries, keys and values.
    out_dim: channels of the output.
    dtype: the dtype of the computation; parameters and softmax are float32.
  """

  attention_dim: int
  out_dim: int
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Maps [batch, tokens, channels] to [batch, tokens, out_dim]."""
    qkv = layers.Dense(3 * self.attention_dim, dtype=self.dtype, name="qkv")(x)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    scores = jnp.einsum("bnd,bmd->bnm", q, k, preferred_element_type=jnp.float32)
    scores = scores * self.attention_dim**-0.5
    if mask is not None:
      scores = jnp.where(mask[:, None, :], scores, jnp.finfo(scores.dtype).min)
    y = jnp.einsum("bnm,bmd->bnd", nn.softmax(scores).astype(v.dtype), v)
    return layers.Dense(self.out_dim, dtype=self.dtype, name="out")(y)


class SpatialGatingUnit(nn.Module):
  """s(Z): a gate from a linear projection f over tokens (Section 2.1).

  f(Z) = W LN(Z) + b along tokens. Products start as the identity, with W near
  zero and b one, as the paper says. Of the other two it says nothing: the sum
  starts as the identity as well, with b zero; the linear unit with W at the
  usual scale, since near zero it would shut the block.

  Attributes:
    max_tokens: size of W; of n tokens, fewer, the leading n x n part is used.
    gating: "linear" f(Z), "additive" Z + f(Z), "multiplicative" Z * f(Z), or
      "split" Z1 * f(Z2) with the halves Z1, Z2 of the channels.
    spatial: "dense" W, or "toeplitz".
    epsilon: of the LayerNorm.
    dtype: the dtype of the computation; parameters are float32.
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
    """Maps [batch, tokens, channels] to the same, or to half the channels if split.

    Args:
      z: [batch, tokens, channels].
      mask: [batch, tokens], True for a real token.
      attention: added to f, of its shape.
    """
    z, f = jnp.split(z, 2, axis=-1) if self.gating == "split" else (z, z)
    f = nn.LayerNorm(epsilon=self.epsilon, dtype=self.dtype, name="norm")(f)
    if mask is not None:
      f = jnp.where(mask[..., None], f, 0)
    f = self._over_tokens(f)
    if attention is not None:
      f = f + attention
    return GATINGS[self.gating](z, f)

  def _over_tokens(self, f: jax.Array) -> jax.Array:
    """W f + b along tokens."""
    size, tokens = self.max_tokens, f.shape[1]
    scale = size**-0.5 if self.gating == "linear" else 1e-6
    start = dict(
      kernel_init=nn.initializers.normal(scale),
      bias_init=nn.initializers.constant(float(self.gating in ("multiplicative", "split"))),
    )
    if self.spatial == "toeplitz":
      layer = ToeplitzDense(**start, dtype=self.dtype)
    else:
      layer = layers.Dense(size, **start, dtype=self.dtype)
    # Zeros for tokens that are not there, so that an nn.Dense of full size does
    # it, which second-order optimizers know.
    f = jnp.pad(f, ((0, 0), (0, size - tokens), (0, 0)))
    return jnp.swapaxes(layer(jnp.swapaxes(f, 1, 2)), 1, 2)[:, :tokens]


class GmlpBlock(nn.Module):
  """Channel expansion, GELU, spatial gating, and back; pre-normalised and residual.

  The fields are those of `Gmlp`, and max_tokens, the longest sequence.
  """

  ffn_dim: int
  max_tokens: int
  gating: str = "split"
  spatial: str = "dense"
  attention_dim: int = 0
  gelu: str = "exact"
  layer_norm_epsilon: float = 1e-6
  gate_epsilon: float = 1e-5
  dtype: Any = "float32"

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    mask: jax.Array | None = None,
    *,
    drop_rate: float | jax.Array = 0.0,
    train: bool = False,
  ) -> jax.Array:
    """Maps [batch, tokens, channels] to the same shape.

    Args:
      x: [batch, tokens, channels], at most max_tokens tokens.
      mask: [batch, tokens], True for a real token; others influence no real one.
      drop_rate: of stochastic depth.
      train: whether stochastic depth drops; it needs the rng "dropout".

    Raises:
      ValueError: a field has a meaningless value, or there are too many tokens.
    """
    self._check_fields()
    tokens, dim = x.shape[1:]
    if tokens > self.max_tokens:
      raise ValueError(f"{tokens} tokens are more than max_tokens {self.max_tokens}")
    y = nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name="norm")(x)
    attention = None
    if self.attention_dim:  # from the block's normalised input, into the gate
      width = self.ffn_dim // 2 if self.gating == "split" else self.ffn_dim
      tiny = TinyAttention(self.attention_dim, width, dtype=self.dtype, name="tiny_attention")
      attention = tiny(y, mask)
    y = layers.gelu(layers.Dense(self.ffn_dim, dtype=self.dtype)(y), self.gelu)
    y = SpatialGatingUnit(
      self.max_tokens,
      gating=self.gating,
      spatial=self.spatial,
      epsilon=self.gate_epsilon,
      dtype=self.dtype,
      name="spatial_gating",
    )(y, mask, attention)
    y = layers.Dense(dim, dtype=self.dtype)(y)
    return x + layers.StochasticDepth(rescale=True)(y, drop_rate, train=train)

  def _check_fields(self) -> None:
    for field, known in CHOICES.items():
      value = getattr(self, field)
      if value not in known:
        raise ValueError(f"{field} is {value!r}; known: {', '.join(known)}")
    if self.attention_dim < 0:
      raise ValueError(f"attention_dim is {self.attention_dim}; 0 is none, the paper's is 64")
    if self.gating == "split" and self.ffn_dim % 2:
      raise ValueError(f"ffn_dim is {self.ffn_dim}; gating 'split' needs an even one")


class Gmlp(nn.Module):
  """gMLP for images.

  Attributes:
    num_classes: size of the output.
    patch_size: side of a square patch in pixels; it divides height and width.
    hidden_dim: channels of a token (d_model).
    ffn_dim: channels inside a block (d_ffn).
    num_blocks: number of blocks.
    gating: "linear", "additive", "multiplicative" or "split" (the paper's).
    spatial: "dense", or "toeplitz" for projections over tokens that are
      constant along diagonals (tMLP).
    attention_dim: width of the tiny attention (aMLP, 64 in the paper); 0 for none.
    stochastic_depth: drop rate of every block, kept branches rescaled (timm's
      rule; the paper gives but survival probabilities: Ti 1, S 0.95, B 0.8).
    gelu: "exact", as in timm, or "tanh".
    layer_norm_epsilon: of the LayerNorms of the tokens; 1e-6 in timm.
    gate_epsilon: of those in the spatial gating units; 1e-5 in timm.
    remat: compute the inside of each block again in the backward pass, which saves
      memory; on a CPU only together with scan_blocks.
    scan_blocks: loop over one program of a block; `blocks.stacked` says how its
      parameters are laid out.
    dtype: the dtype of the computation; parameters, normalisation statistics
      and logits are float32.
  """

  num_classes: int
  patch_size: int
  hidden_dim: int
  ffn_dim: int
  num_blocks: int
  gating: str = "split"
  spatial: str = "dense"
  attention_dim: int = 0
  stochastic_depth: float = 0.0
  gelu: str = "exact"
  layer_norm_epsilon: float = 1e-6
  gate_epsilon: float = 1e-5
  remat: bool = False
  scan_blocks: bool = False
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, height, width, 3] to float32 logits [batch, num_classes].

    The tokens before the last normalisation, [batch, tokens, channels], are
    sown as "tokens" into the collection "intermediates".
    """
    x = layers.image_tokens(images, self.patch_size, self.hidden_dim, self.dtype)
    fields = dict(
      ffn_dim=self.ffn_dim,
      max_tokens=x.shape[1],
      gating=self.gating,
      spatial=self.spatial,
      attention_dim=self.attention_dim,
      gelu=self.gelu,
      layer_norm_epsilon=self.layer_norm_epsilon,
      gate_epsilon=self.gate_epsilon,
      dtype=self.dtype,
    )
    x = blocks.apply(
      GmlpBlock,
      fields,
      x,
      drop_rates=[self.stochastic_depth] * self.num_blocks,
      train=train,
      remat=self.remat,
      scan=self.scan_blocks,
    )
    self.sow("intermediates", "tokens", x)
    x = nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name="norm")(x)
    x = jnp.mean(x, axis=1, dtype=jnp.float32)
    return nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros, name="head")(x)
