"""Decompositions of symmetric matrices: by the linear algebra library, or by matrix products alone.

XLA takes minutes to compile `eigh`, `qr` and Cholesky's factorisation for a TPU, and these run there as
long loops over small pieces. The other path is made of matrix products and compiles in seconds:
inverses and inverse roots by a coupled Newton iteration, bases by blocked Gram-Schmidt. Its errors
are up to a few times those of the library (results/precision.csv). Products need full float32 precision.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp

# Columns that are made orthogonal together.
_PANEL = 32
# Two passes of Gram-Schmidt are orthogonal up to rounding ("twice is enough", Giraud et al., 2005,
# https://doi.org/10.1007/s00211-005-0615-4).
_PASSES = 2
# Of the longest column of F Q, this part of Q keeps the columns of a singular F apart.
_SHIFT = 1e-6
_MOST_STEPS = 100
_TINY = 1e-30


def by(method: str, library: Callable, products: Callable, *operands: Any) -> Any:
  """Calls one of two functions: "library", "products", or "platform": products on a TPU."""
  if method == "platform":
    return jax.lax.platform_dependent(*operands, tpu=products, default=library)
  return {"library": library, "products": products}[method](*operands)


def inverse(matrix: jax.Array, method: str = "platform") -> jax.Array:
  """The inverse of a positive definite matrix [d, d]."""

  def library(matrix):
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix), identity)

  return by(method, library, lambda matrix: inverse_root(matrix, 1), matrix)


def inverse_root(matrix: jax.Array, power: int) -> jax.Array:
  """A^(-1/p) of a positive definite matrix [d, d], p a power of two, by products.

  The coupled Newton iteration of Guo and Higham (2006, https://doi.org/10.1137/050643374, Section
  4), X <- X T, M <- T^p M with T = ((p + 1) I - M) / p, begins at X = c I and M = c^p A. Its c makes
  the eigenvalues of M at most (p + 1) / 2 by the largest row sum of A, so that it converges. It ends
  where rounding stops the residual max |M - I| from falling.
  """
  identity = jnp.eye(len(matrix), dtype=matrix.dtype)
  scale = (power + 1) / (2 * jnp.maximum(jnp.max(jnp.sum(jnp.abs(matrix), axis=1)), _TINY))
  residual = lambda m: jnp.max(jnp.abs(m - identity))
  least = 4 * jnp.finfo(matrix.dtype).eps

  def goes_on(carry):
    _, _, now, before, steps = carry
    return (steps < _MOST_STEPS) & (now > least) & (now <= before)

  def go(carry):
    x, m, now, _, steps = carry
    t = factor = ((power + 1) * identity - m) / power
    for _ in range(power.bit_length() - 1):
      factor = factor @ factor
    m = factor @ m
    m = (m + m.T) / 2  # rounding must not leave the symmetric matrices: it would grow
    return x @ t, m, residual(m), now, steps + 1

  m = scale * matrix
  start = scale ** (1 / power) * identity, m, residual(m), jnp.inf * scale, 0
  return jax.lax.while_loop(goes_on, go, start)[0]


def turned(factor: jax.Array, vectors: jax.Array, method: str = "platform") -> tuple[Any, Any]:
  """A step of orthogonal iteration on F [d, d] from a basis Q [d, d], and Q in the same order.

  The columns of F Q, in the order of descending Rayleigh quotients, are made orthonormal from left to
  right, so that each vector turns towards the eigenvector of its place (Vyas et al., 2024,
  https://arxiv.org/abs/2409.11321, Algorithm 4).
  """
  product = factor @ vectors
  order = jnp.argsort(-jnp.sum(vectors * product, axis=0))
  product, ordered = product[:, order], vectors[:, order]
  library = lambda product, _: jnp.linalg.qr(product)[0]
  return by(method, library, _orthonormal, product, ordered), ordered


def _orthonormal(columns: jax.Array, basis: jax.Array) -> jax.Array:
  """The columns [d, d] made orthonormal from left to right, by panels; `basis` decides where they vanish."""
  length = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=0))
  largest = jnp.maximum(jnp.max(jnp.abs(columns)), _TINY)  # squares may leave float32
  columns = columns / largest
  longest = jnp.max(length(columns))
  columns = columns + jnp.where(longest > 0, _SHIFT * longest, 1.0) * basis
  columns = columns / jnp.maximum(length(columns), _TINY)
  rows, panels = len(columns), -(-len(columns) // _PANEL)
  padded = jnp.pad(columns, ((0, 0), (0, panels * _PANEL - rows)))

  def column(i, panel):
    before = jnp.where(jnp.arange(_PANEL) < i, panel, 0.0)
    new = panel[:, i] - before @ (before.T @ panel[:, i])
    return panel.at[:, i].set(new / jnp.maximum(length(new), _TINY))

  def extended(i, found):
    panel = jax.lax.dynamic_slice(padded, (0, i * _PANEL), (rows, _PANEL))
    for _ in range(_PASSES):
      panel = panel - found @ (found.T @ panel)
      panel = jax.lax.fori_loop(0, _PANEL, column, panel)
    return jax.lax.dynamic_update_slice(found, panel, (0, i * _PANEL))

  return jax.lax.fori_loop(0, panels, extended, jnp.zeros_like(padded))[:, :rows]
