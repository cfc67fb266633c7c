"""The matrix J J^T of the residuals of a batch, from the rows that layers see, without J.

The derivative of residual n with respect to a layer's matrix is the sum over its rows u (uses,
tokens) of a_nu g_nu^T, with the inputs a and the gradients g of the outputs. So the layer adds to J
J^T

  sum over u, v of (A_u A_v^T) * (G_u G_v^T), elementwise, A_u [N, d_in] and G_u [N, d_out],

as fast kernels of wide nets are computed (Novak et al., 2022, https://arxiv.org/abs/2206.08720,
Section 3). Where a layer is narrow, or has many rows, its part of J [N, d_in d_out] is cheaper: it
is made of the same rows. Parameters without a layer, and layers in loops whose rows cannot be told
apart, have their part of J from a backward pass in which every example has parameters of its own.

Where there are far more residuals than parameters J itself is the smaller one (`jacobian`).
"""

import itertools
import math
from typing import Any, Collection, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from mixer_jax.optim.curvature import statistics, taps
from mixer_jax.optim.curvature.residuals import Residuals
from mixer_jax.optim.curvature.traced import Tap, Traced
from mixer_jax.optim.trees import add_arrays

_UNROLLED = 4  # pairs of rows up to which there is no loop


class Rows(NamedTuple):
  """Rows of a layer that the residuals of a term see: [stack, N of the term, rows, d] of both sides."""

  inputs: jax.Array
  outputs: jax.Array


def gram(
  traced: Traced,
  leaves: Mapping[str, jax.Array],
  batch: Any,
  space: Residuals,
  wanted: Collection[str],
) -> jax.Array:
  """J J^T [N, N].

  Args:
    traced: the programs.
    leaves: the parameters by path.
    batch: a batch of the programs' shapes.
    space: its residuals.
    wanted: paths of the parameters that count; others are constants.
  """
  layers, rest = _divided(traced, wanted)
  terms, sizes = _of_terms(traced, leaves, batch, space, layers, rest)
  total = jnp.zeros((sum(sizes),) * 2, space.vector.dtype)
  with jax.default_matmul_precision("highest"):
    for layer in layers:
      parts = [own.get(layer.block.name) for own, _ in terms]
      # One layer after the other: parts of J do not stand in memory side by side.
      total, parts = jax.lax.optimization_barrier((total, parts))
      total = total + _of_layer(layer, parts, sizes)
    for path in rest:
      rows = jnp.concatenate([own[path] for _, own in terms])
      total = total + rows @ rows.T
  return total


def jacobian(
  traced: Traced,
  leaves: Mapping[str, jax.Array],
  batch: Any,
  space: Residuals,
  wanted: Collection[str],
) -> jax.Array:
  """J [N, P] from the rows of layers; `arrays` has the order of its columns. Arguments as of `gram`."""
  layers, rest = _divided(traced, wanted)
  terms, sizes = _of_terms(traced, leaves, batch, space, layers, rest)
  with jax.default_matmul_precision("highest"):
    found = []
    for layer in layers:
      one, operands = _jacobian_of(layer, [own.get(layer.block.name) for own, _ in terms], sizes)
      found.append(jnp.moveaxis(jax.vmap(one)(operands), 0, 1).reshape(sum(sizes), -1))
  return jnp.concatenate(
    [*found, *(jnp.concatenate([own[path] for _, own in terms]) for path in rest)], axis=1
  )


def arrays(
  traced: Traced, shapes: Mapping[str, Any], wanted: Collection[str], vector: jax.Array
) -> dict[str, jax.Array]:
  """The parameters by path of a vector [P] in the order of the columns of `jacobian`."""
  layers, rest = _divided(traced, wanted)
  matrices = [(*x.block.stacked, *x.block.factor_sizes) for x in layers]
  ends = itertools.accumulate(map(math.prod, [*matrices, *(shapes[path].shape for path in rest)]))
  parts, found = jnp.split(vector, list(ends)[:-1]), {}
  for layer, shape, part in zip(layers, matrices, parts):
    add_arrays(found, layer.block, part.reshape(shape))
  of_rest = {path: x.reshape(shapes[path].shape) for path, x in zip(rest, parts[len(layers) :])}
  return found | of_rest


def _of_terms(traced, leaves, batch, space, layers, rest) -> tuple[list[Any], list[int]]:
  """`_of_term` of all terms, and how many residuals each has."""
  flat = list(map(jnp.asarray, jax.tree.leaves(batch)))
  numbers = range(len(traced.terms))
  terms = [_of_term(traced, i, leaves, flat, space, layers, rest) for i in numbers]
  return terms, [n * (t.examples if t.mapped else 1) for n, t in zip(space.outputs, traced.terms)]


def _divided(traced: Traced, wanted: Collection[str]) -> tuple[list[statistics.Layer], list[str]]:
  """The layers whose rows are told apart, and the paths of the parameters that have none of these."""
  untold = {
    tap.block for own in traced.taps for tap in own.values() if tap.rows and tap.stacked is None
  }
  whole, number = all(term.mapped for term in traced.terms), -1
  layers = [x for x in traced.layers if whole and x.block.name not in untold]
  while number != len(layers):  # a parameter that is in part in other layers has none
    names, number = {x.block.name for x in layers}, len(layers)
    others = {path for b in traced.blocks if b.name not in names for path in b.paths}
    told = lambda block: not others & {*block.paths} and {*block.paths} <= {*wanted}
    layers = [x for x in layers if told(x.block)]
  covered = {path for x in layers for path in x.block.paths}
  return layers, [path for path in wanted if path not in covered]


def _of_term(
  traced: Traced,
  index: int,
  leaves: Mapping[str, jax.Array],
  flat: Sequence[jax.Array],
  space: Residuals,
  layers: Sequence[statistics.Layer],
  rest: Sequence[str],
) -> tuple[dict[str, Rows], dict[str, jax.Array]]:
  """What the residuals of one term see: the rows of layers by name, and J [N of the term, n] by path."""
  term, names = traced.terms[index], {x.block.name for x in layers}
  own = {path: tap for path, tap in traced.taps[index].items() if tap.block in names}
  own = {path: tap._replace(kind=str(i)) for i, (path, tap) in enumerate(own.items())}
  zeros = _zeros(traced, index, leaves, flat, own)
  examples = term.examples if term.mapped else 1
  each = {p: jnp.broadcast_to(leaves[p], (examples, *leaves[p].shape)) for p in rest}
  owners = {i: [n for n in blocks if n in zeros] for i, blocks in traced.owners.items()}
  numbers = {path: i for i, path in enumerate(leaves)}

  def outputs(zeros, each):
    beside = {leaf: {n: zeros[n] for n in blocks} for leaf, blocks in owners.items()}
    tapped = {path: _tapped(tap) for path, tap in own.items()}
    each = {numbers[path]: x for path, x in each.items()}
    token = jnp.ones(term.tokens)
    found = term.run(list(leaves.values()), flat, token, tapped, beside, each).outputs
    return jax.tree.map(lambda y: y.astype(space.vector.dtype), found)

  _, pull = jax.vjp(outputs, zeros, each)
  rows, jacobian = jax.lax.map(
    lambda i: pull(space.column(i, index)), jnp.arange(space.outputs[index])
  )
  whole = {path: x.reshape(-1, leaves[path].size) for path, x in jacobian.items()}
  taps_of = lambda name: {tap.kind: tap for tap in own.values() if tap.block == name}
  return {name: _joined(x, taps_of(name)) for name, x in rows.items()}, whole


def _tapped(tap: Tap) -> Any:
  def function(token, given, result, accumulators):
    rows = lambda *arguments: taps.rows(tap.rows, *arguments)
    own = accumulators[tap.block][tap.kind]
    return taps.tapped(rows, given[tap.operand], result, own, token)

  return function


def _zeros(traced, index, leaves, flat, own: Mapping[Any, Tap]) -> dict[str, Any]:
  """Accumulators of the rows of each use [*stack of scans, examples, *blocks, rows, d], by block."""
  term, shapes = traced.terms[index], {}

  def noted(path):
    def function(token, given, result, accumulators):
      shapes[path] = jax.ShapeDtypeStruct(result.shape, result.dtype)
      return result

    return function

  taps_ = {path: noted(path) for path in own}
  run = lambda leaves, flat: term.run(leaves, flat, jnp.ones(term.tokens), taps_, {}).outputs
  jax.eval_shape(run, list(leaves.values()), flat)
  blocks, zeros = {layer.block.name: layer.block for layer in traced.layers}, {}
  for path, tap in own.items():
    block, product = blocks[tap.block], tap.rows.product
    inner = jax.eval_shape(product.outputs, shapes[path]).shape[:-1]
    lead = (*block.stacked[: tap.stacked], term.examples, *inner)
    sizes = zip(("inputs", "outputs"), block.factor_sizes)
    sides = {side: jnp.zeros((*lead, size), block.dtype) for side, size in sizes}
    zeros.setdefault(tap.block, {})[tap.kind] = sides
  return zeros


def _joined(uses: Mapping[str, Any], own: Mapping[str, Tap]) -> Rows:
  """The rows of all uses side by side, from arrays [outputs, *scans, examples, *blocks, rows, d]."""

  def arranged(x, stacked):
    scans, blocks = range(1, 1 + stacked), range(2 + stacked, x.ndim - 2)
    order = (*scans, *blocks, 0, 1 + stacked, x.ndim - 2, x.ndim - 1)
    stack, (outputs, examples) = len(scans) + len(blocks), (x.shape[0], x.shape[1 + stacked])
    x = x.transpose(order)
    return x.reshape(-1, outputs * examples, *x.shape[stack + 2 :])

  side = lambda name: [arranged(x[name], own[kind].stacked) for kind, x in sorted(uses.items())]
  return Rows(*(jnp.concatenate(side(name), axis=2) for name in ("inputs", "outputs")))


def _of_layer(
  layer: statistics.Layer, parts: Sequence[Rows | None], sizes: Sequence[int]
) -> jax.Array:
  """A layer's share of J J^T, in the cheaper of both ways."""
  d_in, d_out = layer.block.factor_sizes
  rows = sum(n * part.inputs.shape[2] for n, part in zip(sizes, parts) if part is not None)
  cheaper = _pairs_are_cheaper(rows, sum(sizes), d_in, d_out)
  if layer.masked or not cheaper:
    return _by_jacobian(layer, parts, sizes)
  lines = []
  for i, (n, one) in enumerate(zip(sizes, parts)):
    line = []
    for j, (m, other) in enumerate(zip(sizes, parts)):
      if one is None or other is None:
        line.append(jnp.zeros((n, m), layer.block.dtype))
      elif i > j:
        line.append(lines[j][i].T)
      else:
        line.append(_over_stack(_by_pairs, one, other) if i < j else _over_stack(_square, one))
    lines.append(line)
  return jnp.block(lines)


def _pairs_are_cheaper(rows: int, residuals: int, d_in: int, d_out: int) -> bool:
  """Whether products of all pairs of rows take fewer operations than J, and its square."""
  return rows**2 * (d_in + d_out) <= (rows + residuals**2) * d_in * d_out


def _over_stack(function: Any, *rows: Rows) -> jax.Array:
  """The sum over the matrices of a stack."""
  if len(rows[0].inputs) == 1:
    return function(*jax.tree.map(lambda x: x[0], rows))
  shape = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], rows))
  add = lambda total, own: (total + function(*own), None)
  return jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), rows)[0]


def _by_pairs(one: Rows, other: Rows) -> jax.Array:
  """The sum over all pairs of rows, [N, M]."""
  n, m = one.inputs.shape[1], other.inputs.shape[1]
  return _sum_of_pairs(one, other, [(i, j) for i in range(n) for j in range(m)])


def _square(rows: Rows) -> jax.Array:
  """`_by_pairs` of rows with themselves, [N, N]."""
  n = rows.inputs.shape[1]
  total = _sum_of_pairs(rows, rows, [(i, i) for i in range(n)])
  if n == 1:
    return total
  above = _sum_of_pairs(rows, rows, [(i, j) for i in range(n) for j in range(i + 1, n)])
  return total + above + above.T


def _sum_of_pairs(one: Rows, other: Rows, pairs: Sequence[tuple[int, int]]) -> jax.Array:
  by_row = lambda rows: jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), rows)  # [rows, N, d]
  first, second = by_row(one), by_row(other)

  def product(i, j):
    return (first.inputs[i] @ second.inputs[j].T) * (first.outputs[i] @ second.outputs[j].T)

  if len(pairs) <= _UNROLLED:
    return sum(product(i, j) for i, j in pairs)
  zeros = jnp.zeros((first.inputs.shape[1], second.inputs.shape[1]), first.inputs.dtype)
  add = lambda total, pair: (total + product(*pair), None)
  return jax.lax.scan(add, zeros, jnp.array(pairs, jnp.int32))[0]


def _by_jacobian(
  layer: statistics.Layer, parts: Sequence[Rows | None], sizes: Sequence[int]
) -> jax.Array:
  """J J^T by the layer's part of J, of one matrix of a stack after the other."""
  one, operands = _jacobian_of(layer, parts, sizes)

  def add(total, own):
    jacobian = one(own)
    return total + jacobian @ jacobian.T, None

  zeros = jnp.zeros((sum(sizes),) * 2, layer.block.dtype)
  if len(operands[1]) == 1:
    return add(zeros, jax.tree.map(lambda x: x[0], operands))[0]
  return jax.lax.scan(add, zeros, operands)[0]


def _jacobian_of(layer, parts, sizes) -> tuple[Any, Any]:
  """A function to the part of J [N, d_in d_out] of a matrix of a layer's stack, and its operands."""
  d_in, d_out = layer.block.factor_sizes
  stack = next(len(part.inputs) for part in parts if part is not None)
  read = jnp.ones((stack, d_in, d_out), layer.block.dtype)
  if layer.masked:  # elements that a mask hides have rows, too
    ones = [jnp.ones(shape, layer.block.dtype) for shape in layer.block.shapes]
    read = layer.block.matrix(ones).reshape(stack, d_in, d_out)

  def of_one(own):
    rows, read = own
    found = [
      jnp.zeros((n, d_in, d_out), read.dtype)
      if part is None
      else jnp.einsum("nra,nrd->nad", *part) * read
      for n, part in zip(sizes, rows)
    ]
    return jnp.concatenate(found).reshape(sum(sizes), -1)

  return of_one, (list(parts), read)
