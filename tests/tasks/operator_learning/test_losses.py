"""Relative errors and statistics of functions against NumPy in float64 and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax.tasks.operator_learning import losses, normaliser
from mixer_jax.tasks.operator_learning.task import OperatorLearning


def functions(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("grid, unit", [((9,), 1), ((6, 7), 1), ((9,), 1e-30), ((9,), 1e30)])
def test_relative_l2_is_numpys_in_any_unit(grid, unit):
  errors, targets = (functions(seed, 5, *grid) * np.float32(unit) for seed in (0, 1))
  norm = lambda x: np.linalg.norm(x.astype(np.float64).reshape(5, -1), axis=1)
  found = losses.relative_l2(errors, targets)
  np.testing.assert_allclose(found, norm(errors) / norm(targets), rtol=1e-6)
  np.testing.assert_allclose(losses.scales(targets), np.sqrt(np.prod(grid)) / norm(targets), 1e-6)


@pytest.mark.parametrize("unit", [1, 1e-30, 1e30])
def test_relative_h1_of_sines_is_the_ratio_of_their_slopes_in_any_unit(unit):
  x = np.arange(64) / 64
  targets, errors = unit * np.sin(2 * np.pi * x)[None], 0.1 * unit * np.sin(6 * np.pi * x)[None]
  # Central differences damp wave k by sin(2 pi k h) / (2 pi k h).
  expected = 0.1 * np.sin(6 * np.pi / 64) / np.sin(2 * np.pi / 64)
  found = losses.relative_h1(jnp.float32(errors), jnp.float32(targets), periodic=True)
  np.testing.assert_allclose(found, [expected], rtol=1e-5)


@pytest.mark.parametrize("mean, height", [(300, 5), (101_325, 100), (1, 1e-2)])
def test_relative_h1_is_the_same_on_any_grid_for_functions_far_from_zero(mean, height):
  """Float32 rounds the slopes of cells to 2e-8 of the mean."""
  for points in (64, 512, 2048):
    wave = height * np.sin(2 * np.pi * np.arange(points) / points)[None]
    targets, errors = jnp.float32(mean + wave), jnp.float32(0.1 * wave)
    np.testing.assert_allclose(losses.relative_h1(errors, targets, True), [0.1], rtol=0.04)
  found = [
    float(losses.relative_h1(jnp.float32(wave), jnp.ones_like(wave), True)[0])
    for wave in (0.01 * np.sin(2 * np.pi * np.arange(n) / n)[None] for n in (64, 8192))
  ]
  assert found[0] == pytest.approx(found[1], rel=0.01)  # slopes of constants are 0


def test_slopes_of_a_plane_are_constant_at_inner_points():
  x, y = np.meshgrid(np.linspace(0, 1, 5), np.linspace(0, 1, 9), indexing="ij")
  found = losses.slopes(jnp.asarray(3 * x - 2 * y)[None], periodic=False)
  np.testing.assert_allclose(found[0], np.full((1, 3, 7), 3 / 4))
  np.testing.assert_allclose(found[1], np.full((1, 3, 7), -2 / 4), rtol=1e-6)


@pytest.mark.parametrize("grid", [(64, 64), (64, 256), (256, 64)])
def test_relative_h1_is_that_of_the_unit_square_on_any_grid(grid):
  x, y = np.meshgrid(*(np.arange(n) / n for n in grid), indexing="ij")
  wave = lambda k, m: np.sin(2 * np.pi * k * x) * np.sin(2 * np.pi * m * y)
  # The mean square of a slope of sin(2 pi k x) sin(2 pi m y), by central differences on its axis.
  squares = lambda k, m: sum((np.sin(2 * np.pi * w / n) * n) ** 2 for w, n in zip((k, m), grid))
  expected = np.sqrt(0.01 * squares(3, 1) / squares(1, 2))
  errors, targets = jnp.float32(0.1 * wave(3, 1))[None], jnp.float32(wave(1, 2))[None]
  np.testing.assert_allclose(losses.relative_h1(errors, targets, True), [expected], rtol=1e-4)


def test_no_error_has_a_finite_gradient():
  targets = functions(0, 2, 8)
  total = lambda e: (
    losses.relative_l2(e, targets).sum() + losses.relative_h1(e, targets, True).sum()
  )
  value, gradient = jax.value_and_grad(total)(jnp.zeros((2, 8)))
  assert value < 1e-8 and np.all(np.isfinite(gradient))


@pytest.mark.parametrize("unit", [1, 1e-9, 1e9])
@pytest.mark.parametrize("kind, axis", [("pointwise", 0), ("global", None)])
def test_normalised_training_functions_have_mean_0_and_deviation_1(kind, axis, unit):
  given = np.float32(unit) * (5 + 3 * functions(0, 200, 4, 3))
  statistics = normaliser.fit(given, kind)
  found = np.asarray(normaliser.normalised(given, statistics, periodic=False))
  np.testing.assert_allclose(found.mean(axis), 0, atol=1e-5)
  np.testing.assert_allclose(found.std(axis), 1, rtol=1e-4)
  back = normaliser.denormalised(found, statistics, periodic=False)
  np.testing.assert_allclose(back, given, rtol=1e-5, atol=1e-5 * unit)


@pytest.mark.parametrize("kind", ["pointwise", "global"])
def test_numbers_that_never_vary_stay_finite(kind):
  given = np.float32(functions(0, 50, 6))
  given[:, 0] = 2  # a boundary
  for some in (given, np.full_like(given, 2)):
    found = normaliser.normalised(some, normaliser.fit(some, kind), periodic=False)
    assert np.isfinite(found).all() and (kind == "global" or not found[:, 0].any())


@pytest.mark.parametrize("points", [5, 9, 12, 17])
def test_statistics_of_another_grid_are_linear_in_between(points):
  own = np.linspace(0, 1, 9)
  values = np.abs(own - 0.5)[:, None] + 2 * own[None, :]  # on [0, 1]^2, with a kink at a point
  grid = np.linspace(0, 1, points)
  expected = np.interp(grid, own, np.abs(own - 0.5))[:, None] + 2 * grid[None, :]
  found = normaliser.at(np.float32(values), (points, points), periodic=False)
  np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("points", [4, 8, 12, 32])
def test_statistics_of_another_periodic_grid_go_round(points):
  values = functions(0, 8)
  grid, own = np.arange(points) / points, np.arange(8) / 8
  expected = np.interp(grid, own, values, period=1)
  found = normaliser.at(values, (points,), periodic=True)
  np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("form, power", [("norm", 1), ("square", 2)])
def test_the_h1_term_of_the_task_in_closed_form(form, power):
  own = config_lib.default("operator_learning", "fno_1d")
  own.update(loss=form, h1=0.5)
  task = OperatorLearning(own)
  x = np.arange(64) / 64
  task._grids = ((64,), (64,))
  wanted = jnp.float32(np.sin(2 * np.pi * x))[None]
  found = wanted + jnp.float32(0.1 * np.sin(6 * np.pi * x))[None]
  h1 = 0.1 * np.sin(6 * np.pi / 64) / np.sin(2 * np.pi / 64)
  loss = 0.1**power + (0.5 / 64) ** (power / 2) * h1**power
  np.testing.assert_allclose(task._sums(found, wanted)["loss"].value(), loss, rtol=1e-4)


def test_a_small_deviation_counts_as_a_thousandth_of_the_whole():
  given = np.random.default_rng(0).normal(size=(50, 6)) * [0, 1e-5, 0.01, 1, 1, 1]
  std = normaliser.fit(given, "pointwise")["std"]
  whole = given.std()
  np.testing.assert_allclose(std, np.maximum(given.std(0), 1e-3 * whole), rtol=1e-5)
  assert std[0] == np.float32(1e-3 * whole) and std[2] > std[1]


@pytest.mark.parametrize("unit, told", [(1, False), (1e-20, True), (3e5, True)])
def test_outputs_in_far_units_are_told_unless_they_are_normalised(unit, told, caplog):
  outputs = np.float32(unit * functions(0, 3, 8))
  normaliser.warn_of_units(outputs, "global")
  assert not caplog.text
  normaliser.warn_of_units(outputs, "none")
  assert ("normalise=" in caplog.text) == told
