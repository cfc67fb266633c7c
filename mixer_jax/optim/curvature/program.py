"""The user's function as one program, or as several where parts of the outputs have own batches.

Where outputs of an example depend on it alone, the program is that of one example, and `jax.vmap`
maps it: derivatives inside of the function then have rows of their own for each example. Where
examples mix, as by batch statistics, it is that of the whole batch.
"""

import dataclasses
import functools
import types
from typing import Any, Mapping, Sequence

import jax
from jax.extend import core
import jax.numpy as jnp

from mixer_jax.optim import axes as spread
from mixer_jax.optim.curvature import rewrite, trace
from mixer_jax.optim.curvature.predictor import Answer, Predictor


@dataclasses.dataclass
class Term:
  """A part of the outputs, with the examples that it is computed from.

  Attributes:
    program: maps the leaves of params and of one example (or the batch) to those of an `Answer`.
    structure: of the answer.
    axes: for each leaf of the batch the axis of examples, or None.
    examples: how many there are.
    mapped: whether the program is that of one example.
    found: its uses of parameters.
  """

  program: core.ClosedJaxpr
  structure: Any
  axes: Sequence[int | None]
  examples: int
  mapped: bool
  found: trace.Found

  @property
  def tokens(self) -> tuple[int, ...]:
    """The shape of a number for each example that `run` takes; () of a whole batch."""
    return (self.examples,) if self.mapped else ()

  def run(
    self,
    leaves: Sequence[Any],
    batch: Sequence[Any],
    token: Any,
    taps: Mapping,
    beside: Mapping,
    each: Mapping[int, Any] = types.MappingProxyType({}),
  ) -> Answer:
    """The answer, with accumulators `beside` tapped; `token` has a number for each example.

    `each` has parameters, by number, that every example has of its own, an axis in front.
    """

    def one(token, each, *batch):
      if self.mapped:
        batch = [x if a is None else jnp.expand_dims(x, a) for x, a in zip(batch, self.axes)]
      own = {path: functools.partial(tap, token) for path, tap in taps.items()}
      rewritten = rewrite.Rewritten(self.program, own, self.found.selections)
      own = [each.get(i, x) for i, x in enumerate(leaves)]
      return rewritten([*own, *batch], beside)

    each = dict(each)
    if not self.mapped:
      each = {i: x[0] for i, x in each.items()}
      return self.structure.unflatten(one(token, each, *batch))
    results = jax.vmap(one, (0, 0, *self.axes))(token, each, *batch)
    rows = lambda x: x.reshape(-1, *x.shape[2:])  # examples, and rows that each has
    return self.structure.unflatten(map(rows, results))


def terms(
  predictor: Predictor,
  params: Any,
  batch: Any,
  in_axes: Any,
  parts: Sequence[Any],
  axis_name: Any = None,
) -> list[Term]:
  """The programs of a function; `parts` are the keys of outputs that may have batches of their own.

  In a checked `shard_map` over `axis_name` they are those of arrays that all vary over it.

  Raises:
    ValueError: an array without the axis of examples, or parts of a batch of other lengths than
      the outputs tell apart.
  """
  leaves, axes = jax.tree.leaves(batch), axes_of(batch, in_axes)
  mapped = any(a is not None for a in axes)
  sizes = {x.shape[a] for x, a in zip(leaves, axes) if a is not None}
  program, shapes = _of_example(predictor, params, batch, axes, axis_name)
  count = len(jax.tree.leaves(params))
  make = functools.partial(_term, program, shapes, axes, mapped, count)
  if len(sizes) <= 1:
    rows = jax.tree.leaves(shapes.outputs)[0].shape[0] if not mapped else 1
    return [make(None, sizes.pop() if sizes else rows, leaves)]
  if not parts:
    raise ValueError(
      f"arrays of the batch have {', '.join(map(str, sorted(sizes)))} examples; name those that all"
      " examples share by in_axes, as for jax.vmap, or give a mapping of outputs with a likelihood each"
    )
  return [make(part, None, leaves) for part in parts]


def _of_example(
  predictor: Predictor, params: Any, batch: Any, axes: Sequence[int | None], axis_name: Any
) -> tuple[core.ClosedJaxpr, Answer]:
  """The program of one example (or of arrays without its axis), and the shapes of its answer."""
  leaves, structure = jax.tree.flatten(batch)
  given, tree = jax.tree.flatten(params)
  found: list[Any] = []

  def cut(x, axis):
    shape = x.shape if axis is None else (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)

  def answers(given, *batch):
    return predictor.answer(tree.unflatten(given), structure.unflatten(batch))

  def traced(*arguments):
    arguments = spread.varying(arguments, axis_name)
    found.append(jax.make_jaxpr(answers, return_shape=True)(*arguments))

  try:
    jax.eval_shape(traced, [cut(x, None) for x in given], *map(cut, leaves, axes))
  except Exception as e:
    if any(a is not None for a in axes):
      e.add_note(
        "This happened in predict with a batch of one example. Arrays that all examples share are named by"
        " in_axes, as for jax.vmap; in_axes=None traces the whole batch."
      )
    raise
  return found[0]


def _term(program, shapes, axes, mapped, count, part, examples, leaves) -> Term:
  """The program of one part of the outputs (None: of all), without what it does not need."""
  if part is not None:
    own = lambda x: {part: x[part]} if isinstance(x, Mapping) and part in x else None
    kept = Answer(*map(own, shapes))
    wanted = {id(x) for x in jax.tree.leaves(kept)}
    keep = [id(x) in wanted for x in jax.tree.leaves(shapes)]
    shapes = kept
  else:
    keep = [True] * len(program.jaxpr.outvars)
  jaxpr, _ = jax.interpreters.partial_eval.dce_jaxpr(program.jaxpr, keep, True)
  needed = _used(jaxpr)
  if examples is None:
    sizes = {x.shape[a] for x, a, u in zip(leaves, axes, needed[count:]) if u and a is not None}
    if len(sizes) != 1:
      raise ValueError(
        f"the outputs {part!r} depend on arrays of {sorted(sizes)} examples; allowed: one"
      )
    [examples] = sizes
    axes = [a if u else None for a, u in zip(axes, needed[count:])]
  closed = core.ClosedJaxpr(jaxpr, program.consts)
  found = trace.find(closed, {i: i for i in range(count) if _is_float(jaxpr.invars[i].aval)})
  return Term(closed, jax.tree.structure(shapes), axes, examples, mapped, found)


def _used(jaxpr: Any) -> list[bool]:
  read = {v for e in jaxpr.eqns for v in e.invars if not isinstance(v, core.Literal)}
  read |= {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
  return [v in read for v in jaxpr.invars]


def _is_float(aval: Any) -> bool:
  return jnp.issubdtype(aval.dtype, jnp.floating)


def axes_of(batch: Any, in_axes: Any) -> list[int | None]:
  """The axis of examples of each leaf; single numbers and keys, which have no axes, have none."""
  spread = lambda axis, part: jax.tree.map(lambda _: _NONE if axis is None else axis, part)
  tree = jax.tree.map(spread, in_axes, batch, is_leaf=lambda x: x is None)
  found = []
  for (path, x), axis in zip(jax.tree_util.tree_leaves_with_path(batch), jax.tree.leaves(tree)):
    if axis is _NONE or not x.shape:
      found.append(None)
      continue
    if not -len(x.shape) <= axis < len(x.shape):
      raise ValueError(
        f"batch{jax.tree_util.keystr(path)} has shape {x.shape}, no axis {axis} of examples; name"
        " the arrays that all examples share by in_axes, as for jax.vmap"
      )
    found.append(axis % len(x.shape))
  return found


def taken(batch: Any, in_axes: Any, part: slice) -> Any:
  """Some examples of a batch; all of one that is a whole."""
  leaves, structure = jax.tree.flatten(batch)
  cut = lambda x, a: x if a is None else x[(slice(None),) * a + (part,)]
  return structure.unflatten(map(cut, leaves, axes_of(batch, in_axes)))


_NONE = object()
