"""Collections that are not trained, averages of the parameters, and several test sets."""

import itertools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import evaluate, experiment
from mixer_jax.data import order
from mixer_jax.rundir import metrics_file
from mixer_jax.training import loop, restore
from mixer_jax.training.evaluator import Evaluator
from mixer_jax.training.state import init_state
from tests import children
from tests.conftest import waves
from tests.training.collections_task import KEPT, WithCollections

TASK = "tests.training.collections_task:WithCollections"


@pytest.fixture(scope="module")
def stopped_and_whole(tmp_path_factory):
  """The config of a run with all of it, its directory, and that of one stopped within epoch 2.

  The stop, after step 10, is between two inverses of K-FAC: they are renewed before steps 9 and 13.
  """
  config = waves("kfac", task=TASK, ema_decay=0.75, eval_steps=4)
  path = tmp_path_factory.mktemp("collections")
  children.trained(config, path / "whole")
  stopped = children.Child(config, path / "parts", children.signal_at, (10,))
  assert stopped.wait() == 143, stopped.err
  children.trained(config, path / "parts")
  return config, path / "whole", path / "parts"


@pytest.mark.thorough
def test_a_run_with_them_resumes_bit_for_bit(stopped_and_whole):
  children.assert_same_run(*stopped_and_whole)


@pytest.mark.thorough
def test_the_loss_changes_statistics_and_nothing_changes_frozen_weights(stopped_and_whole):
  config, whole, _ = stopped_and_whole
  run = experiment.build(config)
  start, end = init_state(run).variables, children.final_state(config, whole).variables
  assert end.keys() == {"params", "statistics", "frozen", "average"}
  np.testing.assert_array_equal(end["frozen"]["offset"], start["frozen"]["offset"])
  mean, ids = np.zeros(8), order.Order(0, 256, 32)
  for step in range(16):
    mean = KEPT * mean + (1 - KEPT) * run.datasets["train"].tree["x"][ids(step)].mean(axis=0)
  np.testing.assert_allclose(end["statistics"]["mean"], mean, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_every_split_is_evaluated_and_validation_picks_the_checkpoint(stopped_and_whole):
  _, whole, _ = stopped_and_whole
  rows = metrics_file.read(whole)
  assert [row["step"] for row in rows] == [4, 8, 12, 16]
  for i, row in enumerate(rows, 1):
    values = [r["validation/error"] for r in rows[:i]]
    assert row["validation/best_error"] == min(values)
    assert row["validation/best_step"] == 4 * (1 + int(np.argmin(values)))
    assert "test/best_error" not in row
  last = {split: {"error": rows[-1][f"{split}/error"]} for split in ("test", "validation", "noisy")}
  assert evaluate.evaluate(str(whole)) == last
  assert evaluate.evaluate(str(whole), split="noisy") == {"noisy": last["noisy"]}
  assert restore.restore(str(whole), "best").step == rows[-1]["validation/best_step"]


@pytest.mark.thorough
def test_validation_picks_the_checkpoint_although_the_test_set_would_pick_another(
  tiny_config, shapes_npz, tmp_path
):
  """The labels of the validation slice are wrong: the more is learned, the worse it is."""
  arrays = dict(np.load(shapes_npz))
  arrays["train_labels"][160:] = (arrays["train_labels"][160:] + 2) % 4
  np.savez(tmp_path / "data.npz", **arrays)
  config = tiny_config
  config.data.update(
    dir=str(tmp_path / "data.npz"),
    train_split="train[:160]",
    validation_split="train[160:]",
    extra_test_splits="test[:30],test[30:]",
  )
  config.model.num_blocks, config.num_steps, config.eval_steps = 1, 30, 5
  config.optimizer.learning_rate = 1e-2
  rows = metrics_file.read(loop.train(config, str(tmp_path / "run")))
  best = lambda split: rows[int(np.argmax([row[f"{split}/top1"] for row in rows]))]["step"]
  assert best("validation") != best("test")
  assert restore.restore(str(tmp_path / "run"), "best").step == best("validation")
  for row in rows:
    parts = 30 * row["test[:30]/top1"] + 60 * row["test[30:]/top1"]
    assert parts == pytest.approx(90 * row["test/top1"], abs=1e-3)


class HalfMean(WithCollections):
  """Its mean is computed in half precision, as a model with a compute dtype may do."""

  def loss(self, *args):
    loss, aux = super().loss(*args)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), aux.collections)
    return loss, aux._replace(collections=flax.core.freeze(half))


@pytest.mark.parametrize("parts", [1, 2])
def test_collections_keep_their_type(parts):
  fields = dict(task=f"{__name__}:HalfMean", num_steps=2, eval_steps=2, accum_steps=parts)
  run = experiment.build(waves(**fields))
  [(state, _)] = loop.evaluations(run)
  mean = np.asarray(state.variables["statistics"]["mean"])
  x, ids, expected = run.datasets["train"].tree["x"], order.Order(0, 256, 32), 0.0
  for step, part in itertools.product(range(2), range(parts)):
    own = x[ids(step)][part::parts].mean(axis=0)
    expected = jnp.bfloat16(KEPT * expected + (1 - KEPT) * own).astype(np.float32)
  assert mean.dtype == np.float32
  np.testing.assert_allclose(mean, expected, rtol=1e-2, atol=1e-4)


def test_the_average_is_the_recursion_and_is_evaluated(tmp_path):
  run = experiment.build(waves(num_steps=6, eval_steps=1, ema_decay=0.75))
  average = jax.tree.map(np.asarray, init_state(run).params)
  for state, row in loop.evaluations(run):  # noqa: B007
    average = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * np.asarray(p), average, state.params)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
  jax.tree.map(close, state.variables["average"], average)
  score = Evaluator(run)
  assert row["test/error"] == score({"params": state.variables["average"]})["error"]
  assert row["test/error"] != score({"params": state.params})["error"]
