"""Layers that the model families share: computed in `dtype`, with float32 parameters."""

import functools
import math
from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

GELUS = ("tanh", "exact")


def gelu(x: jax.Array, form: str) -> jax.Array:
  """GELU, `form` "tanh" (Google's Mixer code) or "exact" (timm, deit)."""
  return nn.gelu(x, approximate=form == "tanh")


def flat_product(
  x: jax.Array, kernel: jax.Array, dimensions: Any = None, **options: Any
) -> jax.Array:
  """x @ kernel as one product of matrices: [..., inputs], [inputs, features] -> [..., features].

  The values equal those of `jax.lax.dot_general`, whose `dimensions` are always the last axis of x.
  The gradient of the kernel is faster: for a product over several axes XLA's CPU compiler first
  copies an operand into another order; for a product over one axis it reads both as they are.
  """
  y = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), **options)
  return y.reshape(*x.shape[:-1], kernel.shape[-1])


def as_tokens(x: jax.Array) -> jax.Array:
  """A grid [batch, *grid, channels] as tokens [batch, tokens, channels]; the batch may be empty."""
  return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


def along(axis: int, matrix: np.ndarray, x: jax.Array) -> jax.Array:
  """The constant matrix [m, n] times x along an axis of n values, which becomes one of m.

  The matrix is repeated for each index before the axis: XLA's CPU compiler would make a single
  product of the whole, and first copy x into another order, which takes several times as long. The
  precision is the highest, because GPUs and TPUs would round to 10 bits or fewer.
  """
  axis %= x.ndim
  each = x.reshape(math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
  matrices = jnp.broadcast_to(jnp.asarray(matrix, x.dtype), (len(each), *matrix.shape))
  y = jnp.einsum("bmn,bnc->bmc", matrices, each, precision="highest")
  return y.reshape(*x.shape[:axis], len(matrix), *x.shape[axis + 1 :])


# Over inputs of any number of axes.
Dense = functools.partial(nn.Dense, dot_general=flat_product)


def uniform_start(inputs: int) -> dict[str, Any]:
  """Initializers of a layer with so many inputs as PyTorch's: uniform within 1 / sqrt(inputs)."""

  def start(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

  return dict(kernel_init=start, bias_init=start)


def over_tokens(
  layer: Callable[[jax.Array], jax.Array], x: jax.Array, size: int, mask: jax.Array | None = None
) -> jax.Array:
  """Applies a layer for the last axis to the tokens of x, [batch, at most size tokens, channels].

  Zeros stand for missing tokens, and for those where `mask` [batch, tokens] is False: a layer of
  full size, as second-order optimizers know it, then acts by the leading part of its matrix. A
  ValueError if there are more tokens.
  """
  tokens = x.shape[1]
  if tokens > size:
    raise ValueError(f"{tokens} tokens are more than max_tokens {size}")
  if mask is not None:
    x = jnp.where(mask[..., None], x, 0)
  if tokens < size:
    x = jnp.pad(x, ((0, 0), (0, size - tokens), (0, 0)))
  return jnp.swapaxes(layer(jnp.swapaxes(x, 1, 2)), 1, 2)[:, :tokens]


class Dropout(nn.Module):
  """Sets a share `rate` of the values of an array to 0 and divides the others by 1 - rate.

  `nn.Dropout` with eight random bits a value instead of 32, which a CPU draws in a third to a fifth
  of the time. The threshold of a row is one of the two bytes next to 256 rate, drawn so that the
  probability is exactly `rate`, which is less than 1.
  """

  rate: float
  deterministic: bool | None = None

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool | None = None) -> jax.Array:
    """Maps [..., row] to the same shape; needs the rng "dropout" unless `deterministic`."""
    if nn.merge_param("deterministic", self.deterministic, deterministic) or not self.rate:
      return x
    bits_key, threshold_key = jax.random.split(self.make_rng("dropout"))
    words = -(-x.shape[-1] // 4)
    drawn = jax.random.bits(bits_key, (*x.shape[:-1], words), jnp.uint32)
    drawn = jax.lax.bitcast_convert_type(drawn, jnp.uint8).reshape(*x.shape[:-1], 4 * words)
    low, rest = divmod(256 * self.rate, 1)
    threshold = int(low) + jax.random.bernoulli(
      threshold_key, jnp.float32(rest), (*x.shape[:-1], 1)
    )
    # Both are bytes when they are compared, and 256 is none.
    keep = (drawn[..., : x.shape[-1]] >= threshold) & (threshold < 256)
    return jnp.where(keep, x / (1 - self.rate), 0).astype(x.dtype)


class MlpBlock(nn.Module):
  """Dense to `mlp_dim`, GELU, Dense back to the input's width; dropout after each dense layer."""

  mlp_dim: int
  dropout_rate: float = 0.0
  gelu: str = "tanh"
  dtype: Any = "float32"
  kernel_init: Any = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [..., dim] to [..., dim]; needs the rng "dropout" if it drops."""
    dim = x.shape[-1]
    x = Dense(self.mlp_dim, kernel_init=self.kernel_init, dtype=self.dtype)(x)
    x = gelu(x, self.gelu)
    x = Dropout(self.dropout_rate, deterministic=not train)(x)
    x = Dense(dim, kernel_init=self.kernel_init, dtype=self.dtype)(x)
    return Dropout(self.dropout_rate, deterministic=not train)(x)


class Affine(nn.Module):
  """y = x * scale + bias per channel: Aff of ResMLP (TPAMI, Equation 1), and parts of it.

  Attributes:
    scale_init: start of the scale; None means that there is no scale.
    bias_axes: number of last axes over which the bias, 0 at first, has values of its own.
  """

  scale_init: float | None = 1.0
  bias_axes: int = 1
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., channels] to the same shape; by default it starts as the identity."""
    own = lambda *args: self.param(*args, jnp.float32).astype(self.dtype)
    x = x.astype(self.dtype)
    if self.scale_init is not None:
      x = x * own("scale", nn.initializers.constant(self.scale_init), x.shape[-1:])
    if self.bias_axes:
      x = x + own("bias", nn.initializers.zeros, x.shape[-self.bias_axes :])
    return x


# At the end of a branch (Touvron et al., 2021).
LayerScale = functools.partial(Affine, bias_axes=0)


class StochasticDepth(nn.Module):
  """Drops a residual branch for whole examples (Huang et al., 2016)."""

  # Whether kept branches are divided by 1 - rate, so that the mean is kept (timm, deit). The
  # released Mixer training code does not rescale.
  rescale: bool

  @nn.compact
  def __call__(self, x: jax.Array, rate: float | jax.Array, *, train: bool) -> jax.Array:
    """Maps [batch, ...] to the same shape; `rate` is the probability of dropping an example.

    Nothing is dropped unless `train`, which needs the rng "dropout".
    """
    if not train or (not isinstance(rate, jax.Array) and rate == 0):
      return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    keep = jax.random.bernoulli(self.make_rng("dropout"), jnp.float32(1.0 - rate), shape)
    scale = 1.0 / (1.0 - rate) if self.rescale else 1.0
    return x * (keep * scale).astype(x.dtype)
