"""The contract of a task and its registry."""

import jax
import ml_collections
import numpy as np
import pytest

from docs.own_task import Derivative
from mixer_jax import config as config_lib
from mixer_jax import tasks
from mixer_jax.errors import UserError
from mixer_jax.tasks import BaseTask


def test_a_task_is_found_by_name_and_by_place():
  for name, place in tasks.TASKS.items():
    assert tasks.find(name) is tasks.find(place)
  assert tasks.find("docs.own_task:Derivative") is Derivative


@pytest.mark.parametrize(
  "name", ["segmentatio", "", "docs.own_task:Nothing", "nowhere:X", "docs.own_task:np", ":X"]
)
def test_other_names_are_refused(name):
  with pytest.raises(UserError, match=f"^task is {name!r}"):
    tasks.find(name)


@pytest.fixture(scope="module")
def waves():
  config = config_lib.default("docs.own_task:Derivative")
  config.data.update(points=8, examples=64)
  config.model.width = 4
  return Derivative(config)


def examples(task, n, split="train"):
  return jax.tree.map(lambda x: x[:n], task.datasets()[split].arrays())


def test_the_parts_of_the_contract_fit_together(waves):
  """A task outside the package, asked as the commands ask."""
  key = jax.random.key(0)
  variables = waves.init(key)
  batch = waves.prepare(key, examples(waves, 16), train=True)
  loss, aux = waves.loss(variables, batch, key)
  outputs, targets, weights, _ = waves.predict(variables, batch)
  assert outputs.shape == targets.shape == weights.shape == (16, 8)
  squares = np.square(np.float64(outputs) - targets)
  expected = np.sum(squares * weights) / np.sum(weights)
  np.testing.assert_allclose(loss.value(), expected, rtol=1e-5)
  np.testing.assert_allclose(aux.metrics["error"].value(), np.sqrt(expected), rtol=1e-5)
  assert aux.collections == {}


def test_padding_of_an_evaluation_does_not_count(waves):
  variables = jax.jit(waves.init)(jax.random.key(0))
  whole = examples(waves, 12, "test")
  padding = dict(x=np.nan, y=np.nan, mask=1)
  padded = {k: np.concatenate([v, np.full_like(v[:4], padding[k])]) for k, v in whole.items()}
  found = waves.evaluate(variables, padded, np.arange(16) < 12)["error"].value()
  alone = waves.evaluate(variables, whole, np.ones(12, bool))["error"].value()
  np.testing.assert_allclose(found, alone, rtol=1e-6)


class Bare(BaseTask):
  """A task without any of the parts that may be left out."""

  def predict(self, variables, batch):
    return "prediction"


def test_parts_that_are_left_out(tmp_path):
  task, config = Bare(), ml_collections.ConfigDict()
  variables = {"params": {"layer": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)}}}
  assert task.check(config) is None and task.complete(config) is config
  assert task.initial(variables, None) is None
  assert task.host_metrics(variables, None) == task.pictures(variables, None) == {}
  assert task.representations(variables, None) == task.notes() == {}
  assert task.curvature_view()(None, None) == "prediction"
  assert task.layer_kind("block/layer/kernel") == "block"
  for refused in (task.answer, task.texts):
    with pytest.raises(UserError, match="Bare"):
      refused(variables, None)
  task.export(variables, tmp_path / "w.npz")
  with np.load(tmp_path / "w.npz") as stored:
    assert {k: v.shape for k, v in stored.items()} == {"layer/kernel": (2, 3), "layer/bias": (3,)}
