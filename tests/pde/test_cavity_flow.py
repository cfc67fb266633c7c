"""The flow in a cavity against published velocities on its two lines through the middle."""

import numpy as np
import pytest
from scipy import interpolate

from mixer_jax.pde import cavity
from mixer_jax.tasks.physics.equations.cavity import cavity_reference

# Ghia, Ghia and Shin, High-Re solutions for incompressible flow (Journal of Computational Physics
# 48, 1982), tables I and II at Re 100: y and u at x = 1/2; x and v at y = 1/2.
U = """0.0547 -0.03717 0.0625 -0.04192 0.0703 -0.04775 0.1016 -0.06434 0.1719 -0.10150 0.2813 -0.15662
0.4531 -0.21090 0.5000 -0.20581 0.6172 -0.13641 0.7344 0.00332 0.8516 0.23151 0.9531 0.68717
0.9609 0.73722 0.9688 0.78871 0.9766 0.84123"""
V = """0.0625 0.09233 0.0703 0.10091 0.0781 0.10890 0.0938 0.12317 0.1563 0.16077 0.2266 0.17507
0.2344 0.17527 0.5000 0.05454 0.8047 -0.24533 0.8594 -0.22445 0.9453 -0.10313 0.9531 -0.08864
0.9609 -0.07391 0.9688 -0.05906"""


def published(text):
  return np.array(text.split(), float).reshape(-1, 2).T


def assert_published(axis, velocities, atol):
  half = len(axis) // 2
  for (where, wanted), line in (
    (published(U), velocities[half, :, 0]),
    (published(V), velocities[:, half, 1]),
  ):
    found = interpolate.CubicSpline(axis, line)(where)
    np.testing.assert_allclose(found, wanted, atol=atol)


# The least u at x = 1/2, the largest and the least v at y = 1/2, and u and v in the middle: Marchi,
# Suero and Araki, The lid-driven square cavity flow: numerical solution with a 1024 x 1024 grid (2009).
MIDDLE = (-0.214042, 0.179573, -0.253803, -0.209149, 0.057536)


def middle(axis, velocities):
  """The same five numbers of velocities on a grid."""
  fine, half = np.linspace(0, 1, 20001), len(axis) // 2
  u, v = (
    interpolate.CubicSpline(axis, line)(fine)
    for line in (velocities[half, :, 0], velocities[:, half, 1])
  )
  return u.min(), v.max(), v.min(), *velocities[half, half]


def test_velocities_are_the_published_ones():
  """Ghia's have the errors of a grid of 129 points, Marchi's are extrapolated, as ours are."""
  coarse, fine = cavity.solve(32), cavity.solve(64)
  assert_published(np.linspace(0, 1, 65), fine, 0.01)
  extrapolated = (4 * fine[::2, ::2] - coarse) / 3
  np.testing.assert_allclose(middle(np.linspace(0, 1, 33), extrapolated), MIDDLE, atol=1.2e-4)


def test_the_flow_at_rest_of_a_slow_lid_is_symmetric():
  velocities = cavity.solve(24, 1e-6)
  np.testing.assert_allclose(velocities[..., 0], velocities[::-1, :, 0], atol=1e-7)
  np.testing.assert_allclose(velocities[..., 1], -velocities[::-1, :, 1], atol=1e-7)


@pytest.mark.thorough
def test_the_reference_is_that_of_the_published_tables(tmp_path):
  grid = cavity_reference(str(tmp_path))
  assert_published(grid.axes[0], grid.values, 0.01)
  np.testing.assert_allclose(middle(grid.axes[0], grid.values), MIDDLE, atol=5e-6)
