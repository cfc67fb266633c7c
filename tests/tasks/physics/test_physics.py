"""The task of equations against NumPy, through training, a kill, and the mistakes of its users."""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from docs import own_equation
from mixer_jax import config as config_lib
from mixer_jax import experiment, optimizers, tasks
from mixer_jax.errors import Diverged, UserError
from mixer_jax.tasks import physics
from mixer_jax.tasks.physics import balance
from mixer_jax.tasks.physics.equations import PROBLEMS
from mixer_jax.training import contract, loop
from tests import children
from tests.tasks import runs
from tests.tasks.physics.conftest import small

BOX = physics.Box((0.0, 0.0), (1.0, 2.0), ("x", "y"))


def made(config):
  """The task and fresh variables."""
  config_lib.check(config)
  task = tasks.find(config.task)(config)
  return task, task.init(jax.random.key(0))


def rows_of(task, split="test", number=37):
  """The first examples of a split, prepared."""
  examples = jax.tree.map(lambda x: x[:number], task.datasets()[split].arrays())
  return task.prepare(None, examples, train=split == "train")


def test_metrics_are_numpy_s():
  task, variables = made(small())
  batch, mask = rows_of(task), np.arange(37) < 30
  sums = task.evaluate(variables, batch, mask)
  found = np.float64(task.predict(variables, batch).outputs)[:30]
  x, y = np.float64(batch["point"][:30]).T
  wanted = (np.sin(np.pi * x) * np.sin(np.pi * y))[:, None]
  error = found - wanted
  expected = dict(
    relative_l2=np.linalg.norm(error) / np.linalg.norm(wanted),
    rmse=np.sqrt(np.mean(error**2)),
    max_error=np.abs(error).max(),
  )
  residuals = task.residuals(variables, batch["terms"])
  for name, r in residuals.items():
    expected[f"residual_{name}"] = np.mean(np.float64(r[:30]) ** 2)
  expected["loss"] = expected["residual_interior"] + expected["residual_boundary"]
  for name, value in expected.items():
    assert float(sums[name].value()) == pytest.approx(value, rel=1e-4), name


def test_the_loss_is_the_weighted_sum_of_means_of_squares():
  task, variables = made(small("cavity", weights=(2.0, 3.0, 0.5), points=(40, 30, 1), sets=2))
  batch = rows_of(task, "train", 2)
  assert {k: x.shape for k, x in batch.items()} == dict(
    interior=(80, 2), boundary=(60, 2), pressure=(2, 2)
  )
  residuals = task.residuals(variables, batch)
  assert {k: x.shape[1] for k, x in residuals.items()} == dict(interior=3, boundary=2, pressure=1)
  loss, aux = task.loss(variables, batch, None)
  means = {k: np.mean(np.sum(np.square(r), 1)) for k, r in residuals.items()}
  expected = 2 * means["interior"] + 3 * means["boundary"] + 0.5 * means["pressure"]
  assert float(loss.value()) == pytest.approx(expected, rel=1e-5)
  assert float(aux.metrics["residual_pressure"].value()) == pytest.approx(means["pressure"])
  weights = {name: weight for name, (weight, kind) in task.likelihood.items() if kind == "normal"}
  assert weights == dict(interior=2.0, boundary=3.0, pressure=0.5)


def test_residuals_of_several_functions_are_told_one_by_one():
  task, variables = made(small("cavity", cache_dir=""))
  batch = rows_of(task)
  sums = task.evaluate(variables, batch, np.ones(37, bool))
  known = batch["value"]
  assert known.shape == (37, 2) and task.predict(variables, batch).outputs.shape == (37, 3)
  error = task.predict(variables, batch).outputs[:, 1] - known[:, 1]
  relative = np.linalg.norm(error) / np.linalg.norm(known[:, 1])
  assert float(sums["relative_l2_v"].value()) == pytest.approx(relative, rel=1e-4)


def test_points_depend_on_the_seed_alone_and_are_renewed():
  points = lambda **values: made(small(**values))[0].datasets()["train"].arrays()["interior"]
  first = points(sets=3)
  np.testing.assert_array_equal(first, points(sets=3))
  np.testing.assert_array_equal(first[:1], points())
  assert (
    not np.isclose(first[0], first[1]).any() and not np.isclose(first, points(sets=3, seed=1)).any()
  )
  with jax.threefry_partitionable(False):
    np.testing.assert_array_equal(first, points(sets=3))
  tested = [made(small(seed=seed))[0].datasets()["test"].arrays()["point"] for seed in (0, 1)]
  np.testing.assert_array_equal(*tested)


def test_a_set_of_points_is_used_for_some_steps():
  run = experiment.build(small(sets=6, steps_a_set=3))
  ids = np.array([run.order(step) for step in range(36)]).reshape(12, 3)
  assert (ids == ids[:, :1]).all() and len(np.unique(ids)) > 3


def test_balanced_weights_are_those_of_gradient_norms():
  task, variables = made(small(balance="gradient_norms", balance_period=2, balance_decay=0.5))
  batch = rows_of(task, "train", 1)
  first = variables[balance.COLLECTION]
  assert {k: float(x) for k, x in first["weights"].items()} == dict(interior=1.0, boundary=1.0)
  _, aux = task.loss(variables, batch, None)
  state = aux.collections[balance.COLLECTION]

  def mean(params, name):
    return jnp.mean(task.residuals({"params": params}, batch)[name] ** 2)

  grads = {n: jax.grad(mean)(variables["params"], n) for n in batch}
  norms = {
    n: np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(g))) for n, g in grads.items()
  }
  for name, norm in norms.items():
    expected = 0.5 + 0.5 * sum(norms.values()) / norm
    assert float(state["weights"][name]) == pytest.approx(expected, rel=1e-4)
  variables[balance.COLLECTION] = state
  loss, aux = task.loss(variables, batch, None)
  kept = aux.collections[balance.COLLECTION]
  assert kept["weights"] == state["weights"] and int(kept["count"]) == 2
  found = task.curvature_view()(variables, batch)
  assert float(loss.value()) == pytest.approx(
    sum(float(jnp.mean(jnp.square(r))) for r in found.values()), rel=1e-5
  )


def test_learned_parameters_are_trained_and_told():
  task, variables = made(small("burgers_inverse", points=(50, 60)))
  assert task.learned(variables)["viscosity"] == pytest.approx(0.01, rel=1e-5)
  sums = task.evaluate(variables, rows_of(task), np.ones(37, bool))
  assert float(sums["advection"].value()) == pytest.approx(0.5)
  assert float(sums["error_advection"].value()) == pytest.approx(0.5, rel=1e-5)
  true = 0.01 / np.pi
  assert float(sums["error_viscosity"].value()) == pytest.approx(0.01 / true - 1, rel=1e-4)
  gradient = jax.grad(lambda p: task.loss({"params": p}, rows_of(task, "train"), None)[0].total)
  found = gradient(variables["params"])["equation"]
  assert all(float(jnp.abs(x)) > 0 for x in found.values())


@pytest.mark.parametrize("name", [n for n in PROBLEMS if n not in ("poisson_100d", "allen_cahn")])
def test_every_problem_fits_the_contract(name, tmp_path):
  config = small(name, test_points=20)
  run = experiment.build(config)
  contract.check_task(run)


def solve(config):
  """The rows of evaluation of a run without a directory."""
  return [row for _, row in loop.evaluations(experiment.build(config))]


def test_a_short_run_lowers_the_error():
  config = small(optimizer="adam", num_steps=300, eval_steps=100)
  config.model.hidden_dims, config.optimizer.learning_rate = (16,), 3e-2
  config.points = (100, 40)
  rows = solve(config)
  assert rows[-1]["test/relative_l2"] < 0.3 < rows[0]["test/relative_l2"]
  assert rows[-1]["train/loss"] < rows[0]["train/loss"]
  assert {"train/residual_interior", "test/residual_boundary", "test/max_error"} <= rows[0].keys()


KFAC = dict(quadratic_model=True, adaptive_damping=True, estimation="exact", damping=1e-2)
KFAC |= dict(weight_decay=0.0, factor_period=1, inverse_period=1, learning_rate=1.0)


def test_kfac_lowers_the_residuals():
  config = small(num_steps=40, eval_steps=20)
  config.optimizer = config_lib.optimizer("kfac", **KFAC)
  config.points = (60, 20)
  run = experiment.build(config)
  kinds = {block.kind for block in optimizers.curvature_blocks(config.optimizer, run.problem)}
  assert kinds == {"kronecker"}
  rows = [row for _, row in loop.evaluations(run)]
  assert rows[-1]["train/residual_interior"] < 0.5 * rows[0]["train/residual_interior"]


@pytest.mark.parametrize("choice", ["none", "gradient_norms"])
def test_the_curvature_is_that_of_the_weighted_squares(choice):
  """The quadratic form of K-FAC's model: twice the weighted means of squares of tangents."""
  config = small("heat_1d", balance=choice, weights=(2.0, 1.0, 0.5), points=(12, 9, 7))
  run = experiment.build(config)
  task, batch = run.task, rows_of(run.task, "train", 1)
  variables = dict(task.init(jax.random.key(0)))
  if choice != "none":
    weights = dict(interior=3.0, boundary=0.25, initial=5.0)
    variables["balance"] = {**variables["balance"], "weights": jax.tree.map(jnp.float32, weights)}
  params = variables.pop("params")
  v = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
  residuals = lambda p: task.residuals({**variables, "params": p}, batch)
  tangents = jax.jvp(residuals, (params,), (v,))[1]
  factor = dict(interior=2.0, boundary=1.0, initial=0.5)
  if choice != "none":
    factor = {name: factor[name] * weights[name] for name in factor}
  expected = 2 * sum(factor[k] * float(jnp.mean(jnp.square(x))) for k, x in tangents.items())
  curvature = run.problem.curvature(dict(estimation="exact"))
  found = curvature.quadratic(params, (batch, variables), [v])[0, 0]
  assert float(found) == pytest.approx(expected, rel=1e-4)


def test_devices_share_sets_of_points():
  config = small(batch_size=2, sets=6, num_steps=6, eval_steps=3, points=(30, 20))
  rows = {}
  for devices in (1, 2):
    config.mesh.data = devices
    rows[devices] = solve(config)
  for one, two in zip(*rows.values(), strict=True):
    assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-4)
    assert two["test/relative_l2"] == pytest.approx(one["test/relative_l2"], rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "soap"])
def test_all_of_a_float64_run_is_float64(optimizer):
  config = small(optimizer=optimizer, float64=True, num_steps=4, eval_steps=2)
  config.model.fourier_features = 4
  run = experiment.build(config)
  state = next(loop.evaluations(run))[0]
  of = lambda tree: {
    x.dtype.name for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)
  }
  assert of(state.variables) == of(state.metrics) == {"float64"}
  assert optimizer != "adam" or of(state.opt_state.inner_state) == {"float64"}  # but the rate
  assert {x.dtype.name for x in jax.tree.leaves(run.datasets["train"].arrays())} == {"float64"}
  assert jax.config.jax_enable_x64
  experiment.build(small())
  assert not jax.config.jax_enable_x64


_NEWTON = pytest.param("gauss_newton", marks=pytest.mark.thorough)


@pytest.mark.parametrize("optimizer", ["adam", _NEWTON])
def test_a_killed_run_in_float64_ends_as_if_it_had_not_been(tmp_path, optimizer):
  config = small(float64=True, sets=7, balance="gradient_norms", balance_period=3)
  config.points = (40, 20)
  if optimizer == "gauss_newton":
    config.balance = "none"
    config.optimizer = config_lib.optimizer(optimizer, momentum=0.5, acceleration=True)
  runs.assert_kill_changes_nothing(config, tmp_path, 12, 15)
  state = children.final_state(config, tmp_path / "parts")
  assert jax.tree.leaves(state.params)[0].dtype == jnp.float64
  ended = children.command(tmp_path / "log", "evaluate", f"--workdir={tmp_path}/parts")
  row = children.rows(tmp_path / "parts")[-1]
  assert f"relative_l2 {row['test/relative_l2']:.6g}" in ended.out, ended.err


@pytest.mark.parametrize("name", ["heat_1d", "poisson_5d", "cavity"])
def test_pictures_show_solution_residuals_and_time(name):
  task, variables = made(small(name, test_points=100))
  found = task.pictures(variables, task.datasets()["test"])
  assert set(found) == {"solution", "residuals"} | ({"time"} if name == "heat_1d" else set())
  titles = [axis.get_title() for axis in found["solution"].axes]
  assert {"u: solution", "u: learned", "u: error"} <= set(titles)


def test_points_of_a_file_are_answered(tmp_path):
  task, variables = made(small())
  x = np.random.default_rng(0).uniform(size=(9, 2))
  np.savez(tmp_path / "a.npz", points=x)
  np.savez(tmp_path / "b.npz", points=x + 1)
  np.savez(tmp_path / "c.npz", x=x)
  [answer] = task.answer(variables, [str(tmp_path / "a.npz")])
  expected = task.predict(variables, {"point": np.float32(x)}).outputs
  np.testing.assert_allclose(answer["solution"], expected, rtol=1e-5, atol=1e-6)
  for name in "bcd":  # outside of the domain, without "points", absent
    with pytest.raises(UserError, match=f"{name}.npz"):
      list(task.answer(variables, [str(tmp_path / f"{name}.npz")]))


def test_axes_are_named_and_numbers_are_first_values():
  box = physics.Box((0.0, 0.0), (1.0, 2.0), names=("x", "t"))
  draw = lambda points: points(np.random.default_rng(0), 50)
  assert (draw(box.at("t", 0.5))[:, 1] == 0.5).all()
  np.testing.assert_array_equal(draw(box.faces("x")), draw(box.faces(0)))
  term = physics.Term(lambda u, x, learned: learned["k"] * u(x), box.inside, 5)
  problem = physics.Problem(box, {"only": term}, learned={"k": 2.0}, periods={"t": 2.0})
  assert list(problem.periods) == [0.0, 2.0]
  assert problem.residual("only", lambda x: x[1], jnp.array([0.0, 3.0]), {"k": 2.0}) == 6.0


def own(term, exact=None):
  """The class of the task of an equation with one term."""

  def equation():
    return physics.Problem(BOX, {"interior": term}, exact=exact)

  return physics.task(equation)


def start(task_class):
  config = small()
  config.problem = ml_collections.ConfigDict()
  return task_class(config)


def test_an_own_equation_without_a_solution_has_the_loss_as_its_metric():
  found = own(physics.Term(lambda u, x: u(x), BOX.inside, 10))
  assert [metric.name for metric in found.metrics] == ["loss"]
  task = start(found)
  variables = task.init(jax.random.key(0))
  sums = task.evaluate(variables, rows_of(task, number=5), np.ones(5, bool))
  assert sums.keys() == {"loss", "residual_interior"}


FINE = lambda u, x: u(x)


@pytest.mark.parametrize(
  "equation, said",
  [
    ((physics.Term(FINE, lambda rng, n: np.full((n, 2), 1.5), 3),), "interior.*x is 1.5"),
    ((physics.Term(FINE, lambda rng, n: np.full((n, 2), np.nan), 3),), "interior.*x is nan"),
    ((physics.Term(FINE, lambda rng, n: np.zeros((n + 1, 2)), 3),), "interior.*shape"),
    ((physics.Term(lambda u, x: jnp.outer(x, x), BOX.inside, 3),), "interior.*shape"),
    ((physics.Term(FINE, BOX.inside, 3), lambda x: x), "2 functions"),
  ],
)
def test_points_outside_and_wrong_shapes_are_told(equation, said):
  with pytest.raises(UserError, match=said):
    task = start(own(*equation))
    task.loss(task.init(jax.random.key(0)), rows_of(task, "train", 1), None)


@pytest.mark.parametrize(
  "field, values",
  [
    ("points", dict(points=(5,))),
    ("weights", dict(weights=(1.0, 2.0, 3.0))),
    ("steps_a_set", dict(steps_a_set=5, sets=12)),
  ],
)
def test_contradictions_of_fields_are_told(field, values):
  with pytest.raises(UserError, match=field):
    config_lib.check(small(**values))


def test_a_residual_that_diverges_is_told():
  config = small(num_steps=50)
  config.optimizer = config_lib.optimizer("sgd", learning_rate=1e4)
  with pytest.raises(Diverged, match="step"):
    solve(config)


def test_the_page_s_equation_is_solved():
  config = own_equation.get_config()
  config.mesh.data, config.num_steps, config.eval_steps = 1, 40, 20
  config.model.hidden_dims, config.points = (16,), (200, 80)
  config_lib.check(config)
  assert solve(config)[-1]["test/relative_l2"] < 0.01


@pytest.mark.thorough
def test_settings_of_jax_change_no_frequency():
  model = {"model.fourier_features": 4, "model.start": "siren"}
  runs.assert_settings_change_no_draw(small(**model))
