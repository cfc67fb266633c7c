"""Learning rate, momentum and damping from the exact quadratic model of the loss.

Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671, Sections 6.4 to 7. With the gradient g
and the Fisher matrix F of one batch, the model of h = loss + decay / 2 |theta|^2 is

  q(d) = <g + decay theta, d> + 1/2 d^T (F + decay I) d.

`by_quadratic_model` steps to the minimum of q(d) + damping / 2 |d|^2 over d = alpha Delta + mu delta, with
Delta the preconditioned gradient, negative, and delta the update before. `levenberg_marquardt`
compares q(d) with the change of h. F is never formed: with J the derivative of the outputs and
B B^T their Fisher matrix, v^T F w is the inner product of B^T J v and B^T J w.
"""

from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import first_order
from mixer_jax.optim.curvature.curvature import Curvature, tangent
from mixer_jax.optim.trees import whole_tree, wide, wide_type

# Factor of the factors' damping per update of their period.
_FACTOR_CHANGE = 19 / 20
# Reduction ratios below and above which damping grows and shrinks.
_LOW, _HIGH = 0.25, 0.75
# A vector with at most this share of its squared length outside of another is parallel to it.
_INDEPENDENT = 1e-6


class ByModelState(NamedTuple):
  """State of `by_quadratic_model`.

  Attributes:
    count: number of updates so far, an int32 scalar.
    inner: state of the preconditioner.
    previous: the last update, like the parameters, in the type of sums.
    coefficients: alpha and mu of the last update, [2], before the learning rate.
    factor_damping: the preconditioner's own damping gamma^2, a scalar; None if it has none.
  """

  count: jax.Array
  inner: Any
  previous: Any
  coefficients: jax.Array
  factor_damping: jax.Array | None = None


class LevenbergMarquardtState(NamedTuple):
  """State of `levenberg_marquardt`.

  Attributes:
    count: number of updates so far, an int32 scalar.
    inner: state of the optimizer.
    damping: of the next update, a scalar.
    ratio: the last reduction ratio, the loss's change over the model's; 1 before the first.
  """

  count: jax.Array
  inner: Any
  damping: jax.Array
  ratio: jax.Array


def chosen_numbers(opt_state: Any) -> dict[str, jax.Array]:
  """The numbers that replace options, by name, wherever they stand in a state; {}: none do.

  "damping" is that of the next update; "step_rate" and "step_momentum" are the coefficients of the
  last one, before the learning rate.
  """
  kinds, found = (LevenbergMarquardtState, ByModelState), {}
  for part in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds)):
    if isinstance(part, LevenbergMarquardtState):
      found |= chosen_numbers(part.inner) | {"damping": part.damping}
    elif isinstance(part, ByModelState):
      found |= dict(zip(("step_rate", "step_momentum"), part.coefficients))
  return found


def by_quadratic_model(
  precondition: optax.GradientTransformationExtraArgs,
  curvature: Curvature,
  *,
  learning_rate: Any = 1.0,
  damping: Any = 1e-2,
  weight_decay: Any = 0.0,
  decay_mask: Any = None,
  factor_damping_period: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Steps to the minimum of the damped model along the direction and the update before.

  With a `factor_damping_period` of T the factors' damping gamma is one of its own, which begins as
  sqrt(damping + decay). Every T updates, the first included, it becomes the one of gamma, w gamma
  and gamma / w, w = (19/20)^(T/2), whose step has the least damped model (Section 6.6). Such an
  update preconditions three times more, renewals of factors and inverses included.

  Args:
    precondition: `scale_by_kfac` or `scale_by_ekfac`; it gets the gradient of h, and the decay on top
      of the damping.
    curvature: of the model, whose likelihood is that of the loss.
    learning_rate: a number or a schedule, multiplies the step.
    damping: a number or a schedule; the extra argument `damping` takes precedence.
    weight_decay: a number or a schedule, a part of the objective.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    factor_damping_period: with factored damping a multiple of inverse_period; or None.

  Returns:
    A transform with a `ByModelState`, whose update needs parameters and `batch`.
  """

  period = factor_damping_period

  def init_fn(params):
    first_order.checked_rate(learning_rate)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(wide(x)), params)
    dtype = wide_type(params)
    own = None if period is None else jnp.zeros((), dtype)
    count, coefficients = jnp.zeros((), jnp.int32), jnp.zeros(2, dtype)
    return ByModelState(count, precondition.init(params), zeros, coefficients, own)

  def update_fn(updates, state, params=None, *, batch=None, model_params=None, **extra):
    whole = whole_tree(params if model_params is None else model_params, ())
    curvature.compare(updates, whole, batch, state.count, scale=True)
    given = extra.pop("damping", damping)
    lam, rate = (_at(x, state.count) for x in (given, learning_rate))
    decay = _at(weight_decay, state.count)
    decayed = lambda g, p: (g + decay * p).astype(g.dtype)
    gradient = jax.tree.map(decayed, updates, _decayed(params, decay_mask))
    extra |= dict(batch=batch, model_params=model_params)

    def best(shift):
      """The vectors, their coefficients, the model there and the state, for a damping."""
      given = extra | dict(damping=shift)
      direction, inner = precondition.update(gradient, state.inner, params, **given)
      vectors = jax.tree.map(jnp.negative, direction), state.previous
      products = curvature.quadratic(whole, batch, vectors) + lam * inner_products(vectors)
      products += decay * inner_products([_decayed(v, decay_mask) for v in vectors])
      along = slopes(gradient, vectors)
      least = minimum(products, along)
      return vectors, least, least @ products @ least / 2 + along @ least, inner

    def of_three(shift):
      shifts = shift * _FACTOR_CHANGE ** (period * jnp.array([0.0, 1.0, -1.0], shift.dtype))
      values = jax.lax.map(lambda x: best(x)[2], shifts)
      return shifts[jnp.argmin(jnp.nan_to_num(values, nan=jnp.inf))]

    shift, own = lam + decay, None
    if period is not None:
      shift = jnp.where(state.count == 0, shift, state.factor_damping)
      shift = shift.astype(state.factor_damping.dtype)
      shift = own = jax.lax.cond(state.count % period == 0, of_three, lambda x: x, shift)
    vectors, (alpha, mu), _, inner = best(shift)
    whole_step = lambda x, y: rate * (alpha * wide(x) + mu * y)
    previous = jax.tree.map(lambda x, y: whole_step(x, y).astype(y.dtype), *vectors)
    step = jax.tree.map(lambda u, x: x.astype(u.dtype), updates, previous)
    count = optax.safe_increment(state.count)
    coefficients = jnp.stack([alpha, mu]).astype(state.coefficients.dtype)
    return step, ByModelState(count, inner, previous, coefficients, own)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def levenberg_marquardt(
  tx: optax.GradientTransformationExtraArgs,
  curvature: Curvature,
  damping: float = 1e-2,
  *,
  weight_decay: Any = 0.0,
  decay_mask: Any = None,
  damping_period: int = 5,
  damping_decay: float = 0.95,
  min_damping: float = 1e-8,
  max_damping: float = 1e8,
) -> optax.GradientTransformationExtraArgs:
  """Adapts the damping of an optimizer to how well the model predicts the change of the loss.

  Every `damping_period` updates the damping is multiplied by w = damping_decay^damping_period if
  the reduction ratio is above 3/4, and divided by w if it is below 1/4 or if the model expects no
  reduction (Section 6.5). The model is taken without damping there.

  The update needs the extra argument `value_fn`, which maps parameters to the loss on the same
  batch; `value`, the loss before the step, saves an evaluation.

  Args:
    tx: gets the extra argument `damping`.
    curvature: of the model, whose likelihood is that of the loss.
    damping: the first one, a number.
    weight_decay: of the objective, where `tx` is `by_quadratic_model` with this decay.
    decay_mask: as in `by_quadratic_model`.
    damping_period: updates between changes.
    damping_decay: change of the damping per update, see above.
    min_damping: the damping stays at this or above.
    max_damping: the damping stays at this or below.

  Returns:
    A transform with a `LevenbergMarquardtState`.

  Raises:
    ValueError: in the update no `value_fn`.
  """

  def init_fn(params):
    dtype = wide_type(params)
    first = jnp.array(damping, dtype)  # a copy: the state may be donated
    return LevenbergMarquardtState(
      jnp.zeros((), jnp.int32), tx.init(params), first, jnp.ones((), dtype)
    )

  def update_fn(updates, state, params=None, *, batch=None, value=None, value_fn=None, **extra):
    if not callable(value_fn):
      raise ValueError(
        "adaptive_damping needs the loss as a function of the parameters:"
        " tx.update(grads, state, params, batch=batch, value_fn=lambda params: loss)"
      )
    extra |= dict(batch=batch, damping=state.damping)
    step, inner = tx.update(updates, state.inner, params, **extra)
    whole = params if extra.get("model_params") is None else extra["model_params"]

    def adapted():
      decay = _at(weight_decay, state.count)
      middle = jax.tree.map(lambda p, d: p + d / 2, _decayed(params, decay_mask), step)
      change = slopes(middle, [_decayed(step, decay_mask)])[0]
      exact = decay * change  # the change of the decay's part
      curve = curvature.quadratic(whole, batch, [step])[0, 0] / 2
      predicted = slopes(updates, [step])[0] + curve + exact
      before = value_fn(whole) if value is None else value
      after = value_fn(jax.tree.map(jnp.add, whole, tangent(whole, step)))
      ratio = jnp.where(predicted < 0, (after - before + exact) / predicted, -1.0)
      ratio = jnp.nan_to_num(ratio.astype(state.ratio.dtype), nan=-1.0)
      less = jnp.asarray(damping_decay, state.damping.dtype) ** damping_period
      factor = jnp.select([ratio > _HIGH, ratio < _LOW], [less, 1 / less], 1.0)
      lowest, highest = (jnp.asarray(x, state.damping.dtype) for x in (min_damping, max_damping))
      return jnp.clip(factor * state.damping, lowest, highest), ratio

    count = optax.safe_increment(state.count)
    kept = lambda: (state.damping, state.ratio)
    lam, ratio = jax.lax.cond(count % damping_period == 0, adapted, kept)
    return step, LevenbergMarquardtState(count, inner, lam, ratio)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


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


def _at(value: Any, count: jax.Array) -> Any:
  """A number, or a schedule's value."""
  return value(count) if callable(value) else value


def _decayed(tree: Any, mask: Any) -> Any:
  """The tree, zero where no parameter decays."""
  mask = mask(tree) if callable(mask) else mask
  keep = lambda kept, part: jax.tree.map(lambda x: x if kept else jnp.zeros_like(x), part)
  return tree if mask is None else jax.tree.map(keep, mask, tree)
