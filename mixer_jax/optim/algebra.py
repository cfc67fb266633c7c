"""The linear algebra of K-FAC: inverses and bases of factors, and products with them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mixer_jax.optim import linalg
from mixer_jax.optim.curvature.blocks import Block, Diagonal, Diagonals, Kronecker
from mixer_jax.optim.spread import of_each_matrix
from mixer_jax.optim.trees import taken

# The name of the programs that renew inverses or bases, for those who read a compiled program.
SCOPE = "inverses"
TINY = 1e-37  # a divisor below float32's smallest normal number, 1.2e-38, is zero
# Of a factor without full rank, rounding leaves negative and vanishing eigenvalues: this part of the
# largest is the least. Rounding errors reach 1e-7 of it; some of them stay.
_EIGENVALUE_FLOOR = 1e-10  # of float32
# A shift below this part of the trace is lost in rounding, and float32's Cholesky may fail.
_LEAST_SHIFT = 1e-6
# Steps of orthogonal iteration from the identity to a first basis.
_FIRST_STEPS = 5


class Decomposition(NamedTuple):
  """How eigenbases of factors are renewed, and multiplied with.

  Attributes:
    refresh: "eigh" decomposes anew; "qr" makes one warm-started step of orthogonal iteration, after
      a first `eigh`.
    tolerance: "qr" leaves a basis whose relative off-diagonal part is at most this, which saves
      time on a CPU; None: it renews all.
    products: type of the operands of products with a basis or inverse, "float32" (or float64, as
      the factors) or "bfloat16"; sums, factors and inverses stay as they are. NVIDIA GPUs round
      float32 operands to TF32, unless `jax_default_matmul_precision` says otherwise.
    mesh: devices that share the decompositions, a matrix on each; None: that of the curvature, if
      there is one.
    linear_algebra: "library" decomposes by LAPACK and its like, "products" by matrix products
      alone; "platform" takes products on a TPU, where bases are always warm-started, the first one
      by some steps from the identity.
  """

  refresh: str = "eigh"
  tolerance: float | None = None
  products: str = "float32"
  mesh: Mesh | None = None
  linear_algebra: str = "platform"


class Eigen(NamedTuple):
  """Eigendecomposition of a factor: values [d], vectors [d, d] in columns, None: the identity."""

  values: jax.Array
  vectors: jax.Array | None


def initial_factors(block: Block) -> Kronecker | Diagonal:
  """Identity factors of a block, or ones for a diagonal."""
  if block.kind == "kronecker":
    return Kronecker(*(_identity(block, i) for i in range(2)))
  return Diagonal(tuple(jnp.ones(shape, block.dtype) for shape in block.shapes))


def _identity(block: Block, side: int) -> jax.Array | Diagonals:
  size = block.factor_sizes[side]
  if block.diagonal[side]:
    return Diagonals(jnp.ones((*block.stacked, size), block.dtype))
  return jnp.broadcast_to(jnp.eye(size, dtype=block.dtype), (*block.stacked, size, size))


def initial_inverses(block: Block, damping_type: str) -> tuple[Any, Any]:
  """Those of identity factors; the first update replaces them."""
  factors = [_identity(block, side) for side in range(2)]
  if damping_type == "factored":
    return tuple(factors)
  ones = lambda size: jnp.ones((*block.stacked, size), block.dtype)
  return tuple(
    Eigen(ones(size), None if isinstance(factor, Diagonals) else factor)
    for factor, size in zip(factors, block.factor_sizes)
  )


def eigendecompositions(
  factors: dict[str, Kronecker], mesh: Mesh | None = None, floor: float = _EIGENVALUE_FLOOR
) -> dict[str, tuple[Eigen, Eigen]]:
  """Each side's values [..., d] and vectors [..., d, d]; see `_floored`."""

  def decompose(factor):
    values, vectors = jnp.linalg.eigh(factor)
    return Eigen(_floored(values, floor), vectors)

  diagonal = lambda values: Eigen(_floored(values, floor), None)
  return of_each_matrix(decompose, factors, mesh, diagonal)


def _floored(values: jax.Array, floor: float) -> jax.Array:
  """The eigenvalues [..., d], 0 in place of those up to `floor` times the largest."""
  least = _rounding(floor, values) * jnp.maximum(values.max(axis=-1, keepdims=True), 0.0)
  return jnp.where(values > least, values, 0.0)


def renewed_bases(
  factors: dict[str, Kronecker],
  old: dict[str, tuple[Eigen, Eigen]],
  count: jax.Array,
  how: Decomposition,
  floor: float = _EIGENVALUE_FLOOR,
) -> tuple[dict[str, tuple[Eigen, Eigen]], dict[str, tuple[Eigen, Eigen]]]:
  """The bases of factors and, of those by QR, the old ones in the new order.

  The first are by eigh, or by some steps of products from the identity.
  """

  def library(factors, old):
    anew = lambda: (eigendecompositions(factors, how.mesh, floor),) * 2
    warm = lambda: warm_started_bases(factors, old, how, "library")
    return anew() if how.refresh == "eigh" else jax.lax.cond(count == 0, anew, warm)

  def products(factors, old):
    step = lambda _, bases: warm_started_bases(factors, bases[0], how, "products")
    return jax.lax.fori_loop(0, jnp.where(count == 0, _FIRST_STEPS, 1), step, (old, old))

  return linalg.by(how.linear_algebra, library, products, factors, old)


def _rounding(part: float, x: jax.Array) -> float:
  """A part that rounding of float32 decides on, in the type of an array."""
  return part * float(jnp.finfo(x.dtype).eps / jnp.finfo(jnp.float32).eps)


def warm_started_bases(
  factors: dict[str, Kronecker],
  old: dict[str, tuple[Eigen, Eigen]],
  how: Decomposition,
  method: str,
) -> tuple[dict[str, tuple[Eigen, Eigen]], dict[str, tuple[Eigen, Eigen]]]:
  """One step of orthogonal iteration from old bases, see `linalg.turned`.

  A basis stays as it is where the off-diagonal part of Q^T F Q is at most `tolerance` of it in the
  Frobenius norm (Eschenhagen et al., 2025).

  Returns:
    The new bases, and the old ones in the new order.
  """
  turn = functools.partial(linalg.turned, method=method)
  tolerance = how.tolerance

  def refresh(factor, vectors):
    if tolerance is None:
      new, ordered = turn(factor, vectors)
    else:
      inside = vectors.T @ factor @ vectors
      inside = inside / jnp.maximum(jnp.max(jnp.abs(inside)), TINY)  # squares may leave float32
      outside = inside - jnp.diag(jnp.diag(inside))
      stale = jnp.sum(jnp.square(outside)) > tolerance**2 * jnp.sum(jnp.square(inside))
      new, ordered = jax.lax.cond(stale, turn, lambda _, v: (v, v), factor, vectors)
    values = jnp.maximum(jnp.sum(new * (factor @ new), axis=0), 0.0)
    return Eigen(values, new), Eigen(values, ordered)

  def diagonal(values):
    same = Eigen(values, None)
    return same, same

  found = of_each_matrix(refresh, factors, how.mesh, diagonal, old, method)
  one = lambda i: {name: tuple(side[i] for side in pair) for name, pair in found.items()}
  return one(0), one(1)


def factored_inverses(
  factors: dict[str, Kronecker],
  damping: jax.Array | float,
  mesh: Mesh | None = None,
  method: str = "platform",
) -> dict[str, tuple[Any, ...]]:
  """(A + pi sqrt(damping) I)^-1 and (G + sqrt(damping) / pi I)^-1.

  pi = sqrt((tr A / dim A) / (tr G / dim G)), 1 if a factor has no trace (dead units). At least a
  millionth of its trace is added to a matrix: float32's Cholesky fails otherwise.
  """

  def shifted(block):
    means = [mean_eigenvalue(f) for f in block]
    root = lambda mean: jnp.sqrt(jnp.where((means[0] > 0) & (means[1] > 0), mean, 1.0))
    pi = root(means[0]) / root(means[1])
    shifts = pi * jnp.sqrt(damping), jnp.sqrt(damping) / pi
    return Kronecker(*map(_shifted, block, shifts))

  inverse = lambda values: Diagonals(1.0 / values)

  def inverses(method, damped):
    invert = functools.partial(linalg.inverse, method=method)
    return of_each_matrix(invert, damped, mesh, inverse, method=method)

  each = (functools.partial(inverses, name) for name in ("library", "products"))
  damped = {name: shifted(block) for name, block in factors.items()}
  return linalg.by(method, *each, damped)


def mean_eigenvalue(factor: jax.Array | Diagonals) -> jax.Array:
  """The mean of a factor's eigenvalues, of each of a stack."""
  if isinstance(factor, Diagonals):
    return factor.values.mean(axis=-1)
  return jnp.trace(factor, axis1=-2, axis2=-1) / factor.shape[-1]


def _shifted(factor: jax.Array | Diagonals, shift: jax.Array) -> jax.Array | Diagonals:
  if isinstance(factor, Diagonals):
    return Diagonals(factor.values + shift[..., None])
  shift = jnp.maximum(
    shift, _rounding(_LEAST_SHIFT, factor) * jnp.trace(factor, axis1=-2, axis2=-1)
  )
  return factor + shift[..., None, None] * jnp.eye(factor.shape[-1], dtype=factor.dtype)


def precondition(
  block: Block,
  gradients: dict[str, jax.Array],
  inverses: tuple[Any, Any],
  damping: jax.Array | float,
  dtype: str = "float32",
) -> jax.Array:
  """The preconditioned gradient of a Kronecker block, [*stacked, d_in, d_out].

  Args:
    block: the block.
    gradients: by parameter path.
    inverses: (inputs, outputs): `Eigen` pairs, or damped inverses.
    damping: added to the eigenvalues of the product, of `Eigen` pairs.
    dtype: of the operands of the matrix products.
  """
  v, (a, g) = block.matrix(taken(block, gradients)), inverses
  if isinstance(a, Eigen):
    v = rotated(v, inverses, dtype) / (eigenvalues(inverses) + damping)
    return rotated_back(v, inverses, dtype)
  v = a.values[..., :, None] * v if isinstance(a, Diagonals) else _product(a, v, dtype)
  return v * g.values[..., None, :] if isinstance(g, Diagonals) else _product(v, g, dtype)


def rotated(matrix: jax.Array, basis: tuple[Eigen, Eigen], dtype: str = "float32") -> jax.Array:
  """U_A^T V U_G: a matrix [..., d_in, d_out] in the basis of its factors."""
  a, g = (side.vectors for side in basis)
  matrix = matrix if a is None else _product(jnp.swapaxes(a, -2, -1), matrix, dtype)
  return matrix if g is None else _product(matrix, g, dtype)


def rotated_back(matrix: jax.Array, basis: tuple[Eigen, Eigen], dtype: str) -> jax.Array:
  """U_A V U_G^T, the inverse of `rotated`."""
  a, g = (side.vectors for side in basis)
  matrix = matrix if a is None else _product(a, matrix, dtype)
  return matrix if g is None else _product(matrix, jnp.swapaxes(g, -2, -1), dtype)


def eigenvalues(basis: tuple[Eigen, Eigen]) -> jax.Array:
  """The eigenvalues of A (x) G, [..., d_in, d_out]."""
  a, g = basis
  return a.values[..., :, None] * g.values[..., None, :]


def _product(x: jax.Array, y: jax.Array, dtype: str) -> jax.Array:
  sums = jnp.result_type(x, y, jnp.float32)
  x, y = (z.astype(sums if dtype == "float32" else dtype) for z in (x, y))
  return jnp.matmul(x, y, preferred_element_type=sums)


def constrained(
  directions: dict[str, jax.Array], gradients: dict[str, jax.Array], rate: Any, limit: Any
) -> dict[str, jax.Array]:
  """Shortens an update v so that rate^2 <v, g> stays within the limit."""
  inner = sum(jnp.vdot(v, gradients[path]) for path, v in directions.items())
  inner = jnp.maximum(inner, jnp.finfo(jnp.float32).tiny)
  # Not the root of limit / (rate^2 inner): a rate's square may leave float32. A rate may be 0.
  scale = jnp.minimum(1.0, jnp.sqrt(limit / inner) / jnp.maximum(jnp.abs(rate), TINY))
  return {path: v * scale for path, v in directions.items()}
