"""Covariances of the random fields, exactly: fields are linear in the normal numbers."""

import numpy as np

from mixer_jax.pde import fields


class Unit:
  """A generator whose normal numbers are zero but for one, which is 1."""

  def __init__(self, i):
    self._i = i

  def standard_normal(self, shape):
    return (np.arange(np.prod(shape)) == self._i).reshape(shape).astype(float)


def test_covariance_of_the_periodic_field():
  points = 32
  linear = fields.periodic([Unit(i) for i in range(points)], points, mean=1.0)
  x = np.arange(points) / points
  lag = x[:, None] - x
  expected = sum(
    (25 / ((2 * np.pi * k) ** 2 + 25)) ** 2 * (2 if k else 1) * np.cos(2 * np.pi * k * lag)
    for k in range(points // 2)
  )
  np.testing.assert_allclose(linear.T @ linear, expected, atol=1e-14)


def test_covariance_of_the_neumann_field():
  side = 7
  linear = fields.neumann([Unit(i) for i in range((side - 1) ** 2)], side).reshape(-1, side**2)
  x, y = (grid.ravel() for grid in np.meshgrid(*[np.linspace(0, 1, side)] * 2, indexing="ij"))
  expected = 0
  for j in range(side - 1):
    for k in range(side - 1):
      norm = np.sqrt((2 if j else 1) * (2 if k else 1))
      mode = norm * np.cos(np.pi * j * x) * np.cos(np.pi * k * y)
      deviation = 1 / (np.pi**2 * (j**2 + k**2) + 9) if j or k else 0
      expected += deviation**2 * np.outer(mode, mode)
  np.testing.assert_allclose(linear.T @ linear, expected, atol=1e-16)


def test_a_finer_grid_has_the_same_first_modes():
  low = range(9)  # shells 0 to 2 of the square; frequencies 0 to 4 of the line
  fine = fields.neumann([Unit(i) for i in low], 17)
  np.testing.assert_allclose(fields.neumann([Unit(i) for i in low], 9), fine[:, ::2, ::2])
  fine = fields.periodic([Unit(i) for i in low], 64)
  np.testing.assert_allclose(fields.periodic([Unit(i) for i in low], 16), fine[:, ::4], atol=1e-15)
