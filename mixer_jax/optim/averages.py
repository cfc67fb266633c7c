"""Moving averages of factors."""

from typing import Any

import jax
import jax.numpy as jnp

from mixer_jax.optim import algebra
from mixer_jax.optim.curvature.blocks import Diagonal, Kronecker

# The name of the programs that renew factors, for those who read a compiled program.
SCOPE = "factors"


def averaged(
  old: dict[str, Any],
  fresh: dict[str, Any],
  estimates: dict[str, jax.Array],
  decay: Any,
  identity_start: Any = False,
  skip_zeros: bool = True,
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """The moving averages of factors after one more estimate, and the number of estimates in each.

  Args:
    old: averages by name of the block.
    fresh: the estimate.
    estimates: how many estimates of each layer were averaged before, int32 [*stacked].
    decay: weight of the old average.
    identity_start: whether averages start at `old`; False: weights decay^age that sum to 1.
    skip_zeros: whether a layer whose estimate is zero keeps its average: it was not reached, or saw
      only padding. One whose estimate is not finite always does: a bad batch would stay for good.
  """

  def weight(number, dtype):
    """The weight of the newest of n + 1 estimates: (1 - decay) / (1 - decay^(n + 1))."""
    log = jnp.log(jnp.asarray(decay, dtype))
    quotient = jnp.expm1(log) / jnp.expm1((number + 1) * log)
    # The first weight must be exactly 1. The quotient is not, and some of `old` would stay.
    unbiased = jnp.where(number == 0, 1.0, quotient)
    return jnp.where(identity_start, jnp.asarray(1.0 - decay, dtype), unbiased)

  def mixed(name, number):
    sizes = _sizes(fresh[name], number.ndim)
    own = weight(number, sizes.dtype)
    seen = ((sizes > 0).any(axis=0) | (not skip_zeros)) & jnp.isfinite(sizes).all(axis=0)

    def mix(old, new):
      w, kept = (jnp.expand_dims(x, range(number.ndim, old.ndim)) for x in (own, ~seen))
      return jnp.where(kept, old, (1.0 - w) * old + w * new)

    return jax.tree.map(mix, old[name], fresh[name]), number + seen

  both = {name: mixed(name, number) for name, number in estimates.items()}
  return tuple({name: pair[i] for name, pair in both.items()} for i in (0, 1))


def _sizes(factors: Kronecker | Diagonal, stacked: int) -> jax.Array:
  """A size of each factor of a layer, [factors, *stacked]; it is 0 only for a factor of zeros."""
  if isinstance(factors, Kronecker):
    return jnp.stack([algebra.mean_eigenvalue(factor) for factor in factors])
  total = lambda x: jnp.abs(x).sum(axis=tuple(range(stacked, x.ndim)))
  return jnp.stack([total(x) for x in factors.values])
