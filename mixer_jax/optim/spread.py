"""Decompositions of many matrices, spread over the devices of a mesh."""

import functools
import math
from typing import Any, Callable, Sequence

import jax
from jax.experimental import layout
import jax.numpy as jnp
from jax.scipy.linalg import block_diag
from jax.sharding import Mesh, PartitionSpec

from mixer_jax.optim.curvature.blocks import Diagonals, Kronecker


def of_each_matrix(
  decompose: Callable,
  factors: dict[str, Kronecker],
  mesh: Mesh | None,
  of_diagonal: Callable = Diagonals,
  beside: dict[str, tuple[Any, Any]] | None = None,
  method: str = "library",
) -> dict[str, tuple[Any, ...]]:
  """Applies a function to all matrices, each on one device of the mesh.

  Args:
    decompose: maps a matrix [d, d] to a pytree of arrays, such as its inverse.
    factors: by layer path; stacked ones [..., d, d] are taken apart, and their results stacked.
    mesh: the devices; None: every device computes all.
    of_diagonal: maps the values [..., d] of a diagonal factor to its result.
    beside: `Eigen` pairs by layer path, whose vectors are a second argument of `decompose`.
    method: of `decompose`, see `linalg`. With "products" its results have axes of size d alone, and
      matrices of nearly one size share a program.

  Returns:
    (inputs, outputs) by layer path.
  """
  is_factor = lambda x: isinstance(x, Diagonals)
  every, structure = jax.tree.flatten(_by_rows(factors), is_leaf=is_factor)
  beside = _by_rows(beside or {})
  others = [e for name in sorted(beside) for e in beside[name]]
  split = lambda x: list(x.reshape(-1, *x.shape[-2:]))
  apart = [
    [] if is_factor(x) else list(zip(split(x), *(split(e.vectors) for e in others[i : i + 1])))
    for i, x in enumerate(every)
  ]
  operands = [operand for members in apart for operand in members]
  with jax.default_matmul_precision("highest"):
    alone = mesh is None or mesh.size == 1
    if method == "products":
      done = iter(_stacked(decompose, operands, None if alone else mesh))
    else:
      done = iter(_mapped(decompose, operands) if alone else _spread(decompose, operands, mesh))

  def result(factor, members):
    if is_factor(factor):
      return of_diagonal(factor.values)
    if factor.ndim == 2:
      return next(done)
    stack = lambda *xs: jnp.stack(xs).reshape(*factor.shape[:-2], *xs[0].shape)
    return jax.tree.map(stack, *[next(done) for _ in members])

  results = [result(factor, members) for factor, members in zip(every, apart)]
  pairs = jax.tree.unflatten(structure, results)
  return {name: tuple(pair) for name, pair in _by_rows(pairs).items()}


def _by_rows(tree: Any) -> Any:
  """Pins the layout of matrices to row after row, as the state has it.

  LAPACK and similar libraries want matrices stored by columns. Without the pin XLA would use that
  layout for the whole `lax.cond`, and transpose all factors and inverses in every step.
  """
  by_rows = lambda x: layout.Layout(tuple(range(x.ndim)))
  pinned = lambda x: layout.with_layout_constraint(jnp.asarray(x), by_rows(x))
  return jax.tree.map(pinned, tree)


def _spread(decompose: Callable, operands: list[tuple[jax.Array, ...]], mesh: Mesh) -> list[Any]:
  """Each matrix is decomposed by one device, which sends the result to all others."""
  shares = share_out([len(operand[0]) for operand in operands], mesh.size)
  shapes = [jax.eval_shape(decompose, *operand) for operand in operands]

  def share(mine: list[int]) -> Callable:
    def results(operands):
      zeros = [jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), s) for s in shapes]
      done = _mapped(decompose, [operands[i] for i in mine])
      return [dict(zip(mine, done)).get(i, zero) for i, zero in enumerate(zeros)]

    return results

  def on_device(operands):
    # There may be more devices than matrices: the last share is empty.
    index = jnp.minimum(jax.lax.axis_index(mesh.axis_names), len(shares) - 1)
    results = jax.lax.switch(index, [share(mine) for mine in shares], operands)
    return jax.lax.psum(results, mesh.axis_names)  # all terms but one are zero

  specs = dict(in_specs=PartitionSpec(), out_specs=PartitionSpec())
  return jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs)(operands)


# Matrices up to this share larger than others are made as large as these.
_NEARLY = 1.05
_ONE_BY_ONE = (
  256  # larger matrices are decomposed one after the other: a stack takes long to compile
)


def _stacked(
  decompose: Callable, operands: list[tuple[jax.Array, ...]], mesh: Mesh | None
) -> list[Any]:
  """Decomposes stacks of matrices of nearly one size, of which each device takes an equal part.

  One program of few sizes compiles fast; that a device has more or less to do than in `_spread` is its
  price.
  """
  sizes = [len(operand[0]) for operand in operands]
  results: list[Any] = [None] * len(operands)
  for size, members in _alike(sizes).items():
    stacks = [_padded(size, *operands[i]) for i in members]
    parts = 1 if mesh is None else mesh.size
    stacks += stacks[:1] * (-len(stacks) % parts)  # each device has as many
    done = _of_stack(decompose, jax.tree.map(lambda *xs: jnp.stack(xs), *stacks), mesh)
    for place, i in enumerate(members):
      rest = slice(size - sizes[i], None)
      own = jax.tree.map(lambda x, place=place: x[place], done)
      results[i] = jax.tree.map(lambda x, rest=rest: x[(rest,) * x.ndim], own)
  return results


def _of_stack(decompose: Callable, stack: tuple[jax.Array, ...], mesh: Mesh | None) -> Any:
  def each(stack):
    if stack[0].shape[-1] <= _ONE_BY_ONE:
      return jax.vmap(decompose)(*stack)
    return jax.lax.map(lambda operands: decompose(*operands), stack)

  if mesh is None:
    return each(stack)

  def share(stack):
    # Not by a split of the inputs: XLA would send the matrices, which all devices have, once more.
    number = len(stack[0]) // mesh.size
    first = number * jax.lax.axis_index(mesh.axis_names)
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, number), stack)
    gather = lambda x: jax.lax.all_gather(x, mesh.axis_names, tiled=True)
    return jax.tree.map(gather, each(own))

  specs = dict(in_specs=PartitionSpec(), out_specs=PartitionSpec())
  return jax.shard_map(share, mesh=mesh, check_vma=False, **specs)(stack)


def _alike(sizes: Sequence[int]) -> dict[int, list[int]]:
  """Groups matrices by the largest size that is nearly their own: size to indices."""
  found: dict[int, list[int]] = {}
  for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
    least = min(found, default=math.inf)
    size = least if sizes[i] * _NEARLY >= least else sizes[i]
    found.setdefault(size, []).append(i)
  return found


def _padded(size: int, matrix: jax.Array, *bases: jax.Array) -> tuple[jax.Array, ...]:
  """A matrix and its basis [d, d] with rows and columns in front of them, [size, size].

  The matrix has there an eigenvalue that none of its own exceeds, so that these rows stay first when
  eigenvectors are sorted, and no decomposition mixes them with others.
  """
  more = size - len(matrix)
  if not more:
    return matrix, *bases
  largest = jnp.max(jnp.abs(matrix))
  unit = jnp.where(largest > 0, largest, 1.0)  # squares may leave float32
  norm = unit * jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(matrix / unit)), 1.0))
  fill = jnp.eye(more, dtype=matrix.dtype)
  return block_diag(norm * fill, matrix), *(block_diag(fill, basis) for basis in bases)


_STACKED = 48  # matrices of one size that are decomposed together, on a CPU as well


def share_out(sizes: Sequence[int], devices: int) -> list[list[int]]:
  """Shares matrices out among devices: the costliest first, each to the device with the least to do.

  `sizes` are the numbers of rows; the cost of a matrix grows with their third power.

  Returns:
    Indices into `sizes` by device, up to the first device that has none.
  """
  shares, loads = [[] for _ in range(devices)], [0] * devices
  for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
    least = loads.index(min(loads))
    shares[least].append(i)
    loads[least] += sizes[i] ** 3
  return shares[: len(sizes) + 1]


def _mapped(decompose: Callable, operands: Sequence[tuple[jax.Array, ...]]) -> list[Any]:
  """Decomposes matrices on one device, those of equal size together where it is faster."""
  sizes = [len(operand[0]) for operand in operands]

  def together(least: int, *operands):
    results = [
      decompose(*operand) if sizes.count(n) < least else None for n, operand in zip(sizes, operands)
    ]
    for size in sorted({n for n in sizes if sizes.count(n) >= least}):
      members = [i for i, n in enumerate(sizes) if n == size]
      stacks = jax.tree.map(lambda *xs: jnp.stack(xs), *[operands[i] for i in members])
      stack = jax.vmap(decompose)(*stacks)
      for place, i in enumerate(members):
        results[i] = jax.tree.map(lambda x, place=place: x[place], stack)
    return results

  if not operands:
    return []
  # An accelerator is kept busy by a stack of small matrices. On CPU a stack is worked off
  # one by one, while apart they run at the same time on several cores (measured: 1.0 to 1.9
  # times as long for a stack, sizes 64 to 2,049); but hundreds take minutes to compile apart.
  cpu, default = (functools.partial(together, least) for least in (_STACKED, 1))
  return jax.lax.platform_dependent(*operands, cpu=cpu, default=default)
