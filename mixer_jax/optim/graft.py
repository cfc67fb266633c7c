"""Learning-rate grafting: the direction of one optimizer, the norm of another.

Agarwal et al., "Disentangling adaptive gradient methods from learning rates",
2020, https://arxiv.org/abs/2002.11803, Algorithm 1.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

import collections
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import trees
from mixer_jax.optim.curvature.blocks import path_name
from mixer_jax.optim.curvature.patterns import check_choice
from mixer_jax.optim.matrices import Matrices

SCOPES = ("tensor", "global")
SIDES = ("magnitude", "direction")


class GraftState(NamedTuple):
  """State of `graft`.

  Attributes:
    magnitude: state of the optimizer that gives the norm.
    direction: state of the optimizer that gives the direction.
    norms: Euclidean norms of both updates of the last step, before they were combined:
      (magnitude's, direction's), each a tree of float32 scalars like the parameters; zeros before
      the first step.
  """

  magnitude: Any
  direction: Any
  norms: tuple[Any, Any]


def graft(
  magnitude: optax.GradientTransformation,
  direction: optax.GradientTransformation,
  scope: str = "tensor",
  eps: float = 1e-16,
  matrices: Matrices | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Takes steps along one optimizer's updates, as long as the other's (learning-rate grafting).

  Agarwal et al., 2020, https://arxiv.org/abs/2002.11803, Algorithm 1. Both are complete optimizers
  that see the same gradients, parameters and extra arguments; learning rates, momentum and weight
  decay live inside each. With m and d their updates, the step is ||m|| d / (||d|| + eps).

  `graft(a, a)` makes the steps of `a`, as long as their norms are far above eps. Where the
  direction is exactly zero, so is the step.

  Args:
    magnitude: the optimizer that gives the norm.
    direction: the optimizer that gives the direction.
    scope: "tensor" compares norms of each array, as the K-FAC study's code, "global" those of the
      whole tree.
    eps: number added to the norm of the direction; the default is the study's.
    matrices: with scope "tensor", which axes count layers of a stack, each of which then has a norm
      of its own, see `matrix_axes`; None: one norm for each array.

  Returns:
    A transform with a `GraftState`.

  Raises:
    ValueError: scope is unknown.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"w": jnp.ones((2, 3))}, {"w": jnp.full((2, 3), 0.1)}
    tx = optim.graft(magnitude=optim.sgd(0.1), direction=optim.adam(1e-3))
    updates, state = tx.update(grads, tx.init(params), params)
    ```
  """
  check_choice("scope", scope, SCOPES)
  each = (matrices or Matrices(axes=lambda path, shape: None)).each
  rescaled = lambda d, m, n: _rescale(d, _norm_of_layers(m, n), _norm_of_layers(d, n), eps)
  magnitude = optax.with_extra_args_support(magnitude)
  direction = optax.with_extra_args_support(direction)

  def init_fn(params):
    if trees.is_placeholder(params):
      return GraftState(magnitude.init(params), direction.init(params), 0)
    if scope == "tensor":
      trees.check_arrays(params)
    # Two trees of their own: a buffer that stands in a state twice cannot be donated.
    zeros = tuple(jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params) for _ in range(2))
    return GraftState(magnitude.init(params), direction.init(params), zeros)

  def update_fn(updates, state, params=None, **extra):
    m, magnitude_state = magnitude.update(updates, state.magnitude, params, **extra)
    d, direction_state = direction.update(updates, state.direction, params, **extra)
    norms = jax.tree.map(_norm, m), jax.tree.map(_norm, d)
    if scope == "tensor":
      step = each(rescaled, d, m)
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


def _norm_of_layers(x: jax.Array, stacked: int) -> jax.Array:
  """The norm of each layer of a stack, broadcast to x."""
  norm = _norm
  for _ in range(stacked):
    norm = jax.vmap(norm)
  return jnp.expand_dims(norm(x), tuple(range(stacked, x.ndim)))


def _rescale(direction, target_norm, norm, eps):
  divisor = norm + eps
  factor = jnp.where(divisor > 0, target_norm / jnp.where(divisor > 0, divisor, 1.0), 0.0)
  return (direction * factor).astype(direction.dtype)


def squared_norms(opt_state: Any, kind: Callable[[str], str]) -> dict[str, jax.Array]:
  """Squared lengths of both sides of the last step (traceable), by "norm.SIDE.KIND".

  The K-FAC study explains its Table 4 by the implicit step size; these numbers are its subject.
  `kind` maps a parameter's path to the kind of its layer. Each value is a float32 scalar,
  the sum over all parameters of the kind; there are none if the state is not one of `graft`.
  """
  sums: dict[str, jax.Array] = collections.defaultdict(lambda: jnp.zeros((), jnp.float32))
  if isinstance(opt_state, GraftState):
    for side, norms in zip(SIDES, opt_state.norms):
      for path, norm in jax.tree_util.tree_leaves_with_path(norms):
        sums[f"norm.{side}.{kind(path_name(path))}"] += jnp.square(norm)
  return dict(sums)
