"""The linear algebra of K-FAC: inverses of factors and what is done with them."""

from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from mixer_jax.optim.curvature_blocks import Block, Diagonal, Diagonals, Kronecker

# Eigenvalues below are rounding errors of a rank-deficient factor: taken as 0.
_EIGENVALUE_FLOOR = 1e-10


class Eigen(NamedTuple):
  """Eigendecomposition of a factor: values [d], vectors [d, d] in columns, None: the identity."""

  values: jax.Array
  vectors: jax.Array | None


def initial_factors(block: Block) -> Kronecker | Diagonal:
  if block.kind == "kronecker":
    return Kronecker(*(_identity(block, i) for i in range(2)))
  return Diagonal(tuple(jnp.ones(shape) for shape in block.shapes))


def _identity(block: Block, side: int) -> jax.Array | Diagonals:
  size = block.factor_sizes[side]
  if block.diagonal[side]:
    return Diagonals(jnp.ones((*block.stacked, size)))
  return jnp.broadcast_to(jnp.eye(size), (*block.stacked, size, size))


def initial_inverses(block: Block, damping_type: str) -> tuple[Any, Any]:
  """Those of identity factors; the first update replaces them."""
  factors = [_identity(block, side) for side in range(2)]
  if damping_type == "factored":
    return tuple(factors)
  ones = lambda size: jnp.ones((*block.stacked, size))
  return tuple(
    Eigen(ones(size), None if isinstance(factor, Diagonals) else factor)
    for factor, size in zip(factors, block.factor_sizes)
  )


def exact_inverses(
  factors: dict[str, Kronecker], damping, mesh: Mesh | None = None
) -> dict[str, tuple[Eigen, Eigen]]:
  """Eigendecompositions, computed as `_of_each_matrix` says; damping is added in their use."""
  del damping
  floor = lambda values: jnp.where(values > _EIGENVALUE_FLOOR, values, 0.0)

  def decompose(factor):
    values, vectors = jnp.linalg.eigh(factor)
    return Eigen(floor(values), vectors)

  diagonal = lambda values: Eigen(floor(values), None)
  return _of_each_matrix(decompose, factors, mesh, diagonal)


def factored_inverses(
  factors: dict[str, Kronecker], damping, mesh: Mesh | None = None
) -> dict[str, tuple[Any, ...]]:
  """(A + pi sqrt(damping) I)^-1 and (G + sqrt(damping) / pi I)^-1.

  pi = sqrt((tr A / dim A) / (tr G / dim G)); a factor without trace (dead units)
  would make it 0 or infinite, hence the bounds.
  """

  def shifted(block):
    mean_eigenvalue = [_mean_eigenvalue(f) for f in block]
    ratio = mean_eigenvalue[0] / jnp.maximum(mean_eigenvalue[1], _EIGENVALUE_FLOOR)
    pi = jnp.sqrt(jnp.clip(ratio, 1e-8, 1e8))
    shifts = pi * jnp.sqrt(damping), jnp.sqrt(damping) / pi
    return Kronecker(*(_shifted(f, shift) for f, shift in zip(block, shifts)))

  def invert(matrix):
    identity = jnp.eye(matrix.shape[0])
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix), identity)

  inverse = lambda values: Diagonals(1.0 / values)
  damped = {name: shifted(block) for name, block in factors.items()}
  return _of_each_matrix(invert, damped, mesh, inverse)


def _mean_eigenvalue(factor: jax.Array | Diagonals) -> jax.Array:
  if isinstance(factor, Diagonals):
    return factor.values.mean(axis=-1)
  return jnp.trace(factor, axis1=-2, axis2=-1) / factor.shape[-1]


def _shifted(factor: jax.Array | Diagonals, shift: jax.Array) -> jax.Array | Diagonals:
  if isinstance(factor, Diagonals):
    return Diagonals(factor.values + shift[..., None])
  return factor + shift[..., None, None] * jnp.eye(factor.shape[-1])


def _of_each_matrix(
  invert: Callable,
  factors: dict[str, Kronecker],
  mesh: Mesh | None,
  of_diagonal: Callable = Diagonals,
) -> dict[str, tuple]:
  """Applies `invert` to all matrices, each on one device of the mesh; None: all on every one.

  Stacked factors are taken apart, and their results are stacked again.
  """
  is_factor = lambda x: isinstance(x, Diagonals)
  every, structure = jax.tree.flatten(factors, is_leaf=is_factor)
  apart = [[] if is_factor(x) else list(x.reshape(-1, *x.shape[-2:])) for x in every]
  matrices = [m for members in apart for m in members]
  with jax.default_matmul_precision("highest"):
    alone = mesh is None or mesh.size == 1
    done = iter(_invert_all(invert, matrices) if alone else _spread(invert, matrices, mesh))

  def result(factor, members):
    if is_factor(factor):
      return of_diagonal(factor.values)
    if factor.ndim == 2:
      return next(done)
    stack = lambda *xs: jnp.stack(xs).reshape(*factor.shape[:-2], *xs[0].shape)
    return jax.tree.map(stack, *[next(done) for _ in members])

  results = [result(factor, members) for factor, members in zip(every, apart)]
  pairs = jax.tree.unflatten(structure, results)
  return {name: tuple(pair) for name, pair in pairs.items()}


def _spread(invert: Callable, matrices: list[jax.Array], mesh: Mesh) -> list[Any]:
  """Each matrix is inverted by one device, which sends the result to all others."""
  shares = share_out([len(m) for m in matrices], mesh.size)
  shapes = [jax.eval_shape(invert, m) for m in matrices]

  def share(mine: list[int]) -> Callable:
    def results(matrices):
      zeros = [jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), s) for s in shapes]
      done = _invert_all(invert, [matrices[i] for i in mine])
      return [dict(zip(mine, done)).get(i, zero) for i, zero in enumerate(zeros)]

    return results

  def on_device(matrices):
    # There may be more devices than matrices: the last share is empty.
    index = jnp.minimum(jax.lax.axis_index(mesh.axis_names), len(shares) - 1)
    results = jax.lax.switch(index, [share(mine) for mine in shares], matrices)
    return jax.lax.psum(results, mesh.axis_names)  # all terms but one are zero

  specs = dict(in_specs=PartitionSpec(), out_specs=PartitionSpec())
  return jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs)(matrices)


def share_out(sizes: Sequence[int], devices: int) -> list[list[int]]:
  """Which matrices each device inverts: the costliest first, to who has least to do.

  `sizes` are rows of each matrix; the cost grows with the third power.

  Returns:
    Indices into `sizes` by device, up to the first device that has none.
  """
  shares, loads = [[] for _ in range(devices)], [0] * devices
  for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
    least = loads.index(min(loads))
    shares[least].append(i)
    loads[least] += sizes[i] ** 3
  return shares[: len(sizes) + 1]


def _invert_all(invert: Callable, matrices: Sequence[jax.Array]) -> list[Any]:
  """Inverts matrices on one device, those of equal size together where it is faster."""
  # An accelerator is kept busy by a stack of small matrices. On CPU a stack is worked off
  # one by one, while apart they run at the same time on several cores (measured: 1.0 to 1.9
  # times as long for a stack, sizes 64 to 2,049).
  sizes = sorted({len(m) for m in matrices})

  def apart(*matrices):
    return [invert(m) for m in matrices]

  def stacked(*matrices):
    results = [None] * len(matrices)
    for size in sizes:
      members = [i for i, m in enumerate(matrices) if len(m) == size]
      stack = jax.vmap(invert)(jnp.stack([matrices[i] for i in members]))
      for place, i in enumerate(members):
        results[i] = jax.tree.map(lambda x, place=place: x[place], stack)
    return results

  if not matrices:
    return []
  return jax.lax.platform_dependent(*matrices, cpu=apart, default=stacked)


def precondition(
  block: Block, gradients, factors, inverses, damping, dtype: str = "float32"
) -> dict[str, jax.Array]:
  """The preconditioned gradients of one block by parameter path, float32.

  Args:
    block: of a kind other than "gradient".
    gradients: by parameter path.
    factors: the block's.
    inverses: a Kronecker block's, (inputs, outputs).
    damping: added to the curvature.
    dtype: of the operands of a Kronecker block's matrix products.
  """
  grads = [gradients[path].astype(jnp.float32) for path in block.paths]
  if block.kind == "diagonal":
    return {p: g / (d + damping) for p, g, d in zip(block.paths, grads, factors.values)}

  def product(x, y):
    return jnp.matmul(x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)

  transpose = lambda x: jnp.swapaxes(x, -2, -1)
  v = to_matrix(block, grads)
  a, g = inverses
  if isinstance(a, Eigen):
    v = v if a.vectors is None else product(transpose(a.vectors), v)
    v = v if g.vectors is None else product(v, g.vectors)
    v = v / (a.values[..., :, None] * g.values[..., None, :] + damping)
    v = v if a.vectors is None else product(a.vectors, v)
    v = v if g.vectors is None else product(v, transpose(g.vectors))
  else:
    v = a.values[..., :, None] * v if isinstance(a, Diagonals) else product(a, v)
    v = v * g.values[..., None, :] if isinstance(g, Diagonals) else product(v, g)
  return dict(zip(block.paths, from_matrix(block, v)))


def to_matrix(block: Block, arrays: Sequence[jax.Array]) -> jax.Array:
  """The kernel, and below it the bias, of a Kronecker block as one matrix [..., d_in, d_out]."""
  kernel, *bias = arrays
  d_out = block.factor_sizes[1]
  matrix = kernel.transpose(_order(block)).reshape(*block.stacked, -1, d_out)
  return jnp.concatenate([matrix, *(b.reshape(*block.stacked, 1, d_out) for b in bias)], axis=-2)


def from_matrix(block: Block, matrix: jax.Array) -> list[jax.Array]:
  """The inverse of `to_matrix`."""
  order, shape = _order(block), block.shapes[0]
  d_in = matrix.shape[-2] - (len(block.shapes) - 1)
  kernel = matrix[..., :d_in, :].reshape([shape[i] for i in order])
  back = sorted(range(len(order)), key=lambda i: order[i])
  rest = [matrix[..., d_in:, :].reshape(s) for s in block.shapes[1:]]
  return [kernel.transpose(back), *rest]


def _order(block: Block) -> tuple[int, ...]:
  """The permutation of the kernel's axes, stacked ones first, then inputs, then outputs."""
  n = len(block.stacked)
  inside = block.axes or range(len(block.shapes[0]) - n)
  return (*range(n), *(n + i for i in inside))
