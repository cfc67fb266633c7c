"""Training and evaluating on a stream: the same numbers as on a resident set."""

import os
import sys

import jax
import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.training.evaluator import Evaluator
from mixer_jax.training.state import init_state
from mixer_jax.training.trainer import Trainer
from tests import children
from tests.environment import OLDER_LOOPS


@pytest.fixture
def sample_config(tiny_config, tmp_path):
  """A stem and a head on 96 + 50 images of the bundled sample, a TFDS directory."""
  config = tiny_config
  config.num_epochs, config.model.num_blocks, config.model.patch_size = 1, 0, 8
  config.data = config_lib.data("sample")
  splits = dict(train_split="train[:96]", test_split="test[:50]")
  config.data.update(cache_dir=str(tmp_path / "cache"), workers=0, **splits)
  return config


def trained(config, stop=lambda step: False):
  """An epoch, with stops between steps and a new feed after each."""
  run = experiment.build(config)
  trainer = Trainer(run, init_state(run))
  trainer.advance(lambda: stop(trainer.step))
  while trainer.step < run.clock.num_steps:
    trainer = Trainer(run, trainer.state)
    trainer.advance()
  row = trainer.report()
  return run, trainer.state, {k: v for k, v in row.items() if k.startswith("train/")}


def assert_equal(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def resident_and_streamed(config, path):
  """In a process: states, metrics and tests of both; a worker has the path of modules, too.

  Programs that differ in their input round alike with the loops that XLA emits by default.
  """
  os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(OLDER_LOOPS, "")
  run, state, metrics = trained(config)
  arrays = lambda state: jax.tree.map(np.asarray, (state.variables, state.opt_state))
  resident = arrays(state), metrics, Evaluator(run)(state.variables)
  sys.path.insert(0, path)
  config.data.update(stream="always", workers=1)
  run, streamed, metrics = trained(config)
  assert run.datasets["train"].arrays() is None
  tested = Evaluator(run)(state.variables)
  return resident, (arrays(streamed), metrics, tested)


@pytest.mark.thorough
def test_a_stream_trains_and_tests_as_a_resident_set(sample_config, tmp_path):
  (tmp_path / "tensorflow").mkdir()  # importing it ends a process
  (tmp_path / "tensorflow" / "__init__.py").write_text("import os; os._exit(77)")
  log = tmp_path / "log"
  resident, streamed = children.called(log, resident_and_streamed, sample_config, str(tmp_path))
  assert_equal(resident, streamed)


@pytest.mark.thorough
def test_eight_devices_test_each_streamed_image_once(sample_config):
  run = experiment.build(sample_config)
  variables = jax.tree.map(lambda x: x + 0.05, jax.jit(run.task.init)(jax.random.key(0)))
  resident = Evaluator(run)(variables)
  sample_config.mesh.data = 8
  sample_config.data.stream = "always"
  streamed = Evaluator(experiment.build(sample_config))
  for _ in range(2):
    metrics = streamed(variables)
    assert metrics["top1"] == resident["top1"]
    assert metrics["loss"] == pytest.approx(resident["loss"], rel=1e-5)


@pytest.mark.thorough
def test_an_epoch_of_random_crops_goes_on_after_a_stop(tiny_config, tmp_path):
  rng = np.random.default_rng(0)
  for i in range(40):
    folder = tmp_path / ("train", "test")[i % 5 == 0] / ("cat", "dog")[i % 2]
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (30, 25, 3), np.uint8)).save(folder / f"{i}.png")
  config = tiny_config
  config.batch_size, config.num_epochs, config.model.num_blocks = 8, 1, 1
  config.data = config_lib.data("folder", like="cifar10")
  config.data.update(dir=str(tmp_path), crop="inception", resize=20, image_size=16, workers=0)
  run, whole, metrics = trained(config)
  assert run.datasets["test"].spec["image"].shape == (16, 16, 3)
  stops = []
  _, rest, rest_metrics = trained(config, lambda step: stops.append(step) or step == 1)
  assert stops == [1]
  assert_equal((whole, metrics), (rest, rest_metrics))
