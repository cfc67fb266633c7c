"""BERT's encoder: the post-normalised Transformer that all-MLP models of text are compared with.

Devlin et al., "BERT: Pre-training of deep bidirectional Transformers", NAACL 2019,
https://arxiv.org/abs/1810.04805.
"""

from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import blocks, family, layers
from mixer_jax.models.text import EMBEDDING_INIT, TextModel

# Base and large of the paper; the small ones of Turc et al., 2019,
# https://arxiv.org/abs/1908.08962. All have heads of 64 and ffn_dim 4 times hidden_dim.
_SIZES = {"tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512)}
_SIZES |= {"base": (12, 768), "large": (24, 1024)}
_VARIANTS = {
  f"bert_{name}": dict(num_blocks=n, hidden_dim=d, num_heads=d // 64, ffn_dim=4 * d)
  for name, (n, d) in _SIZES.items()
}


def attended(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  drop: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> jax.Array:
  """Softmax attention softmax(q k^T / sqrt(d)) v of each head; the softmax is float32.

  Args:
    q: queries [..., n, heads, d].
    k, v: keys and values [..., m, heads, d].
    mask: True for a key that counts; broadcasts to [..., heads, n, m].
    drop: applied to the weights [..., heads, n, m].
  """
  scores = jnp.einsum("...nhd,...mhd->...hnm", q, k, preferred_element_type=jnp.float32)
  scores = scores * q.shape[-1] ** -0.5
  scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
  return jnp.einsum("...hnm,...mhd->...nhd", drop(nn.softmax(scores)).astype(v.dtype), v)


class SelfAttention(nn.Module):
  """Multi-head softmax self-attention (Vaswani et al., 2017); the softmax is float32."""

  num_heads: int
  dropout_rate: float = 0.0
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps x, [batch, tokens, channels], to the same shape; `mask` is True for a real token.

    A ValueError if the heads do not divide the channels.
    """
    dim, heads = x.shape[-1], self.num_heads
    if dim % heads:
      raise ValueError(f"num_heads {heads} does not divide the {dim} channels")
    dense = lambda name: dense_layer(self, dim, name)
    split = lambda y: y.reshape(*y.shape[:2], heads, dim // heads)
    q, k, v = (split(dense(name)(x)) for name in ("query", "key", "value"))
    drop = layers.Dropout(self.dropout_rate, deterministic=not train)
    y = attended(q, k, v, mask[:, None, None], drop)
    return dense("out")(y.reshape(x.shape))


class TransformerBlock(nn.Module):
  """Attention, then an MLP over channels, each residual and normalised after; as in `Bert`."""

  ffn_dim: int
  num_heads: int
  dropout_rate: float = 0.0
  gelu: str = "exact"
  layer_norm_epsilon: float = 1e-12
  dtype: Any = "float32"

  @nn.compact
  def __call__(
    self, x: jax.Array, mask: jax.Array, *, drop_rate: Any = 0.0, train: bool = False
  ) -> jax.Array:
    """Maps x, [batch, tokens, channels], to the same shape.

    `mask` [batch, tokens] is True for a real token. `drop_rate` of stochastic depth, a number, and
    dropout act on both branches, if `train`.
    """

    def joined(x, y, name):
      y = layers.Dropout(self.dropout_rate, deterministic=not train)(y)
      y = x + layers.StochasticDepth(rescale=True)(y, drop_rate, train=train)
      return nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name=name)(y)

    attend = SelfAttention(self.num_heads, self.dropout_rate, self.dtype, name="attention")
    x = joined(x, attend(x, mask, train=train), "attention_norm")
    y = layers.gelu(dense_layer(self, self.ffn_dim, "Dense_0")(x), self.gelu)
    return joined(x, dense_layer(self, x.shape[-1], "Dense_1")(y), "norm")


def dense_layer(module: Any, features: int, name: str) -> nn.Module:
  """A dense layer with BERT's start."""
  return layers.Dense(features, kernel_init=EMBEDDING_INIT, dtype=module.dtype, name=name)


class Bert(TextModel, kw_only=True):
  """BERT's encoder, with learned positions; the last block's norm is the output's.

  Dropout acts on the embeddings, the attention weights and the end of each branch, as in the paper.
  """

  ffn_dim: family.width("hidden width of the MLP over channels")
  num_heads: family.width("heads of the attention; they divide hidden_dim")
  dropout_rate: family.DropoutRate = 0.1
  layer_norm_epsilon: family.Epsilon = 1e-12
  last_norm = "embeddings_norm"  # that of the embeddings: blocks end with their own

  def setup(self):
    super().setup()
    self.positions = nn.Embed(self.max_length, self.hidden_dim, embedding_init=EMBEDDING_INIT)

  def mix(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
    # Spread over the batch, so that K-FAC sees the rows of each example.
    places = jnp.broadcast_to(jnp.arange(x.shape[1]), mask.shape)
    x = super().pool(x + self.positions(places).astype(self.dtype))
    x = layers.Dropout(self.dropout_rate, deterministic=not train)(x)
    drop_rates = [self.stochastic_depth] * self.num_blocks
    return blocks.apply(self, TransformerBlock, x, mask, drop_rates=drop_rates, train=train)

  def pool(self, x: jax.Array) -> jax.Array:
    return x


FAMILY = family.Family(
  variants=family.variants(Bert, _VARIANTS),
  layers={
    "positions": family.STEM,
    "embeddings_norm": family.NORM,
    "TransformerBlock/attention": family.TOKENS,
    "TransformerBlock/attention_norm": family.NORM,
    "TransformerBlock/Dense_0": family.CHANNELS,
    "TransformerBlock/Dense_1": family.CHANNELS,
    "TransformerBlock/norm": family.NORM,
  },
  decayed=("kernel", "positions/embedding"),
)
