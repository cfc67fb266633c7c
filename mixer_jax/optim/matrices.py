"""Which arrays of a tree are matrices, for optimizers that see gradients alone.

SOAP, Shampoo and Muon turn or orthogonalise a matrix [d_in, d_out]; LAMB and grafting take the norm of
one. The shape of an array does not tell which of its axes are inputs, outputs, or layers of a stack;
the program that reads the array does.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

import math
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mixer_jax.optim import trees
from mixer_jax.optim.curvature import layers as layers_lib
from mixer_jax.optim.curvature import program, report, views
from mixer_jax.optim.curvature.predictor import Predictor


class Axes(NamedTuple):
  """The axes of an array that count stacked layers, inputs and outputs.

  Attributes:
    stacked: axes that count layers of a stack; () for a single array.
    inputs: axes that are inputs of the product; () if the array is no matrix.
    outputs: axes that are outputs of the product; () if the array is no matrix.
  """

  stacked: tuple[int, ...] = ()
  inputs: tuple[int, ...] = ()
  outputs: tuple[int, ...] = ()


class Part(NamedTuple):
  """An array, or a slice of it, that is an array of its own or a stack of them.

  Attributes:
    view: reads it as [*stacked, d_in, d_out], or [*stacked, ...] if it is no matrix.
    stacked: leading axes that count arrays.
    sizes: (d_in, d_out) of a matrix, else ().
    table: whether it is a table that ids look up, as an embedding.
  """

  view: Any
  stacked: tuple[int, ...]
  sizes: tuple[int, ...] = ()
  table: bool = False

  @property
  def matrix(self) -> bool:
    return bool(self.sizes) and 0 not in self.sizes


class Matrices:
  """Tells which arrays of a tree are matrices [d_in, d_out], or stacks of them.

  `matrix_axes` makes one from a program. Without any argument the outputs of an array of two or
  more axes are the last axes that its bias has (the last one without a bias in sight), its inputs
  are all others, and a warning says so once where there are more than two.

  Args:
    known: parts of each array by its path, as `matrix_axes` finds them.
    axes: a function of a path and a shape to `Axes`, or None for an array that is no matrix.

  Example:
    ```python
    from mixer_jax import optim

    kernel = optim.Axes(stacked=(0,), inputs=(1,), outputs=(2,))  # [layers, d_in, d_out]
    matrices = optim.Matrices(axes=lambda path, shape: kernel if len(shape) == 3 else None)
    tx = optim.soap(3e-3, matrices=matrices)
    ```
  """

  def __init__(
    self,
    known: Mapping[str, Sequence[Part]] | None = None,
    axes: Callable[[str, tuple[int, ...]], Axes | None] | None = None,
  ):
    self._known, self._axes = known, axes

  def parts(self, leaves: Mapping[str, Any]) -> dict[str, Sequence[Part]]:
    """The parts of arrays by path. Raises a ValueError for an array that is not known."""
    return {path: self._parts(path, leaves) for path in leaves}

  def _parts(self, path: str, leaves: Mapping[str, Any]) -> Sequence[Part]:
    shape = jnp.shape(leaves[path])
    if self._known is not None:
      if path not in self._known:
        raise ValueError(f"the matrices have no {path}; they have {', '.join(self._known)}")
      return self._known[path]
    axes = self._axes(path, shape) if self._axes else guessed(path, leaves)
    return [_part(shape, axes or Axes())]

  def apart(
    self, tx: optax.GradientTransformation, wanted: Callable[[str, Part], bool]
  ) -> optax.GradientTransformationExtraArgs:
    """Applies an optimizer of {"matrices": [*stacked, d_in, d_out] by name, "others": arrays by path}.

    `wanted(path, part)` says whether a part belongs to the matrices. `init` raises a ValueError if no
    part does.
    """
    tx = optax.with_extra_args_support(tx)

    def enter(tree):
      leaves = trees.by_path(tree)
      found: dict[str, Any] = {"matrices": {}, "others": {}}
      for path, parts in self.parts(leaves).items():
        if not all(wanted(path, part) for part in parts):
          found["others"][path] = leaves[path]
          continue
        for i, part in enumerate(parts):
          found["matrices"][path, i] = part.view.read(leaves[path])
      return found

    def leave(tree, found):
      updates, leaves = dict(found["others"]), trees.by_path(tree)
      all_parts = self.parts(leaves)
      for path, x in leaves.items():
        if path not in updates:
          parts = all_parts[path]
          like = jax.ShapeDtypeStruct(x.shape, x.dtype)
          back = lambda part, y, like=like: jax.linear_transpose(part.view.read, like)(y)[0]
          updates[path] = sum(back(p, found["matrices"][path, i]) for i, p in enumerate(parts))
      return trees.with_directions(tree, updates)

    def init_fn(params):
      if trees.is_placeholder(params):
        return 0
      entered = enter(params)
      if jax.tree.leaves(params) and not entered["matrices"]:
        raise ValueError(
          f"no matrix is left for Muon; the parameters are {', '.join(entered['others'])}: pass matrices, or"
          " take adamw"
        )
      return tx.init(entered)

    def update_fn(updates, state, params=None, **extra):
      own = None if params is None else enter(params)
      found, state = tx.update(enter(updates), state, own, **extra)
      return leave(updates, found), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

  def each(self, function: Callable, *arrays: Any) -> Any:
    """Applies a function to each matrix (or single array) of some trees, and returns a tree.

    `function` maps arrays [*stacked, ...] and the number of stacked axes to an array like the first.
    """
    trees_ = [trees.by_path(tree) for tree in arrays]
    found = {}
    for path, parts in self.parts(trees_[0]).items():
      given = [tree[path] for tree in trees_]
      like = jax.ShapeDtypeStruct(given[0].shape, trees.wide_type(given[0]))
      results = [
        (part, function(*(part.view.read(x) for x in given), len(part.stacked))) for part in parts
      ]
      if len(results) == 1 and not parts[0].view.chain:
        found[path] = results[0][1]
        continue
      back = lambda part, x, like=like: jax.linear_transpose(part.view.read, like)(
        x.astype(like.dtype)
      )[0]
      found[path] = sum(back(part, x) for part, x in results)
    return trees.with_directions(arrays[0], found)


def guessed(path: str, leaves: Mapping[str, Any]) -> Axes:
  """The axes by the rule of `Matrices`."""
  rank = jnp.ndim(leaves[path])
  if rank < 2 or trees.is_bias(path, leaves):
    return Axes()
  outputs = trees.output_axes(path, leaves)
  if rank > 2:
    report.say(
      f"the axes of {path} {list(jnp.shape(leaves[path]))} are guessed: the last {outputs} are outputs,"
      " the others inputs; optim.matrix_axes(predict, params, batch) knows them"
    )
  return Axes((), tuple(range(rank - outputs)), tuple(range(rank - outputs, rank)))


def _part(shape: tuple[int, ...], axes: Axes) -> Part:
  size = lambda names: math.prod(shape[i] for i in names)
  lead = tuple(shape[i] for i in axes.stacked)
  view = layers_lib.without_positions(views.whole(0, shape))
  if not (axes.inputs and axes.outputs):
    return Part(view, lead)
  order, sizes = (
    (*axes.stacked, *axes.inputs, *axes.outputs),
    (size(axes.inputs), size(axes.outputs)),
  )
  if order != tuple(range(len(shape))) or len(order) > 2:
    chain = (lambda x: x.transpose(order).reshape(*lead, *sizes),)
    view = view._replace(chain=chain)
  return Part(view, lead, sizes)


def _columns(layer: layers_lib.Layer) -> list[views.View]:
  """The matrices of a layer; there are several where its outputs are sliced, as in fused heads."""
  slices, d_out = layer.uses[0][0].slices, layer.kernel.shape[-1]
  apart = len(layer.uses) == 1 and len(layer.kernel.shape) == 2 and len(slices) > 1
  if not apart or sorted(np.concatenate(slices)) != list(range(d_out)):
    return [layer.kernel]
  return [views.columns(layer.kernel, own) for own in slices]


def matrix_axes(
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  in_axes: Any = 0,
  fused: bool = False,
) -> Matrices:
  """Finds the matrices of a function's parameters in its program, as `Curvature` finds layers.

  Kernels in any layout, fused heads and stacks of layers are told apart. Parameters that are no
  matrix of a product stay whole, layers of a stack apart. `soap`, `shampoo`, `muon`, `lamb` and
  `graft` take the result as `matrices`.

  Args:
    predict: maps (params, batch) to outputs; those of a mapping may have batches of their own.
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes.
    in_axes: the axis of examples of the arrays of the batch, see `Curvature`.
    fused: whether a kernel stays one matrix if the outputs of its product are cut to pieces, as
      those of fused heads or of gated units.

  Returns:
    The `Matrices` of the parameters.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params = {"kernel": jnp.ones((3, 2, 4))}  # from 3 channels to 2 heads of 4 channels
    predict = lambda params, x: jnp.einsum("bi,ihc->bhc", x, params["kernel"]).reshape(len(x), 8)
    matrices = optim.matrix_axes(predict, params, jnp.ones((5, 3)))
    tx = optim.muon(1e-2, matrices=matrices)
    ```
  """
  shapes = jax.eval_shape(lambda *trees: trees, params, batch)
  predictor = Predictor(predict, None)
  outputs = jax.eval_shape(predict, *shapes)
  parts = tuple(outputs) if isinstance(outputs, Mapping) else ()
  terms = program.terms(predictor, *shapes, in_axes, parts)
  leaves = list(trees.by_path(shapes[0]).items())
  layers, _ = layers_lib.combined([t.found for t in terms], [x.size for _, x in leaves])
  known: dict[str, list[Part]] = {path: [] for path, _ in leaves}
  for layer in layers:
    path = leaves[layer.kernel.leaf][0]
    for view in [layer.kernel] if fused else _columns(layer):
      sizes = view.positions.shape[-2:]
      known[path].append(
        Part(layers_lib.without_positions(view), layer.stacked, sizes, layer.table)
      )
  for term in terms:
    for use in term.found.uses:
      bias = use.bias or (use.view if use.product is None else None)
      if bias is not None and not known[leaves[bias.leaf][0]]:
        shape = leaves[bias.leaf][1].shape
        lead = bias.positions.shape[: bias.stacked]
        whole = layers_lib.without_positions(views.whole(bias.leaf, shape))
        known[leaves[bias.leaf][0]].append(Part(whole, lead if shape[: len(lead)] == lead else ()))
  for path, x in leaves:
    known[path] = known[path] or [_part(x.shape, Axes())]
  return Matrices(known)
