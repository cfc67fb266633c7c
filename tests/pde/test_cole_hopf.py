"""Cole and Hopf's solution against the spectral solvers, and against its equation."""

import numpy as np

from mixer_jax.pde import burgers, cole_hopf

VISCOSITY = 0.01 / np.pi


def test_it_is_the_spectral_solution():
  """That of functions on [0, 1), for which u and viscosity are halved."""
  x = np.arange(64) / 64
  for time in (0.2, 0.8):
    solved = (
      2 * burgers.solve(-np.sin(2 * np.pi * x - np.pi)[None] / 2, VISCOSITY / 4, time, 4.0)[0]
    )
    np.testing.assert_allclose(cole_hopf.solve(2 * x - 1, time, VISCOSITY), solved, atol=3e-9)


def test_it_begins_with_the_sine_and_is_odd():
  x = np.linspace(-1, 1, 21)
  np.testing.assert_allclose(cole_hopf.solve(x, 0.0, VISCOSITY), -np.sin(np.pi * x), atol=1e-14)
  u = cole_hopf.solve(x, 0.7, VISCOSITY)
  np.testing.assert_allclose(u, -u[::-1], atol=1e-13)
  np.testing.assert_allclose(u[[0, -1]], 0, atol=1e-13)


def test_more_nodes_change_nothing(monkeypatch):
  x, t = np.meshgrid(np.linspace(-1, 1, 41), np.linspace(0, 1, 11))
  before = cole_hopf.solve(x, t, VISCOSITY)
  monkeypatch.setattr(cole_hopf, "_NODES", 4001)
  monkeypatch.setattr(cole_hopf, "_REACH", 18.0)
  np.testing.assert_allclose(cole_hopf.solve(x, t, VISCOSITY), before, atol=1e-12)
