"""The same training on any mesh, and with any number of steps a dispatch."""

import jax
import numpy as np
import pytest

from mixer_jax import checkpoint, evaluate, experiment, sharding, steps, train, workdir
from mixer_jax import config as config_lib

OPTIMIZERS = {
  "sgd": dict(learning_rate=0.1),
  "adam": dict(learning_rate=1e-2, eps=1e-2),  # or it scales up gradients of rounding errors
  "kfac": dict(learning_rate=0.05, factor_period=2, inverse_period=4, factor_decay=0.5),
}
STEPS = 20


@pytest.fixture
def config(tiny_config, monkeypatch):
  """12 steps an epoch, of batches that 8 devices divide; all parameters can be split."""
  monkeypatch.setattr(sharding, "_SPLIT_FROM", 1)
  tiny_config.batch_size = 24
  tiny_config.data.pad = 0
  tiny_config.data.train_split = "train[:240]"
  return tiny_config


def trained(config):
  """The state after 20 steps, and the metrics of the second epoch."""
  run = experiment.build(config)
  state, trainer = steps.init_state(run), steps.EpochTrainer(run)
  for epoch in (1, 2):
    state, metrics, _ = trainer(state, epoch)
  assert state.step == STEPS
  return state, metrics


def assert_same(one, other, rtol=2e-3, atol=2e-4):
  (a, a_metrics), (b, b_metrics) = one, other
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)
  jax.tree.map(close, a.params, b.params)
  close(a_metrics["loss"], b_metrics["loss"])


@pytest.mark.parametrize("name", ["sgd", pytest.param("adam", marks=pytest.mark.slow), "kfac"])
def test_any_mesh_makes_the_same_steps(name, config):
  config.optimizer = config_lib.optimizer(name, **OPTIMIZERS[name])
  one = trained(config)
  for data, model in ((8, 1), (2, 4)):
    config.mesh.data, config.mesh.model = data, model
    assert_same(trained(config), one)


def test_many_steps_a_dispatch_are_the_same_steps(config):
  config.optimizer = config_lib.optimizer("sgd", **OPTIMIZERS["sgd"])
  one = trained(config)
  config.steps_per_dispatch = 5
  assert_same(trained(config), one)


@pytest.mark.parametrize("name", ["adam", "kfac"])
def test_the_model_axis_splits_parameters_and_optimizer_state(name, config):
  config.optimizer = config_lib.optimizer(name, **OPTIMIZERS[name])
  config.mesh.data, config.mesh.model = 2, 4
  state = steps.init_state(experiment.build(config))

  def bytes_on_a_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

  def divisible(x):
    return any(size % 4 == 0 for size in x.shape)

  for tree in (state.params, state.opt_state):
    leaves = jax.tree.leaves(tree)
    expected = sum(x.nbytes // (4 if divisible(x) else 1) for x in leaves)
    assert bytes_on_a_device(tree) == expected
  # The odd sizes are those of K-FAC's factors of layers with a bias, and of the head.
  assert bytes_on_a_device(state.params) < 0.3 * sum(
    x.nbytes for x in jax.tree.leaves(state.params)
  )


@pytest.mark.parametrize("meshes", [((2, 4), (1, 1)), ((1, 1), (4, 2)), ((8, 1), (2, 2))], ids=str)
def test_a_run_goes_on_on_other_devices(meshes, config, tmp_path):
  config.optimizer = config_lib.optimizer("adam", **OPTIMIZERS["adam"])
  before, after = meshes
  config.num_epochs = 1
  config.schedule.name = "constant"
  config.mesh.data, config.mesh.model = before
  train.train(config, str(tmp_path))
  [first] = workdir.read_metrics(tmp_path)
  stored = checkpoint.Checkpoints(tmp_path, read_only=True)
  saved = stored.restore_arrays(10)

  config.mesh.data, config.mesh.model = after
  run = experiment.build(config)
  shapes = steps.state_shapes(run)
  restored, _, _ = stored.restore(10, shapes.params, train._without_params(shapes))
  jax.tree.map(np.testing.assert_array_equal, restored, saved)
  assert all(
    x.sharding == s.sharding for x, s in zip(*map(jax.tree.leaves, (restored, shapes.params)))
  )
  metrics = evaluate.Evaluator(run)(restored)
  assert metrics["top1"] == first["test/top1"]
  assert metrics["loss"] == pytest.approx(first["test/loss"], rel=1e-5)
