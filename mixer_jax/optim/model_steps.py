"""How far to go along the direction of a quadratic model, and how much damping the model needs.

The damping follows the rule of Levenberg and Marquardt on the reduction ratio, the change of the
loss over that which the model without damping expects (Nocedal and Wright, 2006, Numerical
Optimization, Section 10.3 and Algorithm 4.1): it shrinks above 3/4 and grows below 1/4. A step that
does not lessen the loss of its own batch is not made.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

from mixer_jax.optim.curvature.curvature import tangent

_LOW, _HIGH = 0.25, 0.75
_LEAST_RATE = 2.0**-30  # of the grid, as Müller and Zeinhofer have it
# A change of the loss of so many roundings says nothing about the model.
_ROUNDINGS = 8
# The length of the second order, twice, in that of the first: alpha of Transtrum and Sethna.
_LARGEST_BEND = 0.75


class Damping(NamedTuple):
  """How damping is adapted.

  Attributes:
    decay: factor where the ratio is above 3/4; below 1/4, and where a step is not made, it is
      divided by it.
    least: the damping stays at this or above.
    most: it stays at this or below.
  """

  decay: Any
  least: Any = 1e-20
  most: Any = 1e8


class Direction(NamedTuple):
  """A direction from some parameters.

  Attributes:
    params: the parameters, all of them.
    arrays: the direction, by path; parameters that it lacks do not move.
    slope: the derivative s of the loss along it.
    curve: c of the model rate s + rate^2 c / 2 of the loss's change.
    damping: that it was made with.
  """

  params: Any
  arrays: dict[str, jax.Array]
  slope: jax.Array
  curve: jax.Array
  damping: jax.Array


class Step(NamedTuple):
  """A step along a direction.

  Attributes:
    arrays: the step, by path: zeros where the loss would not be less or, if it is not known, the
      direction is not finite.
    kept: the direction, zeros in the same case.
    grid: the rate before the learning rate, where the next search begins.
    ratio: the reduction ratio.
    damping: of the next update, or of another try.
    made: whether a step is made.
  """

  arrays: dict[str, jax.Array]
  kept: dict[str, jax.Array]
  grid: jax.Array
  ratio: jax.Array
  damping: jax.Array
  made: jax.Array


def stepped(
  way: Direction,
  learning_rate: Any,
  state: Any,
  how: Damping,
  line_search: bool,
  value: Any,
  value_fn: Callable[[Any], jax.Array] | None,
) -> Step:
  """The step along a direction, and the damping after it.

  Args:
    way: the direction.
    learning_rate: multiplies it.
    state: has the damping and the ratio before, and the `rate` where a line search begins.
    how: the damping is adapted.
    line_search: whether the rate is searched for, see `search`.
    value: the loss before the step, or None.
    value_fn: maps parameters to the loss; None: the damping stays, and every finite step is made.
  """
  rate = jnp.asarray(learning_rate, way.damping.dtype)
  if value_fn is None:
    finite = (jnp.isfinite(d).all() for d in way.arrays.values())
    made = functools.reduce(jnp.logical_and, finite, jnp.array(True))
    kept = {path: jnp.where(made, d, 0.0) for path, d in way.arrays.items()}
    steps = {path: rate * d for path, d in kept.items()}
    return Step(steps, kept, state.rate, state.ratio, state.damping, made)
  whole = tangent(way.params, way.arrays)
  move = lambda x: lambda p, d: (p + x * d).astype(p.dtype)
  loss = lambda x: _ordered(value_fn(jax.tree.map(move(rate * x), way.params, whole)), x.dtype)
  before = _ordered(value_fn(way.params) if value is None else value, rate.dtype)
  one = jnp.ones_like(rate)
  grid, after = search(loss, before, state.rate) if line_search else (one, loss(one))
  ratio, damping = adapted(way, rate, before, after, how)
  made = after < before
  kept = {path: jnp.where(made, d, 0.0) for path, d in way.arrays.items()}
  steps = {path: rate * grid * d for path, d in kept.items()}
  return Step(steps, kept, jnp.where(made, grid, 1.0), ratio, damping, made)


def _ordered(loss: Any, dtype: Any) -> jax.Array:
  """A loss that is no number is the worst."""
  return jnp.where(jnp.isnan(loss), jnp.inf, loss).astype(dtype)


def adapted(
  way: Direction, rate: jax.Array, before: jax.Array, after: jax.Array, how: Damping
) -> tuple[jax.Array, jax.Array]:
  """The reduction ratio of a step, and the next damping.

  A step that a search has shortened is compared with the whole one: it shows that damping was
  missing.
  """
  dtype = rate.dtype
  expected = rate * way.slope + rate**2 * way.curve / 2
  ratio = jnp.where(expected < 0, (after - before) / jnp.where(expected < 0, expected, 1.0), -1.0)
  ratio = jnp.nan_to_num(ratio, nan=-1.0, posinf=-1.0, neginf=-1.0)
  less = jnp.asarray(how.decay, dtype)
  cases = [~(after < before) | (ratio < _LOW), ratio > _HIGH]
  factor = jnp.select(cases, [1 / less, less], jnp.ones_like(less))
  lost = jnp.abs(after - before) <= _ROUNDINGS * jnp.finfo(dtype).eps * jnp.abs(before)
  factor = jnp.where((after < before) & lost, 1.0, factor)
  bounds = (jnp.asarray(x, dtype) for x in (how.least, how.most))
  return ratio, jnp.clip(factor * way.damping, *bounds)


def accelerated(
  direction: dict[str, jax.Array], second: dict[str, jax.Array], refused: bool
) -> dict[str, jax.Array]:
  """The direction d - second / 2; if `second` is too large, d alone, or with `refused` no numbers.

  Transtrum and Sethna, 2012, https://arxiv.org/abs/1201.5885, Section 2.4: such a step has too
  little damping.
  """
  square = lambda tree: sum(jnp.vdot(x, x) for x in tree.values())
  far = square(second) > _LARGEST_BEND**2 * square(direction)
  instead = {path: d * jnp.nan if refused else d for path, d in direction.items()}
  return {
    path: jnp.where(far, instead[path], d - second[path] / 2) for path, d in direction.items()
  }


def check_searchable(line_search: bool, value_fn: Any) -> None:
  """Raises a ValueError for a line search without the loss."""
  if line_search and value_fn is None:
    raise ValueError(
      "line_search needs the loss as a function of the parameters:"
      " tx.update(grads, state, params, batch=batch, value_fn=lambda params: loss)"
    )


def search(
  loss: Callable[[jax.Array], jax.Array], before: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The power of two with the least loss around `start`, and the loss there.

  Müller and Zeinhofer (2023, https://arxiv.org/abs/2302.13163, Section 4) compare the powers down
  to 2^-30; this walks over the same grid, downhill from `start`: up while the loss falls, or else
  down while it falls or is not below `before`.
  """
  first, double = loss(start), loss(2 * start)
  up = double < first
  factor = jnp.where(up, 2.0, 0.5).astype(start.dtype)

  def goes_on(carry):
    rate, _, going = carry
    return going & (rate > _LEAST_RATE) & (rate < 1 / _LEAST_RATE)

  def go(carry):
    rate, best, _ = carry
    new = loss(factor * rate)
    better = (new < best) | (~up & (best >= before))
    pick = lambda x, y: jnp.where(better, x, y)
    return pick(factor * rate, rate), pick(new, best), better

  begin = jnp.where(up, 2 * start, start), jnp.where(up, double, first), jnp.array(True)
  rate, best, _ = jax.lax.while_loop(goes_on, go, begin)
  return rate, best
