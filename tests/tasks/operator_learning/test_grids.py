"""Grids of inputs, outputs and answers: coarser, finer, with other ends, of the inverse problem."""

import dataclasses
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.errors import UserError
from mixer_jax.tasks.operator_learning import functions, losses
from mixer_jax.training.evaluator import Evaluator
from tests import children
from tests.tasks.operator_learning.functions_on_a_circle import waves


def test_the_inverse_problem_has_means_over_cells(folder):
  data = functions.FunctionData(name="files", dir=str(folder), step=2, output_step=4, inverse=True)
  data = dataclasses.replace(data, train_split="train_2d.npz", test_split="test_2d.npz")
  data.check()
  arrays = functions.load(data).splits["test"].arrays()
  with np.load(folder / "test_2d.npz") as whole:
    np.testing.assert_array_equal(arrays["inputs"], whole["sol"][:, ::2, ::2])
    coefficient = np.float64(whole["coeff"])
  assert arrays["outputs"].shape == (21, 5, 5)
  weights = np.array([0.5, 1, 1, 1, 0.5]) / 4
  inner = np.einsum("i,nij,j->n", weights, coefficient[:, 2:7, 6:11], weights)
  np.testing.assert_allclose(arrays["outputs"][:, 1, 2], inner, rtol=1e-6)
  corner = np.array([1, 1, 0.5]) / 2.5
  cut = np.einsum("i,nij,j->n", corner, coefficient[:, :3, :3], corner)
  np.testing.assert_allclose(arrays["outputs"][:, 0, 0], cut, rtol=1e-6)


@pytest.mark.parametrize("step", [3, 4])
def test_means_over_cells_go_round_a_periodic_axis(step):
  u = np.random.default_rng(0).normal(size=(2, 12, 24))
  found = functions.averaged(u, step, periodic=True)
  # Neighbours up to half a cell away; those at exactly half, of even steps, belong to two cells.
  near = np.arange(-(step // 2), step // 2 + 1)
  weights = np.where(2 * np.abs(near) == step, 0.5, 1.0) / step
  wanted = np.zeros((2, 12 // step, 24 // step))
  for i, j in np.ndindex(wanted.shape[1:]):
    for (k, a), (m, b) in itertools.product(zip(near, weights), repeat=2):
      wanted[:, i, j] += a * b * u[:, (step * i + k) % 12, (step * j + m) % 24]
  np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.thorough
def test_the_inverse_answer_is_the_model_s_at_the_points_of_its_outputs(config):
  config.normalise = "pointwise"
  config.data.update(inverse=True, output_step=8)
  run = experiment.build(config)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  inputs = run.datasets["test"].arrays()["inputs"]
  found = run.task.predict(variables, {"inputs": inputs, "outputs": inputs}).outputs
  train = {name: np.float64(run.datasets["train"].arrays()[name]) for name in ("inputs", "outputs")}
  values = (inputs - train["inputs"].mean(0)) / train["inputs"].std(0)
  positions = (np.arange(32) / 32)[:, None]
  whole = run.task.model.apply({"params": variables["params"]}, values[..., None], positions)
  own = np.asarray(whole)[:, ::4, 0] * train["outputs"].std(0) + train["outputs"].mean(0)
  np.testing.assert_allclose(found, own, atol=1e-4)


@pytest.mark.thorough
def test_answers_take_the_inputs_of_the_problem(config, folder):
  """Of a file with inputs and outputs, an inverse problem reads the outputs."""
  arrays = np.load(folder / "test.npz")
  found = {}
  for inverse in (False, True):
    config.data.inverse = inverse
    run = experiment.build(config)
    variables = jax.jit(run.task.init)(jax.random.key(0))
    answers = list(run.task.answer(variables, [str(folder / "test.npz")]))
    given = arrays["u" if inverse else "a"]
    wanted = run.task.predict(variables, {"inputs": given, "outputs": given}).outputs
    np.testing.assert_allclose([answer["output"] for answer in answers], wanted, atol=1e-5)
    found[inverse] = wanted
  assert not np.allclose(*found.values(), atol=1e-2)


def test_answers_of_the_inverse_problem_are_on_a_grid_of_the_domain(config, tmp_path):
  """As in training: output points start cells of one width, and end at a boundary if there is one."""
  config.data.update(inverse=True, output_step=4)
  run, files = experiment.build(config), [str(tmp_path / f"{n}.npz") for n in (12, 13)]
  for n, file in zip((12, 13), files):
    np.savez(file, u=waves(2, 1, n)[1])
  variables = jax.jit(run.task.init)(jax.random.key(0))
  answers = run.task.answer(variables, files)
  assert len(next(answers)["output"]) == 6
  with pytest.raises(UserError, match="13.npz: data.output_step"):
    next(answers)


@pytest.mark.thorough
def test_answers_need_the_run_alone(config, folder, tmp_path):
  """Its record has the training grid; --out writes arrays."""
  config.data.dir = str(tmp_path)
  for name in ("train.npz", "test.npz"):
    shutil.copy(folder / name, tmp_path)
  children.trained(config, tmp_path / "run")
  (tmp_path / "train.npz").unlink()
  (tmp_path / "test.npz").unlink()
  out, given = tmp_path / "answers.npz", str(folder / "test.npz")
  made = children.command(
    tmp_path / "out", "predict", f"--workdir={tmp_path}/run", f"--out={out}", given
  )
  assert made.code == 0, made.err
  shown = children.command(tmp_path / "json", "predict", f"--workdir={tmp_path}/run", given)
  answers = [json.loads(line) for line in shown.out.splitlines() if line.startswith("{")]
  found = np.load(out)
  assert found["output"].shape == (21, 64) and found["output"].dtype == np.float32
  assert found["path"].tolist() == [given] * 21 and found["function"].tolist() == list(range(21))
  np.testing.assert_allclose(found["output"], [answer["output"] for answer in answers])


@pytest.mark.parametrize("axes", ["bounded", "periodic"])
def test_files_may_have_other_ends_and_other_sides(config, tmp_path, axes):
  """One axis with its end points; two without, and of different lengths."""
  bounded = axes == "bounded"
  u = np.random.default_rng(0).normal(size=(9, 17) if bounded else (9, 16, 24))
  names = ("a", "u") if bounded else ("coeff", "sol")
  np.savez(tmp_path / "all.npz", **dict.fromkeys(names, np.float32(u)))
  config.data.update(dir=str(tmp_path), train_split="all.npz[:8]", test_split="all.npz[8:]")
  config.data.axes = axes
  if not bounded:
    config.model = config_lib.default("operator_learning", "fno_2d").model
    config.model.update(hidden_dim=4, modes=2, num_blocks=1, mlp_dim=4, padding=0)
  run = experiment.build(config)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  whole = run.datasets["train"].arrays()["inputs"]
  assert whole.shape[1:] == ((9,) if bounded else (8, 12))
  positions = np.asarray(run.task._positions(whole.shape[1:]))
  assert positions.max() == (1.0 if bounded else np.float32(11 / 12))
  found = np.asarray(run.task.predict(variables, {"inputs": whole, "outputs": whole}).outputs)
  errors = found - whole
  slopes = losses.slopes(errors, periodic=not bounded)
  assert [x.shape for x in slopes] == ([(8, 7)] if bounded else [(8, 8, 12)] * 2)
  side = 9 if bounded else (8 * 12) ** 0.5
  wanted = losses.relative_h1(errors, whole, not bounded) * np.sqrt(0.1 / side)
  wanted = np.mean(wanted + losses.relative_l2(errors, whole))
  loss = run.task._sums(found, whole)["loss"].value()
  np.testing.assert_allclose(loss, wanted, rtol=1e-5)


def test_the_test_grid_is_no_further_one(config, caplog):
  config.data.extra_test_steps = "2,1"
  with caplog.at_level("INFO", logger="mixer_jax"):
    assert set(experiment.build(config).datasets) == {"train", "test", "test_64"}
  assert "64 functions on 32 of 64 points (data.step=2), periodic" in caplog.text


@pytest.mark.parametrize("kind", ["none", "pointwise", "global"])
def test_a_finished_run_on_data_of_another_grid_keeps_its_operator(config, kind):
  """FNO's padding is in points of the training grid: another grid would be another function."""
  config.normalise, config.model.padding = kind, 5
  config.data.update(axes="bounded", step=3, extra_test_steps="1")
  run = experiment.build(config)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  config.data.update(step=1, extra_test_steps="")
  other = experiment.make(config, json.loads(json.dumps(run.task.notes())))
  shapes = lambda tree: jax.tree.map(jnp.shape, tree)
  assert shapes(other.variable_shapes) == shapes(variables)
  found, wanted = Evaluator(other, "test")(variables), Evaluator(run, "test_64")(variables)
  assert found.keys() == wanted.keys()
  for name, value in wanted.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5)
