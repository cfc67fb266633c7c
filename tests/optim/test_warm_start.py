"""Warm-started steps to the eigenvectors of a factor, and when a basis is good enough."""

import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.optim import algebra
from mixer_jax.optim.curvature.blocks import Kronecker


def a_factor(seed, gap=4.0):
  """A factor with eigenvalues gap^-i, its eigenvectors, and vectors a small turn from them."""
  rng = np.random.default_rng(seed)
  q = np.linalg.qr(rng.normal(size=(6, 6)))[0]
  values = gap ** -np.arange(6.0)
  near = np.linalg.qr(q + 0.05 * rng.normal(size=(6, 6)))[0]
  return (q * values @ q.T).astype(np.float32), q, near.astype(np.float32)


def warm(factor, vectors, tolerance=None, mesh=None):
  eigen = algebra.Eigen(jnp.ones(6), jnp.asarray(vectors))
  factors = {"layer": Kronecker(jnp.asarray(factor), jnp.asarray(factor))}
  how = algebra.Decomposition("qr", tolerance, mesh=mesh)
  return algebra.warm_started_bases(factors, {"layer": (eigen, eigen)}, how, "library")[0]["layer"]


def test_warm_started_steps_end_at_the_eigenvectors():
  factor, q, vectors = a_factor(0)
  for _ in range(8):
    values, vectors = warm(factor, vectors)[0]
  np.testing.assert_allclose(np.abs(np.sum(vectors * q, axis=0)), 1.0, atol=1e-4)
  np.testing.assert_allclose(values, 4.0 ** -np.arange(6), rtol=1e-3)


def test_a_basis_that_is_good_enough_stays():
  factor, _, vectors = a_factor(1)
  inside = vectors.T.astype(np.float64) @ factor @ vectors
  apart = np.linalg.norm(inside - np.diag(np.diag(inside))) / np.linalg.norm(inside)
  for tolerance, stays in ((1.01 * apart, True), (0.99 * apart, False)):
    for values, found in warm(factor, vectors, float(tolerance)):
      assert (np.asarray(found) == vectors).all() == stays
      rayleigh = np.sum(found * (factor @ found), axis=0)
      np.testing.assert_allclose(values, rayleigh, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_a_good_basis_is_one_at_any_scale(scale):
  """Squares of these factors leave float32."""
  factor, _, vectors = a_factor(1)
  for tolerance in (1e-3, 0.9):
    wanted = [eigen.vectors for eigen in warm(factor, vectors, tolerance)]
    found = [eigen.vectors for eigen in warm(scale * factor, vectors, tolerance)]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_basis_of_one_large_eigenvalue_is_told_from_its_eigenvectors():
  """Its share off the diagonal, 6e-5, is that of rounding where squares are subtracted."""
  q = np.linalg.qr(np.random.default_rng(3).normal(size=(6, 6)))[0]
  factor = (q * [1e4, 1, 1, 1, 1, 1] @ q.T).astype(np.float32)
  turn = np.eye(6)
  turn[:2, :2] = np.cos(6.4e-5), np.sin(6.4e-5)
  turn[1, :2] = -np.sin(6.4e-5), np.cos(6.4e-5)
  vectors = (q @ turn).astype(np.float32)
  for tolerance, stays in ((1e-3, True), (1e-5, False)):
    for _, found in warm(factor, vectors, tolerance):
      assert (np.asarray(found) == vectors).all() == stays
