"""Attention: of Transformers, and over the points of a function (Galerkin, Fourier and others).

Vaswani et al., "Attention is all you need", 2017, https://arxiv.org/abs/1706.03762; Cao, "Choose a
Transformer: Fourier or Galerkin", NeurIPS 2021, https://arxiv.org/abs/2105.14995.
"""

import math
from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import layers

# The inputs of the two LayerNorms of each kind.
KINDS = {"galerkin": ("k", "v"), "fourier": ("q", "k")}
KINDS |= {"softmax": ("q", "k"), "linear": ("k", "v")}
SOFTMAX_FREE = ("galerkin", "fourier")
_SOWN = {"q": "queries", "k": "keys", "v": "values"}


class Attention(nn.Module):
  """Multi-head softmax attention from tokens to others, or to themselves; the softmax is float32."""

  num_heads: int
  channels: int
  kernel_init: Callable
  dropout_rate: float = 0.0
  dtype: Any = "float32"

  def setup(self):
    if self.channels % self.num_heads:
      raise ValueError(f"num_heads {self.num_heads} does not divide the {self.channels} channels")
    dense = lambda: layers.Dense(self.channels, kernel_init=self.kernel_init, dtype=self.dtype)
    self.query, self.key, self.value, self.out = dense(), dense(), dense(), dense()
    self.dropout = layers.Dropout(self.dropout_rate, name="Dropout_0")

  def keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two arrays [..., m, heads, channels / heads] of x, [..., m, channels]."""
    return self._split(self.key(x)), self._split(self.value(x))

  def __call__(
    self, x: jax.Array, keys_values: Any, mask: jax.Array, *, train: bool = False
  ) -> jax.Array:
    """Maps x, [..., n, channels], to the same shape: softmax(q k^T / sqrt(d)) v of each head.

    `mask`, True for a key that counts, broadcasts to [..., heads, n, m]. Weights are dropped if
    `train`.
    """
    q, (k, v) = self._split(self.query(x)), keys_values
    scores = jnp.einsum("...nhd,...mhd->...hnm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, jnp.finfo(scores.dtype).min)
    weights = self.dropout(nn.softmax(scores), deterministic=not train).astype(v.dtype)
    return self.out(jnp.einsum("...hnm,...mhd->...nhd", weights, v).reshape(x.shape))

  def _split(self, x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], self.num_heads, self.channels // self.num_heads)


class OperatorAttention(nn.Module):
  """Multi-head self-attention of operator transformers, for any number of tokens.

  With Q, K, V [n, d] of one head and LN a LayerNorm of that head's own:

    galerkin: Q (LN(K)^T LN(V)) / n, linear in n,
    fourier: (LN(Q) LN(K)^T) V / (n sqrt(d)), quadratic in n,
    softmax: softmax(LN(Q) LN(K)^T / sqrt(d)) V, quadratic in n,
    linear: softmax_d(Q) (softmax_n(LN(K))^T LN(V)) / n, linear in n; the softmax of Q is over the
      channels, that of K over the tokens (Shen et al., 2021, with the scale of the published code).

  The scale 1 / n makes the first two quadratures over the domain, so that a trained layer carries
  over to other resolutions. So does "softmax"; "linear" does not, since its softmax over the tokens
  is a mean already. The published code divides the Fourier scores by sqrt(d) as well, with
  positions counted in d; no LayerNorm absorbs that factor, since positions are not normalised.

  Two differences from the published code: attention weights are not dropped (there, half of them
  are, in evaluation as well), and the layer "out" is always there (there, only with positions).

  Attributes:
    init_gain: gain eta of the queries', keys' and values' start, Xavier uniform times eta plus
      delta I (the paper's diagonally dominant initialisation); None: 1e-3 for "fourier", else 1e-2.
    init_diagonal: delta of the same.
    norm_epsilon: of the LayerNorms. With the small start their inputs have a variance near
      init_diagonal^2 = 1e-4 times that of x; the published Darcy models take 1e-7.
    uniform_out: whether the layer "out" starts as PyTorch's do (`layers.uniform_start`).
  """

  kind: str
  num_heads: int
  init_gain: float | None = None
  init_diagonal: float = 1e-2
  norm_epsilon: float = 1e-5
  uniform_out: bool = False
  dtype: Any = "float32"

  @nn.compact
  def __call__(
    self, x: jax.Array, positions: jax.Array | None = None, mask: jax.Array | None = None
  ) -> jax.Array:
    """Maps x, [batch, tokens, channels], to the same shape.

    The "queries", "keys" and "values" [batch, tokens, heads, channels / heads] are sown into
    "intermediates", after their LayerNorms, without positions: each column is a function.

    A ValueError is raised if num_heads does not divide the channels.

    Args:
      positions: [batch or 1, tokens, p], coordinates prepended to the queries, keys and values of
        each head after the LayerNorms; heads are then d = channels / num_heads + p wide.
      mask: [batch, tokens], True for a real token; others influence none and do not count in n.
    """
    dim, heads = x.shape[-1], self.num_heads
    if dim % heads:
      raise ValueError(f"num_heads {heads} does not divide the {dim} channels")

    def project(name):
      y = layers.Dense(dim, kernel_init=self._kernel_init, dtype=self.dtype, name=name)(x)
      y = y.reshape(*x.shape[:2], heads, dim // heads)
      if name in KINDS[self.kind]:
        # Over a head's channels, with scale and bias [heads, channels / heads].
        norm = dict(epsilon=self.norm_epsilon, dtype=self.dtype, name=f"{name}_norm")
        y = nn.LayerNorm(reduction_axes=-1, feature_axes=(-2, -1), **norm)(y)
      self.sow("intermediates", _SOWN[name], y)
      if positions is None:
        return y
      coordinates = positions[:, :, None].astype(y.dtype)
      coordinates = jnp.broadcast_to(coordinates, (*y.shape[:3], positions.shape[-1]))
      return jnp.concatenate([coordinates, y], axis=-1)

    q, k, v = (project(name) for name in ("q", "k", "v"))
    y = self._attend(q, k, v, mask)
    y = y.reshape(*x.shape[:2], math.prod(y.shape[2:]))
    start = layers.uniform_start(y.shape[-1]) if self.uniform_out else {}
    return layers.Dense(dim, dtype=self.dtype, name="out", **start)(y)

  def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The new values [batch, tokens, heads, d] of such queries, keys and values."""
    n, real = k.shape[1], None if mask is None else mask[:, :, None, None]
    if mask is not None:
      n = jnp.maximum(jnp.sum(mask, axis=1), 1).astype(k.dtype)[:, None, None, None]
    if self.kind == "softmax":
      scores = jnp.einsum("bnhd,bmhd->bhnm", q, k / math.sqrt(k.shape[-1]))
      weights = _softmax(scores, -1, None if mask is None else mask[:, None, None])
      return jnp.einsum("bhnm,bmhe->bnhe", weights, v)
    if self.kind == "linear":
      q, k = _softmax(q, -1), _softmax(k, 1, real)
    elif mask is not None:  # these kinds are linear in the keys: a zero key changes nothing
      k = jnp.where(real, k, 0)
    k = k / n
    if self.kind == "fourier":
      k = k / math.sqrt(k.shape[-1])
      return jnp.einsum("bhnm,bmhe->bnhe", jnp.einsum("bnhd,bmhd->bhnm", q, k), v)
    return jnp.einsum("bnhd,bhde->bnhe", q, jnp.einsum("bnhd,bnhe->bhde", k, v))

  def _kernel_init(self, key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    kernel = nn.initializers.xavier_uniform()(key, shape, dtype)
    gain = self.init_gain
    if gain is None:
      gain = 1e-3 if self.kind == "fourier" else 1e-2
    return gain * kernel + self.init_diagonal * jnp.eye(*shape, dtype=dtype)


def _softmax(x: jax.Array, axis: int, real: jax.Array | None = None) -> jax.Array:
  """A softmax in float32; entries that are not `real` get nothing, even where none is."""
  weights = x.astype(jnp.float32)
  if real is None:
    return nn.softmax(weights, axis).astype(x.dtype)
  weights = nn.softmax(jnp.where(real, weights, jnp.finfo(jnp.float32).min), axis)
  return jnp.where(real, weights, 0).astype(x.dtype)
