"""Labels without a class are refused when data are read, whatever the task and its files."""

import numpy as np
import pytest

from docs import own_task
from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError
from mixer_jax.tasks import labels


class Task:
  """Three classes; tokens, of which those of weight 0 are padding; or floats."""

  def __init__(self, kind):
    self.kind = kind

  def prepare(self, key, examples, *, train):
    return examples

  def predict(self, variables, batch):
    y = batch["y"]
    outputs = batch["x"][:, None] * variables["params"]["w"]  # [batch, 3]
    if self.kind == "tokens":
      return outputs[:, None] + 0 * y[..., None], y, batch["weight"]
    return outputs, y, None


SHAPES = {"params": {"w": np.zeros(3, np.float32)}}


def check(kind, y, **more):
  arrays = dict(x=np.zeros(len(y), np.float32), y=y, **more)
  labels.check(Task(kind), "test", Arrays(arrays), SHAPES)


def test_the_targets_of_own_tasks_have_a_class_each():
  check("class", np.array([0, 2, 1]))
  check("class", np.array([0.0, 7.0]))  # no labels
  check("class", np.array([[True, False, True]]))  # sets of classes
  for wrong in (3, -1):
    with pytest.raises(UserError, match="split 'test' has labels .*; allowed: 0 to 2"):
      check("class", np.array([0, wrong, 1]))
  tokens, weight = np.array([[0, 1], [2, 99]]), np.array([[1, 1], [1, 0]], np.float32)
  check("tokens", tokens, weight=weight)
  with pytest.raises(UserError, match="labels from 0 to 99"):
    check("tokens", tokens, weight=weight + 1)


def test_images_are_not_read_for_it():
  """Of a set that no memory holds."""
  huge = np.broadcast_to(np.uint8(0), (10**6, 10**6))
  arrays = dict(x=np.zeros(10**6, np.float32), y=np.full(10**6, 3), image=huge)
  with pytest.raises(UserError, match="labels from 0 to 3|labels from 3 to 3"):
    labels.check(Task("class"), "train", Arrays(arrays), SHAPES)


@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_beyond_the_named_classes_of_a_file_end_the_start(split, tiny_config, tmp_path):
  arrays = dict(np.load(tiny_config.data.dir))
  arrays[f"{split}_labels"][5] = 4
  np.savez(tmp_path / "four.npz", **arrays, class_names=list("abcd"))
  tiny_config.data.dir = str(tmp_path / "four.npz")
  with pytest.raises(UserError, match=f"split '{split}' has labels from 0 to 4; allowed: 0 to 3"):
    experiment.build(tiny_config)


def test_a_regression_has_none():
  config = config_lib.default("docs.own_task:Derivative")
  assert own_task.Derivative.likelihood == "normal"
  experiment.build(config)
