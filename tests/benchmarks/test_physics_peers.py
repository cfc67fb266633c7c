"""Equations solved by peers: the problems, and the rows of a candidate of ours."""

import json
import types

import numpy as np
import pytest

from benchmarks import peers, physics_peers, physics_problems


def options(**fields):
  given = dict(problems=["poisson"], candidates=["ours_ssbroyden"], hidden=["8"], seconds=2.0)
  return types.SimpleNamespace(**given | dict(adam_steps=9, peers_python=None) | fields)


def test_the_solution_of_burgers_has_the_published_slope():
  """152.00516 at x = 0 and t = 1.6037 / pi (Basdevant et al., 1986, Table 1)."""
  t, h = 1.6037 / np.pi, 1e-6
  [slope] = physics_problems.burgers(np.array([t]), np.array([h])) / h
  assert slope == pytest.approx(-152.00516, rel=1e-6)


def test_the_solution_of_burgers_solves_it():
  rng = np.random.default_rng(0)
  t, x, h = rng.uniform(0.05, 0.95, 50), rng.uniform(0.2, 0.9, 50), 1e-4
  at = lambda i, j: physics_problems.burgers(t + i * h, x + j * h)
  first = at(0, 1) - at(0, -1)
  second = (at(0, 1) - 2 * at(0, 0) + at(0, -1)) / h
  residual = at(1, 0) - at(-1, 0) + at(0, 0) * first - 2 * physics_problems.VISCOSITY * second
  assert np.abs(residual).max() < 1e-5 * 2 * h * 100
  ends = physics_problems.burgers(np.array([0.0, 0.5]), np.array([0.3, 1.0]))
  np.testing.assert_allclose(ends, [-np.sin(0.3 * np.pi), 0], atol=1e-12)


@pytest.mark.parametrize("name", physics_problems.PROBLEMS)
def test_points_are_where_their_values_are_those_of_the_solution(name):
  problem = physics_problems.of(name, 0, interior=40, border=10)
  low, high = ([0, 0], [1, 1]) if name == "poisson" else ([0, -1], [1, 1])
  assert (problem.points["interior"] > low).all() and (problem.points["interior"] < high).all()
  for part, values in problem.values.items():
    x = problem.points[part]
    u = physics_problems.burgers(*x.T) if name == "burgers" else np.sin(np.pi * x).prod(axis=1)
    np.testing.assert_allclose(values[:, 0], u, atol=1e-12)
  assert problem.error(problem.solution * 1.01) == pytest.approx(0.01)


def test_a_candidate_of_ours_prints_its_rows(capfd):
  physics_peers.main(options())
  rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
  assert rows[0]["updates"] == 1 and rows[-1]["seconds"] >= 2 > rows[-2]["seconds"]
  assert rows[-1]["error"] < 0.2 * rows[0]["error"]
  assert rows[-1]["loss"] < 0.02 * rows[0]["loss"]


def test_peers_that_are_not_installed_are_left_out(capfd, monkeypatch):
  monkeypatch.setattr(peers, "has", lambda *_: False)
  physics_peers.main(options(candidates=["jinns_ssbroyden", "deepxde_adam"]))
  found = capfd.readouterr()
  assert not found.out and found.err.count("is left out") == 2
