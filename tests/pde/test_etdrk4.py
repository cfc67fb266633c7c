"""Periodic references: a soliton, the heat equation, and convergence in step and modes."""

import numpy as np
import pytest

from mixer_jax.pde import cole_hopf, etdrk4
from mixer_jax.tasks.physics.equations import waves

TIMES = np.linspace(0, 1, 6)


def test_a_soliton_keeps_its_form():
  """u = 3 c sech^2(sqrt(c) (x - c t) / (2 d)), far from the ends of the domain."""
  d, c = 0.022, 0.6
  form = lambda y: 3 * c / np.cosh(np.sqrt(c) * y / (2 * d)) ** 2
  equation = etdrk4.korteweg_de_vries(d)._replace(initial=form)
  times = np.linspace(0, 0.5, 3)
  solved = etdrk4.solve(equation, times, 64, 256, 1e-4)
  x = -1 + 2 * np.arange(64) / 64
  np.testing.assert_allclose(solved, form(x - c * times[:, None]), atol=1e-9)


def test_without_a_product_modes_decay():
  linear = lambda ik: 0.1 * ik**2
  nothing = lambda u, ik: (0 * u, 0 * ik)
  equation = etdrk4.Equation(linear, nothing, lambda x: np.cos(3 * np.pi * x))
  x = -1 + 2 * np.arange(16) / 16
  expected = np.exp(-0.9 * np.pi**2 * TIMES)[:, None] * np.cos(3 * np.pi * x)
  np.testing.assert_allclose(etdrk4.solve(equation, TIMES, 16, 16, 0.1), expected, atol=1e-13)


def test_burgers_is_cole_and_hopf_s():
  x = -1 + 2 * np.arange(64) / 64
  solved = etdrk4.solve(etdrk4.burgers(waves.VISCOSITY), TIMES, 64, 1024, 5e-4)
  exact = cole_hopf.solve(x, TIMES[:, None], waves.VISCOSITY)
  np.testing.assert_allclose(solved, exact, atol=1e-9)


@pytest.mark.parametrize("end", [0.2, pytest.param(1.0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", waves.RESOLUTIONS)
def test_references_have_converged_to_1e_10(name, end):
  """Half the step and twice the modes give the same."""
  equation, (modes, step, dtype) = getattr(etdrk4, name)(), waves.RESOLUTIONS[name]
  times = np.linspace(0, end, 6)
  solved = etdrk4.solve(equation, times, 64, modes, step, dtype)
  finer = etdrk4.solve(equation, times, 64, 2 * modes, step / 2, dtype)
  np.testing.assert_allclose(solved, finer, rtol=0, atol=1e-10)


def test_the_kink_of_the_initial_value_does_not_spoil_it():
  """Half of the modes gives nearly the same, as coefficients of the kink do not alias."""
  equation, (modes, step, dtype) = etdrk4.allen_cahn(), waves.RESOLUTIONS["allen_cahn"]
  few, all_ = (etdrk4.solve(equation, TIMES, 64, n, 2 * step, dtype) for n in (modes // 2, modes))
  np.testing.assert_allclose(few[1:], all_[1:], rtol=0, atol=1e-9)
  np.testing.assert_array_equal(few[0], all_[0])
