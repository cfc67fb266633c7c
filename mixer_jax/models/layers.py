"""Layers that the model families share."""

from typing import Any

import flax.linen as nn
import jax


def gelu(x: jax.Array, form: str) -> jax.Array:
  """GELU, `form` "tanh" (Google's Mixer code) or "exact" (timm, deit)."""
  return nn.gelu(x, approximate=form == "tanh")


class MlpBlock(nn.Module):
  """Dense, GELU, Dense over the last axis, back to the input's width.

  Attributes:
    mlp_dim: width of the hidden layer.
    dropout_rate: probability of zeroing a unit, after each dense layer.
    gelu: "tanh" or "exact".
    dtype: the dtype of the computation; parameters are float32.
  """

  mlp_dim: int
  dropout_rate: float = 0.0
  gelu: str = "tanh"
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [..., dim] to [..., dim]; needs the rng "dropout" if it drops."""
    dim = x.shape[-1]
    x = nn.Dense(self.mlp_dim, dtype=self.dtype)(x)
    x = gelu(x, self.gelu)
    x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
    x = nn.Dense(dim, dtype=self.dtype)(x)
    return nn.Dropout(self.dropout_rate, deterministic=not train)(x)


class StochasticDepth(nn.Module):
  """Drops a residual branch for whole examples (Huang et al., 2016).

  Attributes:
    rate: probability of dropping the branch of one example.
    rescale: whether kept branches are divided by 1 - rate, so that the mean is
      kept (timm, deit). The released Mixer training code does not rescale.
  """

  rate: float
  rescale: bool

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    """Maps [batch, ...] to the same shape; needs the rng "dropout"."""
    if not train or self.rate == 0.0:
      return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    keep = jax.random.bernoulli(self.make_rng("dropout"), 1.0 - self.rate, shape)
    scale = 1.0 / (1.0 - self.rate) if self.rescale else 1.0
    return x * (keep * scale).astype(x.dtype)
