"""Operators learned from files: exact metrics, noise, grids, K-FAC's view, the commands."""

import contextlib
import dataclasses
import itertools
import json
import shutil

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment, models
from mixer_jax.errors import UserError
from mixer_jax.optim import kfac_blocks
from mixer_jax.pde import generate
from mixer_jax.rundir import metrics_file
from mixer_jax.tasks.operator_learning import functions, losses, pictures
from mixer_jax.tasks.operator_learning.task import OperatorLearning
from mixer_jax.training import restore
from mixer_jax.training.evaluator import Evaluator
from tests import children


def waves(seed, number, points):
  """Random waves on the circle and the same, shifted by a quarter and doubled."""
  rng = np.random.default_rng(seed)
  x, k = np.arange(points) / points, np.arange(1, 4)
  size, shift = rng.normal(size=(2, number, 3, 1))
  wave = lambda x: (size * np.sin(2 * np.pi * k[:, None] * x + shift)).sum(1)
  return wave(x).astype(np.float32), 2 * wave(x + 0.25).astype(np.float32)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("functions")
  for name, seed, number in (("train", 0, 64), ("test", 1, 21)):
    a, u = waves(seed, number, 64)
    np.savez(path / f"{name}.npz", a=a, u=u)
    coeff = np.broadcast_to(np.where(a > 0, 12, 3)[:, :17, None], (number, 17, 17))
    sol = np.broadcast_to(u[:, None, :17], (number, 17, 17))
    np.savez(path / f"{name}_2d.npz", coeff=np.float32(coeff), sol=np.float32(sol))
  u[3] = 0
  np.savez(path / "rest.npz", a=a, u=u)
  return path


@pytest.fixture
def config(folder):
  config = config_lib.default("operator_learning", "fno_1d")
  config.update(batch_size=8, eval_batch_size=8, num_epochs=2, h1=0.1)
  config.mesh.data = 1
  config.model.update(hidden_dim=8, modes=4, num_blocks=2, mlp_dim=8)
  config.data.update(name="files", dir=str(folder), train_split="train.npz", step=2)
  config.data.update(test_split="test.npz")
  config.optimizer = config_lib.optimizer("adam", 1e-2)
  return config


@pytest.mark.thorough
def test_metrics_are_numpys_for_any_batch_devices_and_grid(config):
  config.data.extra_test_steps = "1"
  config.normalise = "pointwise"
  found = {}
  for batch, devices in ((1, 1), (8, 2), (21, 8)):
    config.eval_batch_size, config.mesh.data = batch, devices
    run = experiment.build(config)
    variables = jax.jit(run.task.init)(jax.random.key(0))
    found[batch] = {s: Evaluator(run, s)(variables) for s in ("test", "test_64")}
  for split in found[1]:
    arrays = run.datasets[split].arrays()
    answer = np.float64(run.task.predict(variables, arrays).outputs)
    wanted = np.float64(arrays["outputs"])
    of = lambda x: np.sqrt(np.square(x).mean(1))
    relative = of(answer - wanted) / of(wanted)
    np.testing.assert_allclose(pictures.errors(wanted, answer), relative)
    slope = lambda x: np.roll(x, -1, 1) - np.roll(x, 1, 1)
    slopes = of(slope(answer - wanted)) / of(slope(wanted))
    loss = relative + np.sqrt(0.1 / wanted.shape[1]) * slopes
    expected = dict(relative_l2=relative.mean(), worst=relative.max(), loss=loss.mean())
    for metrics in found.values():
      for name, value in expected.items():
        np.testing.assert_allclose(metrics[split][name], value, rtol=2e-5)


@pytest.mark.thorough
def test_squares_are_the_squares_of_the_relative_errors(config):
  config.update(loss="square", h1=0.0)
  run = experiment.build(config)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  arrays = {name: x[:8] for name, x in run.datasets["train"].arrays().items()}
  loss = run.task.loss(variables, arrays, jax.random.key(0))[0].value()
  errors = pictures.errors(arrays["outputs"], run.task.predict(variables, arrays).outputs)
  np.testing.assert_allclose(loss, np.mean(errors**2), rtol=1e-5)


@pytest.mark.parametrize("form", ["norm", "square"])
@pytest.mark.first(1)
def test_kfac_sees_the_gradient_of_the_loss(config, form):
  """Squares of its outputs, as a mean over rows, have the gradient of either loss."""
  config.update(loss=form, h1=0.0)
  run = experiment.build(config)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  batch = {name: jnp.asarray(x[:8]) for name, x in run.datasets["train"].arrays().items()}
  predict, _ = run.task.curvature_view()

  def seen(params):
    outputs, targets, *_ = predict({"params": params}, batch)
    return jnp.mean(jnp.square(outputs - jax.lax.stop_gradient(targets)))

  def loss(params):
    return run.task.loss({"params": params}, batch, jax.random.key(0))[0].value()

  own, others = (jax.jit(jax.grad(f))(variables["params"]) for f in (loss, seen))
  for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(others)):
    np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(a).max() + 1e-7)
  kinds = {b.kind for b in kfac_blocks(predict, variables, batch, likelihood="normal")}
  assert kinds == {"kronecker"}


def test_noise_is_the_same_in_every_epoch_and_batch(config):
  config.data.noise = 0.1
  run = experiment.build(config)
  arrays = run.datasets["train"].arrays()
  prepare = lambda key, ids, train: run.task.prepare(
    jax.random.key(key), {name: jnp.asarray(x[ids]) for name, x in arrays.items()}, train=train
  )
  first = prepare(0, np.arange(64), True)["inputs"]
  again = prepare(1, np.array([5, 3, 60]), False)["inputs"]
  np.testing.assert_array_equal(again, first[np.array([5, 3, 60])])
  noise = (first - arrays["inputs"]) / arrays["inputs"].std(0)
  assert abs(noise.std() - 0.1) < 0.005 and abs(noise.mean()) < 0.01
  test = run.task.prepare(None, run.datasets["test"].arrays(), train=False)["inputs"]
  assert not np.allclose(
    test - run.datasets["test"].arrays()["inputs"], (first - arrays["inputs"])[:21]
  )


def test_noise_does_not_depend_on_the_other_splits(config):
  config.data.noise = 0.1
  noisy = lambda run, name: run.task.prepare(None, run.datasets[name].arrays(), train=False)
  run = experiment.build(config)
  config.data.update(train_split="train.npz[4:12]", extra_test_steps="1")
  fewer = experiment.build(config)
  spread = [r.datasets["train"].arrays()["inputs"].std(0) for r in (run, fewer)]
  for name, rows in (("test", slice(None)), ("train", slice(4, 12))):
    drawn = [
      (noisy(r, name)["inputs"] - r.datasets[name].arrays()["inputs"]) / s
      for r, s in zip((run, fewer), spread)
    ]
    np.testing.assert_allclose(drawn[0][rows], drawn[1], atol=1e-5)
  assert set(fewer.datasets) == {"train", "test", "test_64"}


@pytest.mark.thorough
def test_a_killed_run_with_noise_and_averages_goes_on_bit_for_bit(config, tmp_path):
  config.update(num_steps=12, eval_steps=6, checkpoint_steps=6, ema_decay=0.9)
  config.normalise, config.data.noise = "pointwise", 0.1
  children.trained(config, tmp_path / "whole")
  stopped = children.Child(config, tmp_path / "parts", children.signal_at, (8,))
  assert stopped.wait() == 143, stopped.err
  children.trained(config, tmp_path / "parts")
  children.assert_same_run(config, tmp_path / "whole", tmp_path / "parts")


def test_the_inverse_problem_has_means_over_cells(folder):
  data = functions.FunctionData(name="files", dir=str(folder), step=2, output_step=4, inverse=True)
  data = dataclasses.replace(data, train_split="train_2d.npz", test_split="test_2d.npz")
  data.check()
  arrays = functions.load(data)["test"].arrays()
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
def test_answers_take_the_inputs_of_the_problem(config, folder, tmp_path):
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
  np.savez(tmp_path / "one.npz", u=arrays["u"][0])
  with pytest.raises(UserError, match=r"one.npz: has 'u' \[64\]; inputs and outputs are \[fun"):
    list(run.task.answer(variables, [str(tmp_path / "one.npz")]))


def test_answers_of_the_inverse_problem_are_on_a_grid_of_the_domain(config, tmp_path):
  """As in training: output points start cells of one width, and end at a boundary if there is one."""
  config.data.update(inverse=True, output_step=4)
  run, files = experiment.build(config), [str(tmp_path / f"{n}.npz") for n in (12, 13)]
  for n, file in zip((12, 13), files):
    np.savez(file, u=waves(2, 1, n)[1])
  variables = jax.jit(run.task.init)(jax.random.key(0))
  answers = run.task.answer(variables, files)
  assert len(next(answers)["output"]) == 6
  told = "13.npz: has functions on 13 points; allowed on each axis: 4, 6, 8, ..., since data.output"
  with pytest.raises(UserError, match=f"{told}_step, 4, is 2 times data.step$"):
    next(answers)
  config.model = config_lib.default("operator_learning", "mixer_operator").model
  config.model.update(hidden_dim=8, num_blocks=1, modes=4)
  config.data.update(train_split="train_2d.npz", test_split="test_2d.npz", output_step=8)
  np.savez(files[0], sol=np.ones((1, 9, 12), np.float32))
  with pytest.raises(UserError, match="has functions on 9x12 points; allowed .*: 9, 13, 17, ..."):
    next(experiment.build(config).task.answer({}, files))


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


@pytest.mark.thorough
def test_an_exported_file_has_all_that_the_answer_needs(config, tmp_path):
  config.normalise = "pointwise"
  run = experiment.build(config)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  run.task.export(variables, tmp_path / "weights.npz")
  tree = traverse_util.unflatten_dict(dict(np.load(tmp_path / "weights.npz")), sep="/")
  statistics = tree.pop("normaliser")
  inputs, outputs = statistics["inputs"], statistics["outputs"]
  arrays = run.datasets["test"].arrays()
  x = np.arange(32, dtype=np.float32)[:, None] / 32
  values = (arrays["inputs"] - inputs["mean"]) / inputs["std"]
  found = run.task.model.apply({"params": tree}, values[..., None], x)[..., 0]
  found = found * outputs["std"] + outputs["mean"]
  np.testing.assert_allclose(found, run.task.predict(variables, arrays).outputs, atol=1e-5)


MADE = dict(dir="", train_split="train", test_split="test")


@pytest.mark.parametrize(
  "fields, told",
  [
    (dict(step=3), "data.step=3 leaves no grid of 64 points; allowed: 1, 2, 4"),
    (
      dict(step=4, output_step=12, inverse=True),
      "data.output_step=12 leaves no grid of 64 points; allowed: 4, 8",
    ),
    (
      dict(viscosity=0.2),
      "data.viscosity is 0.2, which data.name='files' does not read; 'burgers'",
    ),
    (
      MADE | dict(name="burgers", high=5.0),
      "data.high is 5.0, which data.name='burgers' does not read",
    ),
    (
      MADE | dict(name="darcy", axes="bounded"),
      "data.axes is 'bounded', which data.name='darcy' does",
    ),
    (
      MADE | dict(name="burgers", dir="files"),
      "data.dir is 'files', which data.name='burgers' does not read; 'files' would",
    ),
    (dict(output_step=4), "data.output_step needs data.inverse=True"),
    (dict(step=4, output_step=6, inverse=True), "data.output_step is 6; allowed: a multiple of"),
    (dict(extra_test_steps="4,x"), "data.extra_test_steps is '4,x'"),
    (dict(extra_test_steps="4,04"), "data.extra_test_steps is '4,04'; allowed: different steps"),
    (dict(train_split=""), "data.train_split='': not a split"),
    (dict(name="burgers", train_split="valid"), "burgers has no split 'valid'; allowed: train"),
    (dict(train_split="absent.npz"), "absent.npz: no such file"),
    (dict(dir="/nowhere"), "/nowhere/train.npz: there is no folder /nowhere"),
    (
      dict(train_split="train"),
      "data.name is 'files', but a split is 'train'; data.train_split and",
    ),
    (dict(validation_split="train.npz[:8]"), "shares examples of 'train.npz'"),
    (
      dict(test_split="test_2d.npz"),
      "functions of test have another number of axes: 2, those of train 1",
    ),
    (
      dict(train_split="train.npz[:8]+train_2d.npz"),
      "train_2d.npz has functions on 17x17 points, train.npz on 64; allowed: parts of a split on",
    ),
    (dict(test_split="rest.npz"), "outputs of test: function 3 is 0 at all points"),
  ],
)
def test_mistakes_in_the_data_are_one_line(config, fields, told):
  config.data.update(fields)
  with pytest.raises(UserError) as e:
    experiment.build(config)
  assert told in str(e.value) and "\n" not in str(e.value)


def test_a_test_set_that_is_trained_on_is_told(config, caplog):
  config.data.update(train_split="train.npz[:60]", test_split="train.npz[50:]")
  _ = experiment.build(config).datasets
  assert "test set test (train.npz[50:]) shares examples of 'train.npz'" in caplog.text


@pytest.mark.parametrize("offset, told", [(101325.0, True), (300.0, False)])
def test_functions_that_float32_cannot_hold_are_told(config, tmp_path, caplog, offset, told):
  u = offset + 1e-2 * np.float64(waves(0, 16, 64)[0])
  for name in ("train", "test"):
    np.savez(tmp_path / f"{name}.npz", a=u, u=np.full_like(u, 0.1))
  config.data.dir = str(tmp_path)
  experiment.build(config)
  found = [text for text in caplog.messages if "subtract their mean" in text]
  assert [text[:40] for text in found] == (
    ["inputs of train.npz: float32 rounds by u", "inputs of test.npz: float32 rounds by up"]
    if told
    else []
  )


def test_the_test_grid_is_no_further_one(config, caplog):
  config.data.extra_test_steps = "2,1"
  with caplog.at_level("INFO", logger="mixer_jax"):
    assert set(experiment.build(config).datasets) == {"train", "test", "test_64"}
  assert "64 functions on 32 of 64 points (data.step=2), periodic" in caplog.text


@pytest.mark.parametrize("normalise", ["none", "global", "pointwise"])
@pytest.mark.parametrize("edge, refused", [("0", False), ("same", False), ("varies", True)])
def test_a_boundary_of_zeros_is_refused_where_outputs_vary(
  config, tmp_path, normalise, edge, refused
):
  rng = np.random.default_rng(0)
  functions = {name: rng.normal(size=(16, 9, 9)).astype(np.float32) for name in ("coeff", "sol")}
  if edge != "varies":
    for axis in (1, 2):
      ends = np.moveaxis(functions["sol"], axis, 0)
      ends[0] = ends[-1] = 0 if edge == "0" else 3
    refused = normalise == "global" or (normalise == "none" and edge == "same")
  np.savez(tmp_path / "f.npz", **functions)
  config.normalise = normalise
  config.data.update(dir=str(tmp_path), train_split="f.npz[:12]", test_split="f.npz[12:]", step=1)
  config.model = config_lib.default("operator_learning", "fno_2d").model
  config.model.update(hidden_dim=4, modes=2, num_blocks=1, dirichlet=True)
  told = "model.dirichlet=True keeps outputs at .* on the boundary"
  with pytest.raises(UserError, match=told) if refused else contextlib.nullcontext():
    _ = experiment.build(config).variable_shapes


def test_too_many_modes_are_one_line(config):
  config.model.modes = 40
  told = "model.modes is 40, which needs a grid of 78 points; .* the grid is that of data.step=2"
  with pytest.raises(UserError, match=told):
    _ = experiment.build(config).variable_shapes


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("model, axes", [("fno_2d", 1), ("galerkin_1d", 2), ("gmlp_operator", 0)])
def test_a_model_for_other_axes_is_refused(config, model, axes, made, monkeypatch):
  """Before functions are made, and of files when they have been read."""
  config.model = config_lib.default("operator_learning", model).model
  two = axes == 2
  if made:
    config.data.update(MADE | dict(name="darcy" if two else "burgers", step=1))
    monkeypatch.setattr(generate, "load", None)
  elif two:
    config.data.update(train_split="train_2d.npz", test_split="test_2d.npz", step=1)
  told = (
    "'fno_2d', for functions of 2 axes, but those of the data have 1 axis; allowed: galerkin_1d"
  )
  if two:
    told = "'galerkin_1d', for functions of 1 axis, but .* have 2 axes; allowed: galerkin_2d, gal"
  refused = pytest.raises(UserError, match=f"^model.name is {told}.*, mixer_operator")
  with refused if axes else contextlib.nullcontext():
    run = experiment.build(config) if not made else OperatorLearning.check(config)
    _ = made or run.task.model


@pytest.mark.parametrize(
  "model, fields, told",
  [
    ("fno_2d", {}, "model.padding is 9, for domains with ends, but the axes of the data are peri"),
    (
      "galerkin_2d",
      dict(coarse=8, modes=4, dirichlet=False),
      "model.extractor is 'cnn', .* allowed: 'lin",
    ),
    ("galerkin_2d", dict(coarse=8, modes=4), "model.dirichlet is True, .* allowed: False"),
  ],
)
def test_a_model_for_domains_with_ends_is_refused_on_periodic_axes(config, model, fields, told):
  config.model = config_lib.default("operator_learning", model).model
  config.model.update(fields)
  config.data.update(train_split="train_2d.npz", test_split="test_2d.npz", step=1, axes="periodic")
  with pytest.raises(UserError, match=told):
    _ = experiment.build(config).task.model


@pytest.mark.parametrize(
  "name, fields, told",
  [
    ("burgers", dict(points=12), "data.points is 12; allowed: 16 to 65536"),
    ("darcy", dict(step=11), "data.step=11 leaves no grid of 421 points; allowed: 1, 2, 3, 4, 5"),
    ("darcy", dict(step=5, extra_test_steps="4,13"), "data.extra_test_steps=13 leaves no grid of"),
    ("darcy", dict(step=5, inverse=True, output_step=25), "output_step=25 .* allowed: 5, 10, 15"),
    ("darcy", dict(step=35), "model.modes is 12, which needs a grid of 24x22 points; it has 13x13"),
    ("burgers", dict(step=512), "model.modes is 12, which needs a grid of 22 points; it has 16"),
  ],
)
def test_grids_of_generated_functions_are_checked_before_they_are_made(config, name, fields, told):
  config.model = config_lib.default("operator_learning", f"fno_{1 + (name == 'darcy')}d").model
  config.model.modes = 12
  if name == "darcy":
    config.model.padding = 0
  config.data.update(MADE | dict(name=name) | fields)
  with pytest.raises(UserError, match=told):
    OperatorLearning.check(config)


def test_a_grid_that_the_model_cannot_take_is_told_before_training(config):
  config.model = config_lib.default("operator_learning", "mixer_operator").model
  config.model.update(hidden_dim=8, num_blocks=1, modes=4)
  config.data.extra_test_steps = "4"
  told = r"cannot take the grid of test_16 .data.extra_test_steps.: trained on 32 points, called with 16; allowed: 32"
  with pytest.raises(UserError, match=told):
    _ = experiment.build(config).variable_shapes


@pytest.mark.parametrize(
  "name, scan, grid",
  [("galerkin_1d", True, (32,)), ("galerkin_2d", False, (7, 7)), ("galerkin_2d", False, (17, 9))],
)
@pytest.mark.thorough
def test_columns_of_attention_are_functions_on_its_grid(config, tmp_path, name, scan, grid):
  """Queries of the first block by NumPy from its inputs; keys and values are normalised."""
  config.model = config_lib.default("operator_learning", name).model
  config.model.update(hidden_dim=8, num_heads=2, num_blocks=2, ffn_dim=8, scan_blocks=scan)
  config.model.update(modes=4, decoder_dim=4, decoder_mlp_dim=4)
  config.normalise = "global"
  if grid == (7, 7):
    config.model.update(coarse=7, dirichlet=False)
    config.data.update(train_split="train_2d.npz", test_split="test_2d.npz", step=1)
  elif name == "galerkin_2d":
    config.model.update(extractor="linear", dirichlet=False)
    u = np.float32(np.random.default_rng(0).normal(size=(16, *grid)))
    np.savez(tmp_path / "all.npz", coeff=u, sol=u)
    config.data.update(train_split="all.npz[:8]", test_split="all.npz[8:]", step=1)
    config.data.dir = str(tmp_path)
  run = experiment.build(config)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  examples = {name: array[:3] for name, array in run.datasets["test"].arrays().items()}
  found = run.task.attended(variables, examples)
  assert list(found) == ["GalerkinBlock_0", "GalerkinBlock_1"]
  for part in found.values():
    assert {array.shape for array in part.values()} == {(3, *grid, 2, 4)}
    for normed in (part["keys"], part["values"]):
      np.testing.assert_allclose(normed.mean(-1), 0, atol=1e-5)
      assert normed.std() > 0.5
  if scan:
    params = models.unrolled(variables["params"])
    dense = lambda x, p: x @ np.float64(p["kernel"]) + p["bias"]
    inputs = run.datasets["train"].arrays()["inputs"]
    values = (examples["inputs"] - inputs.mean()) / inputs.std()
    stem = dense(values[..., None], params["stem"])
    queries = dense(stem, params["GalerkinBlock_0"]["attention"]["q"]).reshape(3, 32, 2, 4)
    np.testing.assert_allclose(found["GalerkinBlock_0"]["queries"], queries, atol=1e-5)
  drawn = run.task.pictures(variables, run.datasets["test"])
  assert set(drawn) == {"functions", "errors", "attention"}
  assert len(drawn["attention"].axes) == 2 * 3 * (1 if scan else 2)


@pytest.mark.parametrize("kind", ["none", "pointwise", "global"])
def test_a_finished_run_on_data_of_another_grid_keeps_its_operator(config, kind):
  """FNO's padding is in points of the training grid: another grid would be another function."""
  config.normalise, config.model.padding = kind, 5
  config.data.update(axes="bounded", step=3, extra_test_steps="1")
  run = experiment.build(config)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  config.data.update(step=1, extra_test_steps="")
  other = experiment.build(config, json.loads(json.dumps(run.task.notes())))
  shapes = lambda tree: jax.tree.map(jnp.shape, tree)
  assert shapes(other.variable_shapes) == shapes(variables)
  found, wanted = Evaluator(other, "test")(variables), Evaluator(run, "test_64")(variables)
  assert found.keys() == wanted.keys()
  for name, value in wanted.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5)


@pytest.mark.thorough
def test_a_run_through_the_commands(config, folder, tmp_path):
  """Trained with K-FAC's eigenbasis, evaluated on two grids, asked for a function, drawn."""
  config.data.extra_test_steps = "1"
  config.optimizer = config_lib.optimizer("kfac_adam", 1e-2, factor_period=2)
  config.schedule.update(name="onecycle")
  config.num_epochs = 8
  children.trained(config, tmp_path / "run")
  found = restore.restore(str(tmp_path / "run"))
  last = metrics_file.read(tmp_path / "run")[-1]
  assert last["test/relative_l2"] < 0.5 and last["test_64/relative_l2"] < 0.5
  finer = restore.restore(str(tmp_path / "run"), step=1, extra_test_steps="")
  again = Evaluator(finer.run, "test")(finer.variables)["relative_l2"]
  np.testing.assert_allclose(again, last["test_64/relative_l2"], rtol=1e-5)
  a, u = waves(1, 21, 64)
  np.savez(tmp_path / "mine.npz", a=a[:2, ::2])
  asked = children.command(
    tmp_path / "log", "predict", f"--workdir={tmp_path / 'run'}", str(tmp_path / "mine.npz")
  )
  answers = [json.loads(line) for line in asked.out.splitlines() if line.startswith("{")]
  run, variables, step = found
  assert run.clock.epoch(step) == last["epoch"] == 8
  direct = run.task.predict(variables, {"inputs": a[:2, ::2], "outputs": u[:2, ::2]}).outputs
  np.testing.assert_allclose([x["output"] for x in answers], direct, atol=1e-5)
  drawn = run.task.pictures(variables, run.datasets["test_64"])
  assert set(drawn) == {"functions", "errors"}


def test_functions_are_drawn_from_the_least_to_the_largest_error():
  order = np.random.default_rng(0).permutation(10)
  outputs = np.ones((10, 8))
  found = outputs * (1 + (1 + order[:, None]) / 100)
  drawn = pictures.draw(outputs, outputs, found, periodic=True)["functions"]
  titles = [a.get_title() for a in drawn.axes if a.get_title()]
  assert titles == [f"relative L2 error {e:.1e}" for e in (0.01, 0.04, 0.07, 0.1)]
