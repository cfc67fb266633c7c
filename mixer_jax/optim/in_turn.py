"""One optimizer after another in a run, such as Adam and then L-BFGS."""

from __future__ import annotations  # `help` shows names, not what they stand for

import itertools
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import optax


class InTurnState(NamedTuple):
  """State of `in_turn`.

  Attributes:
    count: number of updates so far, an int32 scalar.
    turn: index of the optimizer that made the last update, from 0, an int32 scalar.
    states: the state of each optimizer. An optimizer that has not begun holds a state made from the
      parameters of `init`, which it never uses; one that is done keeps its last.
  """

  count: jax.Array
  turn: jax.Array
  states: tuple[Any, ...]


def in_turn(
  optimizers: Sequence[optax.GradientTransformation], boundaries: Sequence[int]
) -> optax.GradientTransformationExtraArgs:
  """Runs one optimizer after another, such as Adam and then L-BFGS.

  Optimizers are joined as `optax.join_schedules` joins schedules: the first makes the updates
  before boundaries[0], the second those from boundaries[0] on, and so forth. Each begins as if the
  run began there: its state is made from the parameters of that moment, and its schedules count
  from 0. All of them get the extra arguments.

  Args:
    optimizers: the optimizers in their order.
    boundaries: updates at which the next optimizer begins, one fewer than optimizers, rising.

  Returns:
    A transform with an `InTurnState`, whose update needs parameters.

  Raises:
    ValueError: there are too few or too many boundaries, or they do not rise; or the update gets no
      parameters.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.1)}
    tx = optim.in_turn([optim.adam(1e-3), optim.sgd(0.1)], boundaries=[1000])
    updates, state = tx.update(grads, tx.init(params), params)
    ```
  """
  transforms = [optax.with_extra_args_support(tx) for tx in optimizers]
  starts = [0, *boundaries]
  if len(starts) != len(transforms) or any(x >= y for x, y in itertools.pairwise(starts)):
    raise ValueError(
      f"boundaries are {list(boundaries)} for {len(transforms)} optimizers; allowed:"
      f" {len(transforms) - 1} numbers of updates that rise, the first above 0"
    )

  def init_fn(params):
    zero = lambda: jnp.zeros((), jnp.int32)  # one each: the state may be donated
    return InTurnState(zero(), zero(), tuple(tx.init(params) for tx in transforms))

  def update_fn(updates, state, params=None, **extra):
    if params is None:
      raise ValueError("in_turn needs the parameters: tx.update(grads, state, params)")

    def update_by(number):
      tx, own = transforms[number], state.states[number]
      begins = state.count == starts[number]

      def updated():
        # The state of `init` is that of the first optimizer's beginning already.
        begun = jax.lax.cond(begins, lambda: tx.init(params), lambda: own) if number else own
        found, new = tx.update(updates, begun, params, **extra)
        found = jax.tree.map(lambda u, x: x.astype(u.dtype), updates, found)
        return found, (*state.states[:number], new, *state.states[number + 1 :])

      return updated

    turn = (state.count >= jnp.array(starts)).sum(dtype=jnp.int32) - 1
    found, states = jax.lax.switch(turn, [update_by(i) for i in range(len(transforms))])
    return found, InTurnState(optax.safe_increment(state.count), turn, states)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
