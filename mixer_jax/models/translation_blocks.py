"""Blocks of an encoder and a decoder, for whole sequences and for one token after the other."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import blocks, layers
from mixer_jax.models.attention import Attention

XAVIER = nn.initializers.xavier_uniform()


class TokenDense(nn.Module):
  """y = x W + b over at most `size` tokens, the last axis: n tokens take the leading n of each.

  `causal` zeroes the kernel below its diagonal: output t depends only on inputs 0 to t, and the
  entries below get no gradient. K-FAC treats W as a free matrix. Its update of the other entries is
  P (A (x) G)^-1 P g, for the gradient g and the projection P onto these entries. It descends, since
  the matrix is positive definite on them; the exact inverse of P (A (x) G) P would couple all
  columns. Entries below the diagonal may move, which changes no output.
  """

  size: int
  causal: bool = False
  dtype: Any = "float32"

  def setup(self):
    self.kernel = self.param(
      "kernel", nn.initializers.lecun_normal(), (self.size, self.size), jnp.float32
    )
    self.bias = self.param("bias", nn.initializers.zeros, (self.size,), jnp.float32)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [batch, any, tokens] to the same shape."""
    n = x.shape[-1]
    kernel, bias = (jnp.asarray(x, self.dtype) for x in (self.kernel[:n, :n], self.bias[:n]))
    kernel = jnp.triu(kernel) if self.causal else kernel
    return layers.flat_product(x.astype(self.dtype), kernel) + bias

  def step(self, x: jax.Array, t: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output t of a causal layer, and the sums with input t.

    A kept input would be read by all later steps, in sums over an axis that is not the last. Partial
    sums change by one product an entry, in place, which XLA's CPU compiler does faster.

    Args:
      x: input t, [..., channels].
      sums: the outputs without bias, as far as inputs 0 to t - 1 make them, [..., at most size,
        channels], float32. Those before t mean nothing.
    """
    kernel, bias = jnp.asarray(self.kernel), jnp.asarray(self.bias)
    sums = sums + kernel[t, : sums.shape[-2], None] * x[..., None, :]
    y = jax.lax.dynamic_index_in_dim(sums, t, sums.ndim - 2, keepdims=False)
    return (y + bias[t]).astype(self.dtype), sums


def norm(mixing: str, epsilon: float, dtype: Any) -> nn.Module:
  """Aff of ResMLP, or LayerNorm of the Transformer."""
  if mixing == "linear":
    return layers.Affine(dtype=dtype)
  return nn.LayerNorm(epsilon=epsilon, dtype=dtype)


class Branch(nn.Module):
  """Both ends of a residual branch: x + LayerScale(dropout(layer(norm(x)))), for any layer.

  The Transformer has no LayerScale. Fields are as in `translation.Translator`.
  """

  mixing: str
  layer_scale_init: float
  dropout_rate: float
  layer_norm_epsilon: float
  dtype: Any

  def setup(self):
    self.norm = norm(self.mixing, self.layer_norm_epsilon, self.dtype)
    self.dropout = layers.Dropout(self.dropout_rate)
    if self.mixing == "linear":
      self.layer_scale = layers.LayerScale(self.layer_scale_init, dtype=self.dtype)

  def enter(self, x: jax.Array) -> jax.Array:
    """The input of the layer."""
    return self.norm(x)

  def leave(self, x: jax.Array, y: jax.Array, train: bool = False) -> jax.Array:
    """The output of the branch, from its input and the layer's output."""
    y = self.dropout(y, deterministic=not train)
    return x + (self.layer_scale(y) if self.mixing == "linear" else y)


class EncoderBlock(nn.Module):
  """Tokens interact, then an MLP over channels; fields are as in `translation.Translator`."""

  max_length: int
  hidden_dim: int
  channels_mlp_dim: int
  num_heads: int
  mixing: str
  layer_scale_init: float
  dropout_rate: float
  gelu: str
  layer_norm_epsilon: float
  dtype: Any
  causal: ClassVar[bool] = False

  def setup(self):
    branch = lambda: Branch(**blocks.fields_of(self, Branch))
    self.mix_branch, self.mlp_branch = branch(), branch()
    if self.mixing == "linear":
      self.cross_patch = TokenDense(self.max_length, self.causal, self.dtype)
    else:
      self.attention = self._attention()
    options = dict(gelu=self.gelu, dtype=self.dtype, kernel_init=XAVIER)
    self.cross_channel = layers.MlpBlock(self.channels_mlp_dim, **options)

  def _attention(self) -> Attention:
    return Attention(self.num_heads, self.hidden_dim, XAVIER, dtype=self.dtype)

  def __call__(self, x: jax.Array, mask: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, tokens, channels] to the same shape; `mask` is True for a real token."""
    return self._over_channels(self._mixed(x, mask, train), train)

  def _mixed(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
    y = self.mix_branch.enter(x)
    if self.mixing == "linear":
      y = jnp.swapaxes(jnp.where(mask[..., None], y, 0), 1, 2)
      y = jnp.swapaxes(self.cross_patch(y), 1, 2)
    else:
      seen = mask[:, None, None]
      if self.causal:
        seen = seen & jnp.tri(mask.shape[1], dtype=bool)
      y = self.attention(y, self.attention.keys_values(y), seen)
    return self.mix_branch.leave(x, y, train)

  def _over_channels(self, x: jax.Array, train: bool = False) -> jax.Array:
    y = self.cross_channel(self.mlp_branch.enter(x))
    return self.mlp_branch.leave(x, y, train)


class DecoderBlock(EncoderBlock):
  """A token takes from earlier ones, then from the encoder's outputs, then an MLP over channels."""

  causal: ClassVar[bool] = True

  def setup(self):
    super().setup()
    self.cross_branch = Branch(**blocks.fields_of(self, Branch))
    self.cross_attention = self._attention()

  def __call__(
    self,
    x: jax.Array,
    mask: jax.Array,
    memory: tuple[jax.Array, jax.Array],
    memory_mask: jax.Array,
    *,
    train: bool = False,
  ) -> jax.Array:
    """Maps x, [batch, tokens, channels], to the same shape.

    `memory` is that of the encoder's outputs [batch, n, channels], `memory_mask` [batch, n].
    """
    x = self._crossed(self._mixed(x, mask, train), memory, memory_mask, train)
    return self._over_channels(x, train)

  def memory(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the encoder's outputs, [batch, n, heads, channels / heads]."""
    return self.cross_attention.keys_values(encoded)

  def _crossed(self, x: jax.Array, memory: Any, mask: jax.Array, train: bool = False) -> jax.Array:
    y = self.cross_attention(self.cross_branch.enter(x), memory, mask[:, None, None])
    return self.cross_branch.leave(x, y, train)

  def empty_cache(self, batch: int, beams: int, length: int) -> Any:
    """For `step`: sums of the linear layer, or keys and values, [batch, beams, length, ...]."""
    shape = (batch, beams, length, self.hidden_dim)
    if self.mixing == "linear":
      return jnp.zeros(shape)
    zeros = jnp.zeros((*shape[:3], self.num_heads, self.hidden_dim // self.num_heads), self.dtype)
    return zeros, zeros

  def step(
    self, x: jax.Array, t: jax.Array, cache: Any, memory: Any, memory_mask: jax.Array
  ) -> tuple[jax.Array, Any]:
    """Outputs of token t of each beam, [batch, beams, channels], and the cache with that token."""
    y = self.mix_branch.enter(x)
    if self.mixing == "linear":
      y, cache = self.cross_patch.step(y, t, cache)
    else:
      put = lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, t, axis=2)
      cache = jax.tree.map(put, cache, self.attention.keys_values(y))
      past = jnp.arange(cache[0].shape[2]) <= t
      y = self.attention(y[:, :, None], cache, past)[:, :, 0]
    # In cross-attention beams are the tokens of one sequence, so that they share its memory.
    x = self._crossed(self.mix_branch.leave(x, y), memory, memory_mask)
    return self._over_channels(x), cache
