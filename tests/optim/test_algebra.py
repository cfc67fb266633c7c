"""Moments of rows and damped inverses of factors, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.optim import algebra
from mixer_jax.optim.curvature import kfac_jax_blocks, views
from mixer_jax.optim.curvature.blocks import Block, Diagonals, Kronecker


@pytest.mark.parametrize("width", [1024, 2049])
def test_moments_of_wide_rows_are_numpys(width):
  x = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
  wanted = x.T.astype(np.float64) @ x
  sizes = (width, width), (1, 1)
  found, _ = kfac_jax_blocks.second_moments(jnp.asarray(x), jnp.ones((3, 1)), *sizes)
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_factored_damping_of_diagonals_and_stacks():
  rng = np.random.default_rng(0)
  a, roots = rng.uniform(1, 3, (2, 5)) * [[1], [30]], rng.normal(size=(2, 4, 4))
  g = roots @ roots.swapaxes(1, 2) + np.eye(4)
  given = {"x": Kronecker(Diagonals(jnp.float32(a)), jnp.float32(g))}
  left, right = algebra.factored_inverses(given, 0.1)["x"]
  for i in range(2):
    pi = np.sqrt(a[i].mean() / (np.trace(g[i]) / 4))
    np.testing.assert_allclose(left.values[i], 1 / (a[i] + pi * 0.1**0.5), rtol=1e-5)
    np.testing.assert_allclose(
      right[i], np.linalg.inv(g[i] + 0.1**0.5 / pi * np.eye(4)), rtol=1e-4, atol=1e-6
    )


def test_factored_inverses_of_dead_inputs_are_finite():
  given = {
    "x": Kronecker(jnp.zeros((3, 3)), jnp.eye(2)),
    "y": Kronecker(jnp.eye(3), jnp.zeros((2, 2))),
  }
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(algebra.factored_inverses(given, 0.01)))


@pytest.mark.parametrize("damping_type", ["exact", "factored"])
def test_a_smaller_loss_has_the_same_step(damping_type):
  """Of a loss, and a damping, that are scaled by s, G is scaled by s: A^-1 (s V) (s G)^-1."""
  rng = np.random.default_rng(0)
  a, g = (x @ x.T / 9 for x in (rng.normal(size=(5, 9)), rng.normal(size=(4, 9))))
  v = rng.normal(size=(5, 4)).astype(np.float32)
  whole = views.whole(0, (5, 4))
  block = Block("x", "kronecker", ("x",), ((5, 4),), (5, 4), views=(whole,))

  def step(scale):
    factors = Kronecker(jnp.float32(a), jnp.float32(scale * g))
    inverses = (
      algebra.eigendecompositions({"x": factors})
      if damping_type == "exact"
      else algebra.factored_inverses({"x": factors}, 1e-2 * scale)
    )
    gradients = {"x": jnp.float32(scale) * v}
    return algebra.precondition(block, gradients, inverses["x"], 1e-2 * scale)

  for scale in (1e-8, 1e-11, 1e-14):
    np.testing.assert_allclose(step(scale), step(1.0), rtol=1e-3, atol=1e-4)


def test_factored_inverses_of_raw_pixels_are_finite():
  x = np.random.default_rng(0).uniform(0, 255, (16, 257))
  for scale in (1.0, 40.0):
    a = jnp.float32((scale * x).T @ (scale * x) / 16)
    inverses = algebra.factored_inverses({"x": Kronecker(a, jnp.eye(3))}, 1e-8)["x"]
    assert all(np.isfinite(inverse).all() for inverse in inverses)
