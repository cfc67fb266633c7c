"""Runs of a model with batch normalisation: its statistics in the state, over parts and devices."""

import jax
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment, export, pretrained, tasks
from mixer_jax.rundir import metrics_file
from mixer_jax.training import loop, restore
from mixer_jax.training.state import init_state
from mixer_jax.training.step import step_keys, update
from tests import children


@pytest.fixture
def config(tiny_config):
  tiny_config.model = config_lib.model("resnet_20", stages=(1,), width=4)
  tiny_config.optimizer = config_lib.optimizer("sgd", learning_rate=0.05)
  tiny_config.data.pad = 0
  return tiny_config


def after(config, steps):
  """The variables after some steps, and the batches that the steps saw."""
  run = experiment.build(config)
  state, step, batches = init_state(run), jax.jit(lambda *args: _step(run, *args)), []
  arrays = run.datasets["train"].arrays()
  for i in range(steps):
    examples = jax.tree.map(lambda x: x[run.order(i)], arrays)
    state, batch = step(state, examples)
    batches.append(jax.device_get(batch))
  return run, jax.device_get(state.variables), batches


def _step(run, state, examples):
  batch = run.task.prepare(step_keys(state)[0], examples, train=True)
  return update(run, state, batch)[0], batch


def first_moments(variables, images):
  """Mean and variance of the outputs of the stem, float64."""
  kernel = np.asarray(variables["params"]["stem"]["kernel"], float)
  x = np.pad(np.asarray(images, float), ((0, 0), (1, 1), (1, 1), (0, 0)))
  windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))
  y = np.einsum("bhwcyx,yxcf->bhwf", windows, kernel)
  return {"mean": y.mean((0, 1, 2)), "var": y.var((0, 1, 2))}


@pytest.mark.parametrize("parts, devices", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.first(1)
def test_averages_are_those_of_numpy(config, parts, devices):
  """Each part of a batch counts alone, all devices together; averages of averages are evaluated."""
  config.update(accum_steps=parts, ema_decay=0.75)
  config.mesh.data = devices
  config.optimizer.learning_rate = 0.0
  _run, variables, batches = after(config, 2)
  average = {"mean": np.zeros(4), "var": np.ones(4)}
  smooth = dict(average)
  for batch in batches:
    for part in range(parts):
      found = first_moments(variables, batch["image"][part::parts])
      average = {k: 0.9 * average[k] + 0.1 * found[k] for k in average}
    smooth = {k: 0.75 * smooth[k] + 0.25 * average[k] for k in average}
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, variables["batch_stats"]["stem_norm"], average)
  jax.tree.map(close, variables["average_batch_stats"]["stem_norm"], smooth)


@pytest.mark.thorough
def test_a_run_resumes_bit_for_bit(config, tmp_path):
  config.update(accum_steps=2, ema_decay=0.9)
  config.mesh.data = 2
  children.trained(config, tmp_path / "whole")
  stopped = children.Child(config, tmp_path / "parts", children.signal_at, (5,))
  assert stopped.wait() == 143, stopped.err
  children.trained(config, tmp_path / "parts")
  children.assert_same_run(config, tmp_path / "whole", tmp_path / "parts")
  row = metrics_file.read(tmp_path / "whole")[-1]
  found = evaluate.evaluate(str(tmp_path / "whole"))["test"]
  assert found["top1"] == row["test/top1"]


@pytest.mark.thorough
def test_it_learns_with_kfac_and_its_weights_start_another_run(config, tmp_path):
  config.optimizer = config_lib.optimizer("kfac", learning_rate=0.1, damping=0.1, inverse_period=4)
  config.num_epochs = 6
  directory = loop.train(config, str(tmp_path / "run"))
  rows = metrics_file.read(directory)
  assert rows[-1]["train/loss"] < 0.6 * rows[0]["train/loss"]
  _, variables = restore.load_run(str(directory))
  file = export.export(str(directory), "latest", str(tmp_path / "w.npz"))
  config.pretrained = str(file)
  task = tasks.find(config.task)(type(experiment.build(config).task).complete(config))
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  jax.tree.map(np.testing.assert_array_equal, task.initial(shapes, None), dict(variables))
  assert pretrained.read(str(file)).num_tokens == 0


@pytest.mark.thorough
def test_weight_decay_leaves_norms_and_biases_out(config):
  config.optimizer = config_lib.optimizer("adamw", learning_rate=0.1, weight_decay=0.5, eps=1.0)
  config.data.flip = False
  run = experiment.build(config)
  params = init_state(run).params
  ones = jax.tree.map(np.ones_like, jax.device_get(params))
  tx = run.optimizer
  zeros = jax.tree.map(np.zeros_like, ones)
  updates, _ = tx.update(zeros, tx.init(ones), ones)
  for path, change in jax.tree_util.tree_leaves_with_path(updates):
    kernel = path[-1].key == "kernel"
    np.testing.assert_allclose(change, -0.05 if kernel else 0.0, rtol=1e-5, atol=1e-7)
