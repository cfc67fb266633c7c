"""BERT's encoder: the post-normalised Transformer that all-MLP models of text are compared with.

Devlin et al., "BERT: Pre-training of deep bidirectional Transformers", NAACL 2019,
https://arxiv.org/abs/1810.04805.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import attention, blocks, family, layers
from mixer_jax.models.text import EMBEDDING_INIT, TextModel

# Base and large of the paper; the small ones of Turc et al., 2019,
# https://arxiv.org/abs/1908.08962. All have heads of 64 and ffn_dim 4 times hidden_dim.
_SIZES = {"tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512)}
_SIZES |= {"base": (12, 768), "large": (24, 1024)}
_VARIANTS = {
  f"bert_{name}": dict(num_blocks=n, hidden_dim=d, num_heads=d // 64, ffn_dim=4 * d)
  for name, (n, d) in _SIZES.items()
}


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

    `mask` [batch, tokens] is True for a real token. If `train`, stochastic depth at `drop_rate`, a
    number, and dropout act on both branches.
    """

    def joined(x, y, name):
      y = layers.Dropout(self.dropout_rate, deterministic=not train)(y)
      y = x + layers.StochasticDepth(rescale=True)(y, drop_rate, train=train)
      return nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name=name)(y)

    fields = (self.num_heads, x.shape[-1], EMBEDDING_INIT, self.dropout_rate, self.dtype)
    attend = attention.Attention(*fields, name="attention")
    y = attend(x, attend.keys_values(x), mask[:, None, None], train=train)
    x = joined(x, y, "attention_norm")
    dense = functools.partial(layers.Dense, kernel_init=EMBEDDING_INIT, dtype=self.dtype)
    y = layers.gelu(dense(self.ffn_dim)(x), self.gelu)
    return joined(x, dense(x.shape[-1])(y), "norm")


class Bert(TextModel, kw_only=True):
  """BERT's encoder, with learned positions; the last block's norm is the output's.

  Devlin et al., 2019, https://arxiv.org/abs/1810.04805. Dropout acts on the embeddings, the
  attention weights and the end of each branch, as in the paper.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    sizes = dict(vocab_size=11, max_length=4, hidden_dim=8, num_blocks=1)
    model = models.Bert(ffn_dim=16, num_heads=2, segments=2, **sizes)
    ids, mask = jnp.ones((2, 4), int), jnp.ones((2, 4), bool)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, mask)
    ```
  """

  ffn_dim: family.width("hidden width of the MLP over channels")
  num_heads: family.width("heads of the attention; they divide hidden_dim")
  dropout_rate: family.DropoutRate = 0.1
  layer_norm_epsilon: family.Epsilon = 1e-12
  last_norm = "embeddings_norm"  # that of the embeddings: blocks end with their own

  def setup(self):
    super().setup()
    self.positions = nn.Embed(self.max_length, self.hidden_dim, embedding_init=EMBEDDING_INIT)

  def mix(self, x: jax.Array, train: bool, mask: Any = None, grid: Any = ()) -> Any:
    # Spread over the batch, so that K-FAC sees the rows of each example.
    places = jnp.broadcast_to(jnp.arange(x.shape[1]), mask.shape)
    x = super().pool(x + self.positions(places).astype(self.dtype))
    x = layers.Dropout(self.dropout_rate, deterministic=not train)(x)
    return blocks.apply(self, TransformerBlock, x, mask, train=train)

  def pool(self, x: jax.Array) -> jax.Array:
    return x


FAMILY = family.Family(
  variants=family.variants(Bert, _VARIANTS),
  layers={
    "positions": family.STEM,
    "TransformerBlock/attention": family.TOKENS,
  },
)
