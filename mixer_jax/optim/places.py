"""Where the rows of a layer hold the examples of the batch: found by tracing two sizes of batch."""

import contextlib
import logging
from typing import Any, Callable, Collection, Iterator

import jax
import jax.numpy as jnp

from mixer_jax.optim import layer_calls, programs

FIRST = "first"  # an example an index of the leading axis
FLAT = "flat"  # a multiple of them, as [batch * tokens, ...]
ELSEWHERE = "elsewhere"  # on another axis, as [tokens, batch, ...]
MAPPED = "mapped"  # taken off by `jax.vmap` or `jax.lax.map`
SEVERAL = "several"  # likewise, with several examples in each run
NOWHERE = "nowhere"  # rows that every example uses: positions, learned queries
_MOST_PARTS = 16  # of a batch; each costs a trace
_LOG = logging.getLogger(__name__)


def placed(
  predict: Callable, params: Any, batch: Any, examples: int, skipped: Collection[Any] = ()
) -> list[layer_calls.Call]:
  """The calls of `layer_calls.calls`, each with its place; the outputs are of so many examples.

  Rows that are as many for twice the examples are those of one example, or of several, if their layer
  then runs more often, else rows that every example uses. Rows that grow with all arrays of the
  batch alone, as nodes of graphs do, are those of examples if the program adds rows up by an index.

  Raises:
    ValueError: the examples are on another axis of the outputs than the first.
  """
  calls = layer_calls.calls(predict, params, batch, skipped)
  others = _of_twice(predict, params, batch, examples, skipped)
  if [c.path for c in others] != [c.path for c in calls]:
    _check_axis(predict, params, batch)
    _LOG.warning(
      "predict takes no batch of another size: K-FAC guesses where the rows of layers have the examples"
    )
    return [call._replace(place=_likely(call, examples)) for call in calls]
  known = [a._replace(place=_place(a, b, examples)) for a, b in zip(calls, others)]
  return _with_ragged(known, predict, params, batch, examples, skipped)


def _of_twice(predict, params, batch, examples, skipped) -> list[layer_calls.Call]:
  """The calls for twice as many examples; none of a `predict` made for one size.

  Outputs with more rows an example depend on another array that happens to be as long as the batch,
  such as points of a grid: another choice of arrays may leave it as it is. (The last axis grows where
  examples are compared with each other.)
  """
  rest, found = _outputs(predict, params, batch)[0][1:-1], []
  for chosen in _choices(batch, examples):
    more = _twice(batch, chosen)
    outputs = _outputs(predict, params, more)
    with contextlib.suppress(Exception):  # as in `_outputs`: another choice may do
      if outputs and outputs[0][:1] == (2 * examples,):
        found.append(layer_calls.calls(predict, params, more, skipped))
        if outputs[0][1:-1] == rest:
          with contextlib.suppress(Exception):
            _tell_doubt(found[-1], predict, params, batch, chosen, skipped)
          return found[-1]
  return found[0] if found else []


def _tell_doubt(calls, predict, params, batch, chosen, skipped) -> None:
  """Warns of an array, as long as the batch, that all examples may share as well: a memory."""
  leaves = jax.tree_util.tree_leaves_with_path(batch)
  floats = [i for i in sorted(chosen) if jnp.issubdtype(leaves[i][1].dtype, jnp.inexact)]
  if len(floats) < 2 or leaves[floats[0]][1].shape[0] == 1:
    return
  wanted = _outputs(predict, params, _twice(batch, chosen))
  for i in floats:
    more = _twice(batch, chosen - {i})
    if _outputs(predict, params, more) == wanted:
      others = layer_calls.calls(predict, params, more, skipped)
      stay = {c.path for c, other in zip(calls, others) if c.rows != other.rows}
      if stay - {c.path for c, other in zip(calls, others) if c.rows == other.rows}:
        _LOG.warning(
          "batch%s is as long as the batch: K-FAC takes its rows for those of examples; if all"
          " examples share them, give an example batch of another size",
          jax.tree_util.keystr(leaves[i][0]),
        )


def _choices(batch: Any, examples: int) -> Iterator[frozenset[int]]:
  """Sets of leaves that may have the examples first: all of a size, then some of them.

  The outputs' size comes first, but an example may have several rows of outputs. Another array may
  happen to be as long.
  """
  found = jax.tree_util.tree_flatten_with_path(batch)[0]
  sizes = [x.shape[0] if x.shape else 0 for _, x in found]
  of = lambda size: frozenset(i for i, n in enumerate(sizes) if n == size)
  whole = [of(size) for size in dict.fromkeys((examples, *filter(None, sizes))) if of(size)]
  yield from whole
  prefixes = dict.fromkeys(path[:k] for k in (1, 2) for path, _ in found)
  parts = [
    frozenset(i for i, (path, _) in enumerate(found) if path[: len(prefix)] == prefix)
    for prefix in prefixes
  ]
  apart = dict.fromkeys(part for w in whole for p in parts for part in (w - p, w & p))
  yield from [part for part in apart if part and part not in whole][:_MOST_PARTS]


def _twice(batch: Any, chosen: Collection[int]) -> Any:
  """The shapes of a batch whose chosen leaves are twice as long."""
  leaves, structure = jax.tree.flatten(batch)
  longer = lambda shape: (2 * shape[0], *shape[1:])
  shapes = [longer(x.shape) if i in chosen else x.shape for i, x in enumerate(leaves)]
  return structure.unflatten(jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, leaves))


def _outputs(predict, params, batch) -> list[tuple[int, ...]]:
  """The shapes of the outputs; none if the user's function, of whatever kind, takes no such batch."""
  try:
    return [y.shape for y in jax.tree.leaves(jax.eval_shape(predict, params, batch))]
  except Exception:
    return []


def _with_ragged(calls, predict, params, batch, examples, skipped) -> list[layer_calls.Call]:
  """Calls whose rows only grow if all arrays of the batch do, as nodes of graphs, have examples.

  So do arrays that all examples share; only rows of examples are added up by an index.
  """
  found = [i for i, x in enumerate(jax.tree.leaves(batch)) if x.shape]
  equal = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape} == {examples}
  if equal or not any(call.place == NOWHERE for call in calls):
    return calls
  if not _adds_up(predict, params, batch, examples):
    return calls
  more, before = _twice(batch, found), _outputs(predict, params, batch)
  if _outputs(predict, params, more) != [(2 * shape[0], *shape[1:]) for shape in before]:
    return calls
  others = layer_calls.calls(predict, params, more, skipped)
  if [c.path for c in others] != [c.path for c in calls]:
    return calls
  ragged = lambda call, other: call.place == NOWHERE and call.rows != other.rows
  return [
    call._replace(place=ELSEWHERE) if ragged(call, other) else call
    for call, other in zip(calls, others)
  ]


def _adds_up(predict, params, batch, examples) -> bool:
  """Whether rows that grow with arrays that are no examples are added up, or put, by an index."""
  scattered = lambda batch: [*programs.scattered(jax.make_jaxpr(predict)(params, batch).jaxpr)]
  others = [i for i, x in enumerate(jax.tree.leaves(batch)) if x.shape and x.shape[0] != examples]
  before = scattered(batch)
  with contextlib.suppress(Exception):  # as in `_outputs`
    return scattered(_twice(batch, others)) != before
  return bool(before)


def _check_axis(predict, params, batch) -> None:
  """Raises a ValueError if outputs have the examples on a later axis, as [tokens, batch, n]."""
  before = _outputs(predict, params, batch)
  if any(x.shape[:1] == before[0][:1] for x in jax.tree.leaves(batch)):
    return  # another array, such as points of a grid, may make an axis longer
  for size in dict.fromkeys(x.shape[0] for x in jax.tree.leaves(batch) if x.shape):
    chosen = [i for i, x in enumerate(jax.tree.leaves(batch)) if x.shape[:1] == (size,)]
    for shape, other in zip(before, _outputs(predict, params, _twice(batch, chosen))):
      rows = zip(shape[:-1], other)  # the last axis grows where predict makes rows of one number
      grown = [i for i, (n, m) in enumerate(rows) if m == 2 * n]
      if len(shape) == len(other) and grown and grown[0] and shape[0] == other[0]:
        raise ValueError(
          f"the outputs of predict have shape {shape}, whose axis {grown[0]} grows with the batch;"
          " allowed: the examples on axis 0, and an array of as many in the batch"
        )


def _place(call: layer_calls.Call, twice: layer_calls.Call, examples: int) -> str:
  """The place, by the same call for twice the examples."""
  if twice.rows == call.rows:
    further = twice.runs - call.runs
    if further and further % examples:
      return SEVERAL
    return MAPPED if further else NOWHERE
  if len(twice.rows) != len(call.rows) or twice.rows[0] != 2 * call.rows[0]:
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
