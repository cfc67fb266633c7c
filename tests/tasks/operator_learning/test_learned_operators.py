"""Operators learned from files: exact metrics, noise, K-FAC's view, pictures, the commands."""

import json

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mixer_jax
from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment, models, optim
from mixer_jax.rundir import metrics_file
from mixer_jax.tasks.operator_learning import pictures
from mixer_jax.training import loop, restore
from mixer_jax.training.evaluator import Evaluator
from tests import children
from tests.tasks import runs
from tests.tasks.operator_learning.functions_on_a_circle import waves


@pytest.mark.thorough
def test_settings_of_jax_change_no_noise(config):
  config.data.noise = 0.3
  runs.assert_settings_change_no_draw(config)


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
  predict = run.task.curvature_view()

  def seen(params):
    outputs, targets, *_ = predict({"params": params}, batch)
    return jnp.mean(jnp.square(outputs - jax.lax.stop_gradient(targets)))

  def loss(params):
    return run.task.loss({"params": params}, batch, jax.random.key(0))[0].value()

  own, others = (jax.jit(jax.grad(f))(variables["params"]) for f in (loss, seen))
  for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(others)):
    np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(a).max() + 1e-7)
  curvature = optim.Curvature(predict, variables, batch, likelihood="normal")
  kinds = {b.kind for b in curvature.blocks}
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
  alike = np.corrcoef(noise.reshape(64, -1))[~np.eye(64, dtype=bool)]
  assert np.abs(alike).mean() < 0.3  # each function has its own
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
  runs.assert_kill_changes_nothing(config, tmp_path, 8)


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


def test_a_finished_run_is_tested_on_another_file(config, folder, tmp_path):
  """Of the same points, and of twice as many; by the answers that the run gives to the files."""
  config.update(num_epochs=1, normalise="global")
  loop.train(config, str(tmp_path / "run"))
  for points in (64, 128):
    a, u = waves(7, 9, points)
    np.savez(tmp_path / f"other{points}.npz", a=a, u=u)
    np.savez(tmp_path / "seen.npz", a=a[:, ::2], u=u[:, ::2])
    answers = mixer_jax.load_run(str(tmp_path / "run")).answer([str(tmp_path / "seen.npz")])
    answers = np.float64([answer["output"] for answer in answers])
    wanted = np.float64(u[:, ::2])
    relative = np.linalg.norm(answers - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    place = f"other={tmp_path}/other{points}.npz"
    found = evaluate.evaluate(str(tmp_path / "run"), split="other", test_sets=place)["other"]
    expected = relative.mean(), relative.max()
    assert (found["relative_l2"], found["worst"]) == pytest.approx(expected, rel=1e-5)
