"""An optimizer that sees the parameters in another layout than its caller."""

from typing import Any, Callable, NamedTuple

import optax


class Layout(NamedTuple):
  """Another layout of the same parameters: traceable maps of trees like them, to it and back."""

  enter: Callable[[Any], Any]
  leave: Callable[[Any], Any]


def relayout(
  tx: optax.GradientTransformation, layout: Layout
) -> optax.GradientTransformationExtraArgs:
  """Runs an optimizer in another layout of the parameters.

  What an optimizer does by tensor or by layer (K-FAC's blocks, LAMB's and grafting's
  norms) so stays the same when several layers lie in one array. `tx` and its state know
  the other layout only, the returned transform the caller's.
  """
  tx = optax.with_extra_args_support(tx)

  def init_fn(params):
    return tx.init(layout.enter(params))

  def update_fn(updates, state, params=None, *, model_params=None, value_fn=None, **extra):
    params, extra["model_params"] = (
      None if tree is None else layout.enter(tree) for tree in (params, model_params)
    )
    if value_fn is not None:
      extra["value_fn"] = lambda params: value_fn(layout.leave(params))
    updates, state = tx.update(layout.enter(updates), state, params, **extra)
    return layout.leave(updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
