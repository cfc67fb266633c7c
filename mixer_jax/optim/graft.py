"""Learning-rate grafting: the direction of one optimizer, the norm of another.

Agarwal et al., "Disentangling adaptive gradient methods from learning rates",
2020, https://arxiv.org/abs/2002.11803, Algorithm 1.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import curvature_options
from mixer_jax.options import Option

SCOPES = ("tensor", "global")


class GraftState(NamedTuple):
  """State of `graft`.

  Attributes:
    magnitude: state of the optimizer that gives the norm.
    direction: state of the optimizer that gives the direction.
    norms: Euclidean norms of both updates of the last step, before they were
      combined: (magnitude's, direction's), each a tree of float32 scalars like
      the parameters; zeros before the first step. `step_norms` reports them.
  """

  magnitude: Any
  direction: Any
  norms: tuple[Any, Any]


def graft(
  magnitude: optax.GradientTransformation,
  direction: optax.GradientTransformation,
  scope: Annotated[
    str, Option("norms of each tensor, or of the whole tree", choices=SCOPES)
  ] = "tensor",
  eps: Annotated[float, Option("added to the norm of the direction", 0)] = 1e-16,
) -> optax.GradientTransformationExtraArgs:
  """Takes steps along one optimizer's updates, as long as the other's.

  Both are complete optimizers that see the same gradients, parameters and extra
  arguments; learning rates, momentum and weight decay live inside each. With m
  and d their updates, the step is ||m|| d / (||d|| + eps).

  `graft(a, a)` makes the steps of `a`, as long as their norms are far above eps. A step whose direction is
  exactly zero is zero.

  Args:
    magnitude: gives the norm.
    direction: gives the direction.
    scope: "tensor" compares norms of each array (the study's code), "global"
      those of the whole tree.
    eps: added to the norm of the direction, the study's 1e-16.

  Raises:
    ValueError: an unknown scope, a negative eps, or a side that is no transform.
  """
  curvature_options.check_ranges(graft, scope=scope, eps=eps)
  for name, side in {"magnitude": magnitude, "direction": direction}.items():
    if not (hasattr(side, "init") and hasattr(side, "update")):
      raise ValueError(f"{name} is {side!r}; allowed: an optax transform, such as optim.sgd(0.1)")
  magnitude = optax.with_extra_args_support(magnitude)
  direction = optax.with_extra_args_support(direction)

  def init_fn(params):
    # Two trees of their own: a buffer that stands in a state twice cannot be donated.
    zeros = tuple(jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params) for _ in range(2))
    return GraftState(magnitude.init(params), direction.init(params), zeros)

  def update_fn(updates, state, params=None, **extra):
    m, magnitude_state = magnitude.update(updates, state.magnitude, params, **extra)
    d, direction_state = direction.update(updates, state.direction, params, **extra)
    norms = jax.tree.map(_norm, m), jax.tree.map(_norm, d)
    if scope == "tensor":
      step = jax.tree.map(lambda d, m, n: _rescale(d, m, n, eps), d, *norms)
    else:
      m_norm, d_norm = (_norm(jnp.array(jax.tree.leaves(tree))) for tree in norms)
      step = jax.tree.map(lambda d: _rescale(d, m_norm, d_norm, eps), d)
    return step, GraftState(magnitude_state, direction_state, norms)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _norm(x: jax.Array) -> jax.Array:
  """Euclidean norm in float32, safe from under- and overflow of the squares."""
  x = jnp.abs(x).astype(jnp.float32)
  peak = jnp.max(x, initial=0.0)
  return peak * jnp.sqrt(jnp.sum(jnp.square(x / jnp.where(peak > 0, peak, 1.0))))


def _rescale(direction, target_norm, norm, eps):
  divisor = norm + eps
  factor = jnp.where(divisor > 0, target_norm / jnp.where(divisor > 0, divisor, 1.0), 0.0)
  return (direction * factor).astype(direction.dtype)
