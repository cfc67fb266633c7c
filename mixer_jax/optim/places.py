"""Where the rows of a layer hold the examples of the batch: found by tracing two sizes of batch."""

from typing import Any, Callable, Collection

import jax

from mixer_jax.optim import layer_calls, layer_views, programs

FIRST = "first"  # an example an index of the leading axis
FLAT = "flat"  # a multiple of them, as [batch * tokens, ...]
ELSEWHERE = "elsewhere"  # on another axis, as [tokens, batch, ...]
MAPPED = "mapped"  # taken off by `jax.vmap` or `jax.lax.map`
NOWHERE = "nowhere"  # rows that every example uses: positions, learned queries


def placed(
  predict: Callable, params: Any, batch: Any, examples: int, skipped: Collection[Any] = ()
) -> list[layer_calls.Call]:
  """The calls of `layer_calls.calls`, each with its place; the outputs are of so many examples.

  Rows that are as many for twice the examples are taken for those of a loop if the program has a
  loop over examples, else for rows that every example uses: a model of both kinds is not told apart.
  """
  calls = layer_calls.calls(predict, params, batch, skipped)
  others, more = _of_twice(predict, params, batch, examples, skipped)
  if [c.path for c in others] != [c.path for c in calls]:
    return [call._replace(place=_likely(call, examples)) for call in calls]
  asked = lambda call: not (call.mapped or isinstance(call.view, layer_views.Plain))
  same = any(call.rows == other.rows and asked(call) for call, other in zip(calls, others))
  looped = same and _loops(predict, params, batch) != _loops(predict, params, more)
  return [
    call._replace(place=_place(call, other.rows, examples, looped))
    for call, other in zip(calls, others)
  ]


def _of_twice(predict, params, batch, examples, skipped) -> tuple[list[layer_calls.Call], Any]:
  """The calls for twice as many examples, and these; none of a `predict` made for one size."""
  sizes = [x.shape[0] for x in jax.tree.leaves(batch) if x.shape]
  for size in dict.fromkeys((examples, *sizes)):  # an example may have several rows of outputs

    def twice(x, size=size):
      shape = (2 * size, *x.shape[1:]) if x.shape[:1] == (size,) else x.shape
      return jax.ShapeDtypeStruct(shape, x.dtype)

    more = jax.tree.map(twice, batch)
    try:
      if jax.tree.leaves(jax.eval_shape(predict, params, more))[0].shape[0] == 2 * examples:
        return layer_calls.calls(predict, params, more, skipped), more
    except Exception:  # of whatever kind: the user's function was not made for this batch
      continue
  return [], None


def _loops(predict, params, batch) -> list[int]:
  """The lengths of all loops of the program: those over examples change with their number."""
  return list(programs.loops(jax.make_jaxpr(predict)(params, batch).jaxpr))


def _place(
  call: layer_calls.Call, rows_of_twice: tuple[int, ...], examples: int, looped: bool
) -> str:
  if rows_of_twice == call.rows:
    return MAPPED if call.mapped or looped else NOWHERE
  if len(rows_of_twice) != len(call.rows) or rows_of_twice[0] != 2 * call.rows[0]:
    return ELSEWHERE
  if call.rows[0] % examples:  # of a part of the batch
    return ELSEWHERE
  return FIRST if call.rows[0] == examples else FLAT


def _likely(call: layer_calls.Call, examples: int) -> str:
  """The place, as far as one trace tells it."""
  if call.mapped:
    return MAPPED
  if len(call.rows) == 1 and call.rows[0] != examples and getattr(call.view, "ids", False):
    return NOWHERE
  if not call.rows or call.rows[0] % examples:
    return ELSEWHERE
  return FIRST if call.rows[0] == examples else FLAT
