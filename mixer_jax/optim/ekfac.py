"""EK-FAC: second moments of gradients in K-FAC's eigenbasis, in the place of eigenvalues.

George et al., 2018, https://arxiv.org/abs/1806.03884. In the eigenbasis of A (x) G the diagonal
of the Fisher matrix is the second moment of each element of an example's gradient; the product
of eigenvalues is that under K-FAC's independence. The second moments are averages of

  "batch"     every update's (U_A^T V U_G)^2 of the batch's gradient V, times the number of rows of
              outputs (examples, or their tokens), since a mean over rows has so much less variance.
              Whenever a basis is renewed, they start from the products of eigenvalues, as in the
              authors' code. The gradient must be that of the batch, not clipped or accumulated;
  "examples"  the estimates in every renewal of the factors: the mean over examples of the squares
              of each one's gradient, labels drawn as for the factors. They start from the first in
              their basis. The rows of a layer must have the examples in front, but where a layer
              is mapped over them. Uses of a layer count apart, those in a loop or `jax.vmap`
              over anything but the batch included, and the words of an embedding.

With token_averaging="published" both are multiplied by the number of tokens, as A (x) G is: by
that of the example batch in "batch".
"""

from typing import Any

import jax
import jax.numpy as jnp

from mixer_jax.optim import algebra
from mixer_jax.optim.curvature.blocks import Block
from mixer_jax.optim.trees import taken


def averaged_moments(
  old: dict[str, jax.Array], fresh: dict[str, jax.Array], age: jax.Array, decay: Any
) -> dict[str, jax.Array]:
  """The averages after one more estimate, in which estimates have weights decay^age that sum to 1.

  A layer keeps its average if it has no estimate, or one that is zero (it saw only padding) or not
  finite. `age` is the number of estimates before.
  """
  decay = jnp.asarray(decay, jnp.result_type(jnp.float32, *fresh.values()))
  total = jnp.where(decay == 1.0, age + 1.0, (1.0 - decay ** (age + 1)) / (1.0 - decay))

  def mixed(old, fresh):
    axes = dict(axis=(-2, -1), keepdims=True)
    seen = fresh.any(**axes) & jnp.isfinite(fresh).all(**axes)
    return jnp.where(seen, old + (fresh - old) / total, old)

  return {name: mixed(x, fresh[name]) if name in fresh else x for name, x in old.items()}


def precondition(
  block: Block,
  gradients: dict[str, jax.Array],
  basis: tuple[algebra.Eigen, algebra.Eigen],
  moments: jax.Array,
  scale: jax.Array | None,
  decay: Any,
  damping: Any,
  dtype: str,
) -> tuple[jax.Array, jax.Array]:
  """The preconditioned gradient of one block, [*stacked, d_in, d_out], and its second moments.

  Args:
    block: a Kronecker block.
    gradients: by parameter path.
    basis: of the block.
    moments: second moments [..., d_in, d_out] before this update.
    scale: multiplies the squares of this gradient, which enter the moments; None: they do not.
      A gradient of zeros, as of a layer that was not reached, never enters them.
    decay: of the moments.
    damping: added to the moments.
    dtype: of the operands of the products.
  """
  v = algebra.rotated(block.matrix(taken(block, gradients)), basis, dtype)
  if scale is not None:
    decay = jnp.asarray(decay, moments.dtype)
    averaged = decay * moments + (1.0 - decay) * scale * v**2
    moments = jnp.where(v.any(axis=(-2, -1), keepdims=True), averaged, moments)
  return algebra.rotated_back(v / (moments + damping), basis, dtype), moments
