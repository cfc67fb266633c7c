"""A function with kfac-jax's own registration at its layers, for `kfac_jax.Optimizer`.

kfac-jax finds the layers of a function by patterns in its program, one per library and layer. A
function that registers its layers itself needs none: here the layers that a trace has found are
registered, so that its optimizer runs on models of any library, and on scanned ones.
"""

import math
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

from mixer_jax.optim.curvature import layers as layers_lib
from mixer_jax.optim.curvature import library, program, rewrite, statistics
from mixer_jax.optim.curvature.blocks import Block
from mixer_jax.optim.curvature.traced import Traced, build
from mixer_jax.optim.trees import by_path, with_directions


class Tagged(NamedTuple):
  """A function of matrices with kfac-jax's registration, made by `Curvature.tagged`.

  Attributes:
    predict: maps (matrices, batch) to the outputs, with each layer registered.
    enter: from parameters to matrices: a pair {"w": [d_in, d_out], "b": [d_out]} for each layer, of
      a stack each by itself, and all other parameters by path.
    leave: from matrices to parameters.
  """

  predict: Callable[[Any, Any], Any]
  enter: Callable[[Any], Any]
  leave: Callable[[Any], Any]


def tagged(predictor: Any, params: Any, choices: Any, blocks: tuple[Block, ...]) -> Tagged:
  """`params` are the shapes of the parameters; see `Curvature.tagged`."""
  kronecker = [block for block in blocks if block.kind == "kronecker"]
  covered = {path for block in kronecker for path in block.paths}

  def enter(params):
    leaves = by_path(params)
    found = {path: x for path, x in leaves.items() if path not in covered}
    for block in kronecker:
      arrays = [view.read(leaves[path]) for view, path in zip(block.views, block.paths)]
      for j in range(math.prod(block.stacked)):
        flat = [x.reshape(-1, *x.shape[len(block.stacked) :])[j] for x in arrays]
        found[_name(block, j)] = dict(zip("wb", flat))
    return found

  def leave(matrices):
    updates = {path: matrices[path] for path in by_path(params) if path not in covered}
    for block in kronecker:
      for side, (path, view, shape) in zip("wb", zip(block.paths, block.views, block.shapes)):
        parts = [matrices[_name(block, j)][side] for j in range(math.prod(block.stacked))]
        whole = jnp.stack(parts).reshape(*block.stacked, *parts[0].shape)
        like = jax.ShapeDtypeStruct(shape, whole.dtype)
        own = jax.linear_transpose(view.read, like)(whole)[0]
        updates[path] = updates[path] + own if path in updates else own
    return with_directions(params, updates)

  def predict(matrices, batch):
    [term] = program.terms(predictor, params, batch, None, ())
    traced = build([term], params, choices)
    taps = dict(_registrations(traced))
    rewritten = rewrite.Rewritten(term.program, taps, term.found.selections, unroll=True)
    beside = {leaf: _stacks(traced, names, matrices) for leaf, names in traced.owners.items()}
    leaves = jax.tree.leaves(leave(matrices))
    return term.structure.unflatten(rewritten([*leaves, *jax.tree.leaves(batch)], beside)).outputs

  return Tagged(predict, enter, leave)


def _name(block: Block, j: int) -> str:
  return f"{block.name}[{j}]" if block.stacked else block.name


def _stacks(traced: Traced, names: list[str], matrices: Any) -> dict[str, Any]:
  """The matrices of some blocks: dictionaries, of stacks nested in `rewrite.Stack`."""

  def nested(block, stacked, start):
    if not stacked:
      return matrices[_name(block, start)]
    step = math.prod(stacked[1:])
    parts = range(stacked[0])
    return rewrite.Stack(tuple(nested(block, stacked[1:], start + i * step) for i in parts))

  blocks = {layer.block.name: layer.block for layer in traced.layers}
  return {name: nested(blocks[name], blocks[name].stacked, 0) for name in names}


def _registrations(traced: Traced) -> list[tuple[Any, Callable]]:
  """A registration for each use of a layer that is used once, by the path of its equation."""
  found = []
  blocks = {layer.block.name: layer.block for layer in traced.layers}
  [term] = traced.terms
  for path, tap in traced.taps[0].items():
    whole = tap.rows and tap.rows.place == layers_lib.Place() and not tap.rows.product.table
    if whole and blocks[tap.block].uses == 1 and tap.kind == statistics.USE:
      found.append((path, _registration(tap, term.examples)))
  return found


def _registration(tap: Any, examples: int) -> Callable:
  product = tap.rows.product
  register = library.blocks().kfac_jax.register_dense

  def one(x, y, own):
    rows = x.shape[0]
    apart = examples and rows % examples == 0 and rows > examples
    spread = lambda z: z.reshape(examples, -1, z.shape[-1]) if apart else z
    x, y, bias = spread(x), spread(y), own.get("b")
    variant = "repeated_dense" if apart else "dense"
    if bias is None:
      return register(y, x, own["w"], variant=variant).reshape(rows, -1)
    return (register(y + bias, x, own["w"], bias, variant=variant) - bias).reshape(rows, -1)

  def function(given, result, accumulators):
    own, x, y = accumulators[tap.block], product.inputs(given[tap.operand]), product.outputs(result)
    back = jax.linear_transpose(product.outputs, jax.ShapeDtypeStruct(result.shape, y.dtype))
    if not isinstance(own, rewrite.Stack):
      return back(one(x, y, own))[0].astype(result.dtype)
    parts = [one(x[j], y[j], part) for j, part in enumerate(own.parts)]
    return back(jnp.stack(parts))[0].astype(result.dtype)

  return function
