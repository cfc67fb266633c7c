"""Burgers' equation against the solution of Cole (1951) and Hopf (1950)."""

import numpy as np
import pytest

from mixer_jax.pde import burgers, fields


def generators():
  return [np.random.default_rng(i) for i in range(3)]


def cole_hopf(initial, viscosity, time):
  """u = m - 2 viscosity (log phi)_x, where phi solves the heat equation, in moving coordinates.

  phi begins as exp(-integral of (u - m) / (2 viscosity)); the integral and the heat equation are
  solved by Fourier series on a grid twice as fine.
  """
  points = initial.shape[1]
  mean = initial.mean(1, keepdims=True)
  k = np.arange(points + 1)
  spectrum = np.fft.rfft(initial - mean)[:, : points // 2]
  integral = np.zeros((len(initial), points + 1), complex)
  integral[:, 1 : points // 2] = spectrum[:, 1:] / (2j * np.pi * k[1 : points // 2])
  exponent = np.fft.irfft(integral, 2 * points) * -1 / viscosity  # 2 / (2 viscosity): the grids
  heat = np.fft.rfft(np.exp(exponent - exponent.max(1, keepdims=True)))
  heat = heat * np.exp(-viscosity * (2 * np.pi * k) ** 2 * time - 2j * np.pi * k * mean * time)
  phi, slope = np.fft.irfft(heat), np.fft.irfft(2j * np.pi * k * heat)
  return (mean - 2 * viscosity * slope / phi)[:, ::2]


@pytest.mark.parametrize(
  "viscosity, time, points", [(0.1, 1, 8192), (0.1, 1, 1000), (0.01, 0.3, 1024), (0.1, 1e-5, 8192)]
)
def test_solutions_are_those_of_cole_and_hopf(viscosity, time, points):
  initial = fields.periodic(generators(), points)
  expected = cole_hopf(initial, viscosity, time)
  error = np.linalg.norm(burgers.solve(initial, viscosity, time) - expected, axis=1)
  assert (error < 1e-6 * np.linalg.norm(expected, axis=1)).all()
  assert np.linalg.norm(initial - expected) > 1e-5 * np.linalg.norm(expected)


def test_a_coarse_grid_holds_points_of_the_solution():
  """Its own sixteen points could not resolve the front."""
  initial = np.sin(2 * np.pi * np.arange(256) / 256)[None]
  expected = cole_hopf(initial, 0.01, 0.5)
  np.testing.assert_allclose(
    burgers.solve(initial[:, ::16], 0.01, 0.5), expected[:, ::16], atol=1e-7
  )


def test_the_error_falls_with_the_fourth_power_of_the_step():
  initial = np.sin(2 * np.pi * np.arange(128) / 128)[None]
  expected = cole_hopf(initial, 0.05, 0.5)
  errors = [abs(burgers.solve(initial, 0.05, 0.5, r) - expected).max() for r in (0.2, 0.4, 0.8)]
  np.testing.assert_allclose(np.log2(np.divide(errors[:-1], errors[1:])), 4, atol=0.1)


def test_functions_are_solved_each_by_itself():
  initial = np.concatenate([fields.periodic(generators(), 64) * scale for scale in (0.1, 1, 3)])
  together = burgers.solve(initial, 0.05, 0.05)
  alone = [burgers.solve(one[None], 0.05, 0.05)[0] for one in initial]
  np.testing.assert_array_equal(together, alone)


def test_odd_grids_and_constants():
  assert (burgers.solve(np.full((1, 9), 2.5), 0.1, 1.0) == 2.5).all()
  initial = np.sin(2 * np.pi * np.arange(63) / 63)[None]
  np.testing.assert_allclose(
    burgers.solve(initial, 0.1, 0.3)[:, ::7], burgers.solve(initial[:, ::7], 0.1, 0.3), atol=1e-9
  )
