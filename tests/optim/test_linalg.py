"""Decompositions by matrix products against NumPy in float64, and optimizers that use them."""

import jax
import numpy as np
import pytest

from mixer_jax import optim
from mixer_jax.optim import linalg
from tests.optim.small_net import curvature, loss, problem


def positive(size, condition, dtype=np.float32):
  """A matrix with eigenvalues from 1 down to 1 / condition, and it with another power p of them."""
  basis = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]
  values = np.logspace(0, -np.log10(condition), size)
  return (basis * values @ basis.T).astype(dtype), lambda p: basis * values**p @ basis.T


turned = jax.jit(lambda matrix, vectors: linalg.turned(matrix, vectors, "products"))


@pytest.mark.parametrize("power", [1, 2, 4])
@pytest.mark.parametrize("size, condition", [(1, 1.0), (33, 1e2), (100, 1e4), (65, 1e6)])
def test_inverse_roots(size, condition, power):
  """The error is that of rounding the matrix, which its condition enlarges."""
  matrix, exact = positive(size, condition)
  with jax.default_matmul_precision("highest"):
    for scale in (1.0, 1e-12, 1e12):
      found = jax.jit(linalg.inverse_root, static_argnums=1)(scale * matrix, power)
      wanted = exact(-1 / power) * scale ** (-1 / power)
      error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
      assert error < 2e-7 * condition**0.9 + 2e-6


def test_an_inverse_by_products_is_nearly_as_near_as_cholesky_s():
  matrix, exact = positive(129, 1e5)
  by = {
    method: np.linalg.norm(linalg.inverse(matrix, method) - exact(-1))
    for method in ("library", "products")
  }
  assert by["products"] < 5 * by["library"]


@pytest.mark.parametrize("size", [1, 31, 32, 100])
def test_a_turned_basis_is_the_q_of_numpy(size):
  matrix, _ = positive(size, 10.0)
  vectors = np.linalg.qr(np.random.default_rng(1).normal(size=(size, size)))[0].astype(np.float32)
  basis, ordered = turned(matrix, vectors)
  quotients = np.einsum("ij,ij->j", vectors, matrix @ vectors)
  order = np.argsort(-quotients)
  np.testing.assert_allclose(ordered, vectors[:, order])
  wanted = np.linalg.qr((np.float64(matrix) @ vectors)[:, order])[0]
  signs = np.sign(np.sum(wanted * basis, axis=0))
  np.testing.assert_allclose(basis, wanted * signs, atol=2e-5)


@pytest.mark.parametrize("rank", [0, 1, 40])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_a_basis_of_a_singular_matrix_is_orthonormal(rank, scale):
  rows = np.random.default_rng(0).normal(size=(rank, 100)).astype(np.float32)
  matrix = (rows.T @ rows * scale).astype(np.float32)
  basis = np.eye(100, dtype=np.float32)
  for _ in range(3):
    basis, _ = turned(matrix, basis)
  np.testing.assert_allclose(basis.T @ basis, np.eye(100), atol=2e-5)


def test_iterations_find_the_eigenvectors():
  matrix, _ = positive(40, 1e4)
  basis = np.eye(40, dtype=np.float32)
  for _ in range(60):
    basis, _ = turned(matrix, basis)
  found = np.float64(basis).T @ matrix @ basis
  np.testing.assert_allclose(found, np.diag(np.logspace(0, -4, 40)), atol=2e-3)


OPTIMIZERS = {
  "factored": lambda c, how: optim.scale_by_kfac(c, damping_type="factored", decomposition=how),
  "exact": lambda c, how: optim.scale_by_kfac(c, inverse_period=1, decomposition=how),
  "muon": lambda c, how: optim.scale_by_kfac_muon(c, decomposition=how),
  "normuon": lambda c, how: optim.scale_by_kfac_muon(c, normuon=True, decomposition=how),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_alike_by_both(name):
  """By products bases lag behind: the losses are close, with factored damping equal."""
  losses = {}
  for method in ("library", "products"):
    params, batch = problem()
    of = curvature(params, batch)
    tx = OPTIMIZERS[name](of, optim.Decomposition(linear_algebra=method))
    state = tx.init(params)

    @jax.jit
    def step(params, state, key, tx=tx):
      grads = jax.grad(loss)(params, batch)
      updates, state = tx.update(grads, state, params, batch=batch, rng=key)
      return jax.tree.map(lambda p, u: p - 0.02 * u, params, updates), state

    for key in jax.random.split(jax.random.key(0), 40):
      params, state = step(params, state, key)
    losses[method] = float(loss(params, batch))
  start = float(loss(problem()[0], batch))
  gains = {method: start - x for method, x in losses.items()}
  tolerance = 1e-3 if name == "factored" else 0.2
  assert gains["library"] > 0.01 and abs(gains["products"] / gains["library"] - 1) < tolerance
