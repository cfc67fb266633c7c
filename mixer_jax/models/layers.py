"""Layers that the model families share.

A layer with parameters of its own, not inside an `nn.Dense` or `nn.Conv`, says by
the class attribute `curvature` what a second-order optimizer makes of them:
"scale_and_shift" (y = x * scale + bias, either may be missing) or "gradient" (no
curvature: the plain gradient).
"""

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax

GELUS = ("tanh", "exact")


def gelu(x: jax.Array, form: str) -> jax.Array:
  """GELU, `form` "tanh" (Google's Mixer code) or "exact" (timm, deit).

  Raises:
    ValueError: another form.
  """
  if form not in GELUS:
    raise ValueError(f"gelu is {form!r}; known: {', '.join(GELUS)}")
  return nn.gelu(x, approximate=form == "tanh")


def flat_product(x: jax.Array, kernel: jax.Array, dimensions: Any, **options: Any) -> jax.Array:
  """x @ kernel as one product of matrices: [..., inputs], [inputs, features] -> [..., features].

  The values are those of `jax.lax.dot_general`. The difference is in the gradient of
  the kernel: of a product over several axes XLA's CPU compiler copies an operand into
  another order first, of one over a single axis it reads both as they are.

  Args:
    x: [..., inputs].
    kernel: [inputs, features].
    dimensions: as `jax.lax.dot_general` takes them, those of the last axis of x.
    **options: of `jax.lax.dot_general`.
  """
  del dimensions
  y = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), **options)
  return y.reshape(*x.shape[:-1], kernel.shape[-1])


# Over inputs of any number of axes.
Dense = functools.partial(nn.Dense, dot_general=flat_product)


class MlpBlock(nn.Module):
  """Dense, GELU, Dense over the last axis, back to the input's width.

  Attributes:
    mlp_dim: width of the hidden layer.
    dropout_rate: probability of zeroing a unit, after each dense layer.
    gelu: "tanh" or "exact".
    dtype: the dtype of the computation; parameters are float32.
    kernel_init: initialiser of both kernels.
  """

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
    x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
    x = Dense(dim, kernel_init=self.kernel_init, dtype=self.dtype)(x)
    return nn.Dropout(self.dropout_rate, deterministic=not train)(x)


def image_tokens(images: jax.Array, patch_size: int, dim: int, dtype: Any) -> jax.Array:
  """Patch embedding by the layer "stem" of the calling module.

  Args:
    images: [batch, height, width, channels].
    patch_size: side of a square patch in pixels.
    dim: channels of a token.
    dtype: the dtype of the computation.

  Returns:
    [batch, tokens, dim], rows of patches from the top, each from the left.

  Raises:
    ValueError: patch_size does not divide the images.
  """
  height, width = images.shape[1:3]
  if height % patch_size or width % patch_size:
    raise ValueError(f"patch_size {patch_size} does not divide the image size {height}x{width}")
  patch = (patch_size, patch_size)
  x = nn.Conv(dim, patch, strides=patch, padding="VALID", dtype=dtype, name="stem")(images)
  return x.reshape(x.shape[0], -1, dim)


class Affine(nn.Module):
  """Aff of ResMLP: y = x * scale + bias per channel (TPAMI, Equation 1).

  Attributes:
    dtype: the dtype of the computation; parameters are float32.
  """

  dtype: Any = "float32"
  curvature: ClassVar[str] = "scale_and_shift"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., channels] to the same shape; starts as the identity."""
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
    return x.astype(self.dtype) * scale.astype(self.dtype) + bias.astype(self.dtype)


class LayerScale(nn.Module):
  """y = x * scale per channel, at the end of a residual branch (Touvron et al., 2021).

  Attributes:
    init: initial value of all scales.
    dtype: the dtype of the computation; parameters are float32.
  """

  init: float
  dtype: Any = "float32"
  curvature: ClassVar[str] = "scale_and_shift"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., channels] to the same shape."""
    scale = self.param("scale", nn.initializers.constant(self.init), (x.shape[-1],))
    return x.astype(self.dtype) * scale.astype(self.dtype)


class StochasticDepth(nn.Module):
  """Drops a residual branch for whole examples (Huang et al., 2016).

  Attributes:
    rescale: whether kept branches are divided by 1 - rate, so that the mean is
      kept (timm, deit). The released Mixer training code does not rescale.
  """

  rescale: bool

  @nn.compact
  def __call__(self, x: jax.Array, rate: float | jax.Array, *, train: bool) -> jax.Array:
    """Maps [batch, ...] to the same shape; needs the rng "dropout".

    Args:
      x: the branch.
      rate: probability of dropping it for one example.
      train: whether anything is dropped.
    """
    if not train or (not isinstance(rate, jax.Array) and rate == 0):
      return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    keep = jax.random.bernoulli(self.make_rng("dropout"), 1.0 - rate, shape)
    scale = 1.0 / (1.0 - rate) if self.rescale else 1.0
    return x * (keep * scale).astype(x.dtype)
