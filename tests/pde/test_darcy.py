"""Darcy's equation against solutions in closed form, and against a dense matrix."""

import numpy as np
import pytest

from mixer_jax.pde import darcy


def square(side):
  return np.meshgrid(*[np.linspace(0, 1, side)] * 2, indexing="ij")


def error(side):
  """Of a manufactured solution: u = sin(pi x) sin(2 pi y) with a = 1 + x y^2."""
  x, y = square(side)
  sx, cx = np.sin(np.pi * x), np.pi * np.cos(np.pi * x)
  sy, cy = np.sin(2 * np.pi * y), 2 * np.pi * np.cos(2 * np.pi * y)
  a = 1 + x * y**2
  source = 5 * np.pi**2 * a * sx * sy - y**2 * cx * sy - 2 * x * y * sx * cy
  return abs(darcy.solve(a[None], source)[0] - sx * sy).max()


def test_the_error_falls_with_the_square_of_the_spacing():
  errors = [error(side) for side in (17, 33, 65)]
  np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 4, rtol=0.05)
  assert errors[-1] < 1e-3


def test_constant_coefficient():
  """The torsion of a square bar: Timoshenko and Goodier, Theory of Elasticity."""
  (u,) = darcy.solve(np.full((1, 129, 129), 3.0))
  assert u[64, 64] * 3 == pytest.approx(0.0736713533, rel=1e-4)


def test_layers():
  """u = sin(2 pi x) sin(pi y) / a(x): value and flux are continuous where a jumps, at x = 1/2."""
  errors = []
  for side in (50, 98, 194):  # the jump lies between two points
    x, y = square(side)
    a = np.where(x < 0.5, 3.0, 12.0)
    flux = np.sin(2 * np.pi * x) * np.sin(np.pi * y)
    (u,) = darcy.solve(a[None], 5 * np.pi**2 * flux)
    errors.append(np.linalg.norm(u - flux / a) / np.linalg.norm(flux / a))
  assert errors[-1] < 0.02
  np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 2, rtol=0.15)


def test_equations_point_by_point():
  side, rng = 6, np.random.default_rng(0)
  a = rng.choice([0.01, 1.0, 100.0], (3, side, side))
  source = rng.normal(size=(3, side, side))
  inner = [(i, j) for i in range(1, side - 1) for j in range(1, side - 1)]
  for coefficient, f, u in zip(a, source, darcy.solve(a, source)):
    matrix = np.zeros((len(inner), len(inner)))
    for row, (i, j) in enumerate(inner):
      for near in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
        between = (coefficient[i, j] + coefficient[near]) / 2 * (side - 1) ** 2
        matrix[row, row] += between
        if near in inner:
          matrix[row, inner.index(near)] -= between
    expected = np.linalg.solve(matrix, f[1:-1, 1:-1].ravel())
    np.testing.assert_allclose(u[1:-1, 1:-1].ravel(), expected, rtol=1e-6, atol=1e-9)
    assert not u[[0, -1]].any() and not u[:, [0, -1]].any()


def test_coefficients_are_positive():
  with pytest.raises(ValueError, match="are positive, not 0.0"):
    darcy.solve(np.zeros((1, 5, 5)))
