"""L-BFGS and self-scaled Broyden methods: the direction -H g, and a line search along it.

H approximates the inverse of the Hessian matrix by the pairs of steps s and changes y of the
gradient. Both gradients of a pair are those of one batch, so that a batch that differs from update
to update puts no noise into H; the loss of one batch should have little noise all the same: fixed
points, or all of the data. Dropout is no noise, for a step has one key.

An update needs the extra argument `value_fn`, which maps parameters to the loss on the batch of
the gradient; `value`, the loss before the step, saves an evaluation:

  tx.update(grads, state, params, value=loss, value_fn=lambda params: loss)

**A search that finds no lower loss** moves nothing, and H is forgotten: the next direction is the
gradient's. `QuasiNewtonState.failed` counts such iterations in a row. At 2 or more on one batch the
gradient itself led nowhere: the loss is as low as its precision lets it become, which float64 moves.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import broyden, first_order, trees


class QuasiNewtonState(NamedTuple):
  """State of `lbfgs` and `ssbroyden`; its floats have the parameters' type, float32 at least.

  Attributes:
    count: number of updates so far, an int32 scalar.
    memory: pairs of steps and gradients (`lbfgs`), or the inverse Hessian matrix (`ssbroyden`).
    step_size: multiplier of the last direction, a scalar; 0: the search found no lower loss.
    failed: iterations in a row without a lower loss, up to the last, an int32 scalar. At 2 or more
      on one batch the loss is as low as its precision lets it become.
  """

  count: jax.Array
  memory: Any
  step_size: jax.Array
  failed: jax.Array


class PairsMemory(NamedTuple):
  """The memory of `lbfgs`.

  Attributes:
    pairs: state of `optax.scale_by_lbfgs`.
    gradient: at the end of the last step, on its own batch; like the parameters.
  """

  pairs: Any
  gradient: Any


class _Rule(NamedTuple):
  """How H is made.

  `init(params)` makes a memory. `direction(memory, gradient, params)` returns H g and a memory.
  `learn(memory, pair, good)` adds the pair of a step, or forgets all pairs if it is not good.
  """

  init: Callable[[Any], Any]
  direction: Callable[[Any, Any, Any], tuple[Any, Any]]
  learn: Callable[[Any, broyden.Pair, jax.Array], Any]


def lbfgs(
  learning_rate: optax.ScalarOrSchedule = 1.0,
  *,
  memory_size: int = 10,
  iterations: int = 1,
  max_linesearch_steps: int = 20,
) -> optax.GradientTransformationExtraArgs:
  """L-BFGS (Liu and Nocedal, 1989, https://doi.org/10.1007/BF01589116) with a line search.

  The direction is that of `optax.scale_by_lbfgs`. The search meets the strong Wolfe conditions
  (Nocedal and Wright, Algorithms 3.5 and 3.6), by `optax.scale_by_zoom_linesearch`. The first
  direction is the gradient's, no longer than 1.

  The update needs the extra argument `value_fn`, which maps parameters to the loss on the batch of
  the gradient; `value`, the loss before the step, saves an evaluation.

  Args:
    learning_rate: the first step that a search tries, as a multiple of the direction: a number or a
      schedule of the update count. Only 1 lets the method converge fast.
    memory_size: pairs of steps and gradients that are kept.
    iterations: steps of an update, all on its batch. The gradient that an update gets is computed
      anew though the last search knew it; with several iterations that costs next to nothing.
    max_linesearch_steps: most evaluations of the loss and its gradient in a search.

  Returns:
    A transform with a `QuasiNewtonState`.

  Raises:
    ValueError: the update gets no `value_fn`, or no parameters.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import optim

    loss = lambda params: jnp.sum((params["w"] - 1) ** 2)
    params = {"w": jnp.arange(3.0)}
    tx = optim.lbfgs()
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, tx.init(params), params, value=value, value_fn=loss)
    ```
  """
  by_pairs = optax.scale_by_lbfgs(memory_size)

  def init(params):
    # A copy: optax has one array of zeros for two, which may not be donated.
    pairs = jax.tree.map(jnp.copy, by_pairs.init(params))
    return PairsMemory(pairs, optax.tree.zeros_like(params))

  def direction(memory, gradient, params):
    # A pair needs the old gradient on this batch. It is the old gradient on the old batch, moved by
    # as much as the batches differ at these parameters.
    moved = lambda old, new, end: old + (new - end)
    old = jax.tree.map(moved, memory.pairs.updates, gradient, memory.gradient)
    found, pairs = by_pairs.update(gradient, memory.pairs._replace(updates=old), params)
    return found, memory._replace(pairs=pairs)

  def learn(memory, pair, good):
    weights = memory.pairs.weights_memory
    forgotten = memory.pairs._replace(
      count=jnp.zeros_like(memory.pairs.count), weights_memory=jnp.zeros_like(weights)
    )
    gradient = optax.tree.add(pair.gradient, pair.change)
    return PairsMemory(optax.tree.where(good, memory.pairs, forgotten), gradient)

  rule = _Rule(init, direction, learn)
  return _by_search(rule, learning_rate, iterations, max_linesearch_steps)


def ssbroyden(
  learning_rate: optax.ScalarOrSchedule = 1.0,
  *,
  method: str = "ssbroyden",
  iterations: int = 1,
  max_linesearch_steps: int = 20,
  max_parameters: int = 20_000,
) -> optax.GradientTransformationExtraArgs:
  """A self-scaled Broyden method with the whole inverse Hessian matrix, for small nets.

  For equations that nets solve it was the most accurate of the quasi-Newton methods that were
  compared by Urban, Stefanou and Pons, 2024, https://arxiv.org/abs/2405.04230, and by Kiyani et
  al., 2025, https://arxiv.org/abs/2501.16371, in float64. The line search and the arguments of the
  update are those of `lbfgs`.

  Args:
    learning_rate: the first step that a search tries, as a multiple of the direction: a number or a
      schedule.
    method: "ssbroyden", "ssbfgs" (self-scaled BFGS) or "bfgs".
    iterations: steps of an update, all on its batch.
    max_linesearch_steps: most evaluations of the loss and its gradient in a search.
    max_parameters: most parameters. The matrix has a row and a column for each: for 20,000 in
      float64 it takes 3.2 GB, and a step as much again.

  Returns:
    A transform with a `QuasiNewtonState`.

  Raises:
    ValueError: the method is unknown; `init` gets more parameters than `max_parameters`; the update
      gets no `value_fn`, or no parameters.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import optim

    loss = lambda params: jnp.sum((params["w"] - 1) ** 2)
    params = {"w": jnp.arange(3.0)}
    tx = optim.ssbroyden(method="ssbfgs")
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, tx.init(params), params, value=value, value_fn=loss)
    ```
  """
  if method not in broyden.METHODS:
    raise ValueError(f"method is {method!r}; allowed: {', '.join(broyden.METHODS)}")

  def init(params):
    size = sum(x.size for x in jax.tree.leaves(params))
    if size > max_parameters:
      raise ValueError(
        f"ssbroyden keeps a matrix of {size:,} x {size:,} for {size:,} parameters; allowed: up to"
        f" max_parameters={max_parameters:,}; lbfgs takes any number"
      )
    return broyden.init(size, _dtype(params))

  learn = lambda memory, pair, good: broyden.learned(memory, pair, good, method)
  rule = _Rule(init, broyden.direction, learn)
  return _by_search(rule, learning_rate, iterations, max_linesearch_steps)


def _by_search(
  rule: _Rule, learning_rate: Any, iterations: int, max_linesearch_steps: int
) -> optax.GradientTransformationExtraArgs:
  """Steps along the directions of a rule."""

  def init_fn(params):
    if trees.is_placeholder(params):
      return QuasiNewtonState(0, 0, 0, 0)
    first_order.checked_rate(learning_rate)
    params = jax.tree.map(trees.wide, params)
    zero = lambda dtype: jnp.zeros((), dtype)  # one each: the state may be donated
    return QuasiNewtonState(
      zero(jnp.int32), rule.init(params), zero(_dtype(params)), zero(jnp.int32)
    )

  def update_fn(
    updates, state, params=None, *, value=None, value_fn=None, model_params=None, **extra
  ):
    del extra
    loss = _loss(value_fn, params, model_params)
    start = jax.tree.map(trees.wide, params)
    gradient = optax.tree.cast_like(updates, start)
    rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
    rate = jnp.asarray(rate, _dtype(start))
    value = loss(start) if value is None else jnp.asarray(value, _dtype(start))

    def iterate(carry, _):
      moved, value, gradient, memory, _, failed = carry
      here = optax.tree.add(start, moved)
      found, memory = rule.direction(memory, gradient, here)
      downhill = jax.tree.map(lambda x: (-rate * x).astype(x.dtype), found)
      step, size, lower, ended = _searched(
        loss, here, value, gradient, downhill, max_linesearch_steps
      )
      change = optax.tree.sub(ended.grad, gradient)
      # B s = -size * rate * g, with B the inverse of H.
      pair = broyden.Pair(step, change, gradient, size * rate)
      memory = rule.learn(memory, pair, lower & _is_good(pair))
      failed = jnp.where(lower, 0, failed + 1)
      return (optax.tree.add(moved, step), ended.value, ended.grad, memory, size, failed), None

    carry = optax.tree.zeros_like(start), value, gradient, state.memory, state.step_size
    carry, _ = jax.lax.scan(iterate, (*carry, state.failed), length=iterations)
    moved, *_, memory, size, failed = carry
    moved = jax.tree.map(lambda u, x: x.astype(u.dtype), updates, moved)
    return moved, QuasiNewtonState(optax.safe_increment(state.count), memory, size, failed)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Ended(NamedTuple):
  value: jax.Array
  grad: Any


def _searched(
  loss: Callable[[Any], jax.Array],
  params: Any,
  value: jax.Array,
  gradient: Any,
  downhill: Any,
  max_steps: int,
) -> tuple[Any, jax.Array, jax.Array, _Ended]:
  """The step along a direction, its multiplier, whether it is lower, and what is known there."""
  search = optax.scale_by_zoom_linesearch(max_steps, initial_guess_strategy="one")
  step, end = search.update(
    downhill, search.init(params), params, value=value, grad=gradient, value_fn=loss
  )
  # Near a minimum rounding hides the differences of losses; the search then uses slopes alone.
  lower = (end.value < value) | (end.info.decrease_error <= 0)
  lower &= jnp.isfinite(end.value) & (optax.tree.vdot(downhill, gradient) < 0)
  # Not plainly 0: a gradient that is not finite must be seen in the update.
  nothing = jax.tree.map(lambda g: 0 * g, gradient)
  step = optax.tree.where(lower, optax.tree.cast_like(step, nothing), nothing)
  size = jnp.where(lower, end.learning_rate, 0).astype(value.dtype)
  ended = _Ended(end.value.astype(value.dtype), end.grad)
  return step, size, lower, optax.tree.where(lower, ended, _Ended(value, gradient))


def _is_good(pair: broyden.Pair) -> jax.Array:
  """Whether the curvature along a step is positive, by more than its rounding."""
  curvature = optax.tree.vdot(pair.step, pair.change)
  scale = optax.tree.norm(pair.step) * optax.tree.norm(pair.change)
  return curvature > jnp.finfo(curvature.dtype).eps * scale


def _loss(value_fn: Any, params: Any, model_params: Any) -> Callable[[Any], jax.Array]:
  """The loss as a function of trees like the parameters, in float32 at least."""
  if params is None or not callable(value_fn):
    raise ValueError(
      "a line search needs the parameters, and the loss as a function of them:"
      " tx.update(grads, state, params, value_fn=lambda params: loss)"
    )
  whole = params if model_params is None else model_params
  trees.check_names(params, trees.by_path(whole))
  dtype = _dtype(jax.tree.map(trees.wide, params))
  # By path, for a wrapper such as `optax.masked` hides some of them.
  filled = lambda tree: trees.with_directions(whole, trees.by_path(tree))
  return lambda tree: jnp.asarray(value_fn(filled(tree)), dtype)


def _dtype(params: Any) -> Any:
  return jnp.result_type(*jax.tree.leaves(params))
