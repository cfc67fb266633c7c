"""Learning rate and momentum from the exact quadratic model of the loss.

Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671, Sections 6.4 to 7. With the gradient g
and the Fisher matrix F of one batch, the model of h = loss + decay / 2 |theta|^2 is

  q(d) = <g + decay theta, d> + 1/2 d^T (F + decay I) d.

`by_quadratic_model` steps to the minimum of q(d) + damping / 2 |d|^2 over d = alpha Delta + mu delta, with
Delta the preconditioned gradient, negative, and delta the update before. F is never formed: with J the derivative of the outputs and
B B^T their Fisher matrix, v^T F w is the inner product of B^T J v and B^T J w.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import first_order
from mixer_jax.optim.curvature.curvature import Curvature
from mixer_jax.optim.trees import whole_tree, wide, wide_type

# Factor of the factors' damping per update of their period.
_FACTOR_CHANGE = 19 / 20
# A vector with at most this share of its squared length outside of another is parallel to it.
_INDEPENDENT = 1e-6


class ByModelState(NamedTuple):
  """State of `by_quadratic_model`.

  Attributes:
    count: number of updates so far, an int32 scalar.
    inner: state of the preconditioner.
    previous: last update, like the parameters, in the type of sums.
    coefficients: multipliers [2] of the preconditioned gradient and of the previous update in the
      last update, before the learning rate.
    factor_damping: the preconditioner's own damping gamma^2, a scalar; None if it has none.
  """

  count: jax.Array
  inner: Any
  previous: Any
  coefficients: jax.Array
  factor_damping: jax.Array | None = None


def by_quadratic_model(
  precondition: optax.GradientTransformationExtraArgs,
  curvature: Curvature,
  *,
  learning_rate: optax.ScalarOrSchedule = 1.0,
  damping: optax.ScalarOrSchedule = 1e-2,
  weight_decay: optax.ScalarOrSchedule = 0.0,
  decay_mask: Any = None,
  factor_damping_period: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Chooses learning rate and momentum in every update by the exact quadratic model of the loss.

  The step goes to the minimum of the damped model over the span of the preconditioned gradient and
  the update before (Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671, Section 7).

  With a `factor_damping_period` of T the factors have a damping gamma of their own, which begins as
  sqrt(damping + decay). Every T updates, the first included, it becomes the one of gamma, w gamma
  and gamma / w, w = (19/20)^(T/2), whose step has the least damped model (Section 6.6). Such an
  update preconditions three times more, renewals of factors and inverses included.

  Args:
    precondition: a `scale_by_kfac` or `scale_by_ekfac`. It gets the gradient of loss + decay / 2
      |params|^2, and the decay on top of the damping.
    curvature: the `Curvature` of the model, whose likelihood is that of the loss.
    learning_rate: a number or a schedule, multiplies the step.
    damping: a number or a schedule; an extra argument `damping` of the update takes precedence.
    weight_decay: a number or a schedule; the decay is a part of the objective.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    factor_damping_period: T above, with factored damping a multiple of inverse_period; None: the
      factors have the damping of the model.

  Returns:
    A transform with a `ByModelState`, whose update needs parameters, `batch` and `rng`.

  Raises:
    ValueError: in the update, `batch` or parameters are missing.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.by_quadratic_model(optim.scale_by_kfac(curvature), curvature)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params, batch=batch, rng=key)
    ```
  """
  own = _ByModel(
    *(precondition, curvature, learning_rate, damping, weight_decay, decay_mask),
    factor_damping_period,
  )
  return optax.GradientTransformationExtraArgs(own.init, own.update)


class _ByModel(NamedTuple):
  """The transform; its fields are the arguments of `by_quadratic_model`."""

  precondition: optax.GradientTransformationExtraArgs
  curvature: Curvature
  learning_rate: Any
  damping: Any
  weight_decay: Any
  decay_mask: Any
  period: int | None

  def init(self, params: Any) -> ByModelState:
    first_order.checked_rate(self.learning_rate)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(wide(x)), params)
    dtype = wide_type(params)
    own = None if self.period is None else jnp.zeros((), dtype)
    count, coefficients = jnp.zeros((), jnp.int32), jnp.zeros(2, dtype)
    return ByModelState(count, self.precondition.init(params), zeros, coefficients, own)

  def update(self, updates, state, params=None, *, batch=None, model_params=None, **extra):
    whole = whole_tree(params if model_params is None else model_params, ())
    self.curvature.compare(updates, whole, batch, state.count, scale=True)
    given = extra.pop("damping", self.damping)
    lam, rate, decay = (at(x, state.count) for x in (given, self.learning_rate, self.weight_decay))
    decayed = lambda g, p: (g + decay * p).astype(g.dtype)
    gradient = jax.tree.map(decayed, updates, decayed_part(params, self.decay_mask))
    extra |= dict(batch=batch, model_params=model_params)

    def best(shift):
      """The vectors, their coefficients, the model there and the state, for a damping."""
      given = extra | dict(damping=shift)
      direction, inner = self.precondition.update(gradient, state.inner, params, **given)
      vectors = jax.tree.map(jnp.negative, direction), state.previous
      products = self.curvature.quadratic(whole, batch, vectors) + lam * inner_products(vectors)
      products += decay * inner_products([decayed_part(v, self.decay_mask) for v in vectors])
      along = slopes(gradient, vectors)
      least = minimum(products, along)
      return vectors, least, least @ products @ least / 2 + along @ least, inner

    shift, own = lam + decay, None
    if self.period is not None:
      shift = own = self._factor_damping(state, shift, lambda shift: best(shift)[2])
    vectors, (alpha, mu), _, inner = best(shift)
    whole_step = lambda x, y: (rate * (alpha * wide(x) + mu * y)).astype(y.dtype)
    previous = jax.tree.map(whole_step, *vectors)
    step = jax.tree.map(lambda u, x: x.astype(u.dtype), updates, previous)
    count = optax.safe_increment(state.count)
    coefficients = jnp.stack([alpha, mu]).astype(state.coefficients.dtype)
    return step, ByModelState(count, inner, previous, coefficients, own)

  def _factor_damping(self, state, first, model):
    """The preconditioner's damping: where it is due the one of three with the least model."""

    def of_three(shift):
      powers = self.period * jnp.array([0.0, 1.0, -1.0], shift.dtype)
      shifts = shift * _FACTOR_CHANGE**powers
      values = jax.lax.map(model, shifts)
      return shifts[jnp.argmin(jnp.nan_to_num(values, nan=jnp.inf))]

    shift = jnp.where(state.count == 0, first, state.factor_damping)
    shift = shift.astype(state.factor_damping.dtype)
    return jax.lax.cond(state.count % self.period == 0, of_three, lambda x: x, shift)


def minimum(products: jax.Array, slopes: jax.Array) -> jax.Array:
  """The w [2] that minimises w^T products w / 2 + slopes^T w; 0 for a vector that adds nothing."""
  over = lambda x, y: jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), 0.0)
  (one, both), (_, two) = products
  share = over(both, one)  # how much of the first is in the second
  rest = two - share * both
  rest = jnp.where(rest > _INDEPENDENT * two, rest, 0.0)
  second = -over(slopes[1] - share * slopes[0], rest)
  return jnp.stack([-over(slopes[0], one) - share * second, second])


def inner_products(vectors: Sequence[Any]) -> jax.Array:
  """All inner products of trees, [k, k]."""
  return jnp.array([[_vdot(v, w) for w in vectors] for v in vectors])


def slopes(gradient: Any, vectors: Sequence[Any]) -> jax.Array:
  """The derivatives along some vectors, [k]."""
  return jnp.array([_vdot(gradient, v) for v in vectors])


def _vdot(v: Any, w: Any) -> jax.Array:
  """In float32 or wider: squares of float16's numbers leave its range."""
  return optax.tree.vdot(jax.tree.map(wide, v), jax.tree.map(wide, w))


def at(value: Any, count: jax.Array) -> Any:
  """A number, or a schedule's value."""
  return value(count) if callable(value) else value


def decayed_part(tree: Any, mask: Any) -> Any:
  """The tree, zero where no parameter decays."""
  mask = mask(tree) if callable(mask) else mask
  keep = lambda kept, part: jax.tree.map(lambda x: x if kept else jnp.zeros_like(x), part)
  return tree if mask is None else jax.tree.map(keep, mask, tree)
