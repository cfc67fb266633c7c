"""The equations: known solutions have no residual, points lie in the domain, references agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.pde import cole_hopf
from mixer_jax.tasks.physics import Box, Problem, Term, derivatives, observed
from mixer_jax.tasks.physics.equations import PROBLEMS, waves

EXACT = [name for name, make in PROBLEMS.items() if make().exact]


def test_every_equation_of_the_paper_has_its_solution():
  assert EXACT[:7] == [name for name in PROBLEMS if name.startswith(("poisson", "heat", "log"))]


@pytest.mark.parametrize("name", EXACT)
def test_the_exact_solution_has_no_residual(name, float64):
  problem, rng = PROBLEMS[name](), np.random.default_rng(0)
  for term in problem.terms:
    rows = problem.terms[term].points(rng, 20)
    found = jax.vmap(lambda row, term=term: problem.residual(term, problem.exact, row, {}))(rows)
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, 0, atol=2e-11)


@pytest.mark.parametrize("name", EXACT)
def test_the_interior_s_residual_is_that_of_jax_s_hessian(name, float64):
  """Of a function that is no solution, with its derivatives by reverse mode."""
  problem, rng = PROBLEMS[name](), np.random.default_rng(1)
  x = jnp.asarray(problem.domain.inside(rng, 1)[0])
  wave = jnp.asarray(rng.normal(size=x.size)) / x.size
  u = lambda x: jnp.sin(wave @ x) + 0.1 * jnp.sum(x**3)
  slope, second = jax.grad(u)(x), jnp.diag(jax.hessian(u)(x))
  dim = x.size - 1
  if name.startswith("poisson"):
    source = -jnp.trace(jax.hessian(problem.exact)(x))
    expected = second.sum() + source
  elif name.startswith("heat"):
    expected = slope[dim] - 0.25 * second[:dim].sum()
  else:
    growth = dim / 2 + x[:dim] @ slope[:dim] / 2 + second[:dim].sum() + (slope[:dim] ** 2).sum()
    expected = slope[dim] - growth
  found = problem.residual("interior", u, x, {})
  np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["burgers", "allen_cahn", "korteweg_de_vries"])
def test_waves_have_the_residuals_of_jax_s_derivatives(name, float64):
  u = lambda x: jnp.sin(2 * x[0] - x[1]) * jnp.exp(0.3 * x[1] * x[0])
  x = jnp.array([0.3, 0.4])
  along = lambda n: _nested(u, n)(x)
  value, slope, second, third = u(x), along(1), along(2), along(3)
  moved = {
    "burgers": value * slope - 0.01 / jnp.pi * second,
    "allen_cahn": -1e-4 * second + 5 * value**3 - 5 * value,
    "korteweg_de_vries": value * slope + 0.022**2 * third,
  }
  found = PROBLEMS[name]().residual("interior", u, x, {})
  np.testing.assert_allclose(found, jax.grad(u)(x)[1] + moved[name], rtol=1e-10)


def _nested(f, times):
  for _ in range(times):
    f = lambda x, f=f: jax.grad(f)(x)[0]
  return f


def test_derivatives_of_all_orders(float64):
  f = lambda x: jnp.tanh(x[0]) * jnp.sin(x[1]) + x[0] ** 4
  x = jnp.array([0.7, -0.2])
  expected = [_nested(f, n)(x) for n in range(5)]
  np.testing.assert_allclose(derivatives.powers(f, x, 0, 4), expected, rtol=1e-11)
  mixed = jax.hessian(f)(x)[0, 1]
  np.testing.assert_allclose(derivatives.partial(f, 0, 1)(x), mixed, rtol=1e-12)
  np.testing.assert_allclose(derivatives.gradient(f, x), jax.grad(f)(x), rtol=1e-12)
  np.testing.assert_allclose(derivatives.gradient(f, x, 1), jax.grad(f)(x)[:1], rtol=1e-12)
  np.testing.assert_allclose(derivatives.laplacian(f, x), jnp.trace(jax.hessian(f)(x)), rtol=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_points_lie_in_the_domain_and_conditions_on_its_boundary(name):
  problem = PROBLEMS[name]()
  domain, low, high = problem.domain, *map(np.array, (problem.domain.low, problem.domain.high))
  for term in problem.terms.values():
    rows = term.points(np.random.default_rng(0), 50)
    x = rows[:, : domain.dim]
    assert ((x >= low) & (x <= high)).all()
    on_boundary = ((x == low) | (x == high)).any(axis=1)
    assert on_boundary.all() == (term not in (problem.terms["interior"], problem.terms.get("data")))


def test_faces_are_drawn_alike():
  box = Box((0.0, -1.0, 2.0), (1.0, 1.0, 5.0))
  x = box.faces()(np.random.default_rng(0), 6000)
  ends = np.array([box.low, box.high])
  on = x[None] == ends[:, None]
  assert (on.sum((0, 2)) == 1).all()
  assert abs(on.sum(1) - 1000).max() < 150


def test_hard_conditions_hold_for_any_net():
  problem = PROBLEMS["burgers"](hard=True)
  u = problem.solution(lambda x: jnp.array([3.0 + x[0] * x[1]]))
  assert list(problem.terms) == ["interior"]
  np.testing.assert_allclose(u(jnp.array([0.3, 0.0])), -np.sin(0.3 * np.pi), rtol=1e-6)
  np.testing.assert_allclose(u(jnp.array([-1.0, 0.7])), 0, atol=1e-6)


def test_the_inverse_problem_s_data_are_the_solution_s_and_its_truth_has_no_residual(float64):
  problem = PROBLEMS["burgers_inverse"](noise=0.0, observations=30)
  rows = problem.terms["data"].points(np.random.default_rng(0), 30)
  np.testing.assert_allclose(
    rows[:, 2], cole_hopf.solve(rows[:, 0], rows[:, 1], waves.VISCOSITY), atol=1e-13
  )
  raw = {name: np.log(p.true) if p.positive else p.true for name, p in problem.learned.items()}
  known = PROBLEMS["burgers"]()
  u, x = lambda x: jnp.sin(x[0]) * x[1], jnp.array([0.2, 0.5])
  found = problem.residual("interior", u, x, raw)
  np.testing.assert_allclose(found, known.residual("interior", u, x, {}), rtol=1e-12)
  noisy = PROBLEMS["burgers_inverse"](noise=0.1, observations=3000)
  clean = PROBLEMS["burgers_inverse"](noise=0.0, observations=3000)
  a, b = (p.terms["data"].points(np.random.default_rng(0), 3000)[:, 2] for p in (noisy, clean))
  assert np.std(a - b) == pytest.approx(0.1 * np.std(b), rel=0.05)


def test_observed_rows_hold_points_and_values():
  term = observed(np.array([[0.1, 0.2], [0.3, 0.4]]), np.array([5.0, 6.0]), weight=2.0)
  assert (term.count, term.weight) == (2, 2.0)
  rows = term.points(np.random.default_rng(0), 2)
  assert sorted(map(tuple, rows)) == [(0.1, 0.2, 5.0), (0.3, 0.4, 6.0)]
  found = term.residual(lambda x: x[0] + 5, rows[rows[:, 2] == 5][0])
  np.testing.assert_allclose(found, [0.1], rtol=1e-5)


def test_a_problem_may_have_one_axis_and_no_name():
  box = Box((0.0,), (1.0,))
  problem = Problem(box, {"interior": Term(lambda u, x: u(x) - x[0], box.inside, 5)})
  assert problem.domain.axes == ["x0"] and not problem.solved
