"""Evaluation counts each example once, for any batch and any devices."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from docs.own_task import Derivative
from mixer_jax import experiment, tasks
from mixer_jax.errors import UserError
from mixer_jax.training import loop
from mixer_jax.training.evaluator import Evaluator, evaluators
from tests.conftest import waves


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("batch_size", [64, 100, 333])
@pytest.mark.first(1)
def test_masked_rows_are_weighed(batch_size, devices):
  """450 examples: 333 is no multiple of 8, 100 is none of 8, 64 leaves a last batch of 2."""
  fields = {"eval_batch_size": batch_size, "mesh.data": devices, "data.examples": 1800}
  run = experiment.build(waves(**fields))
  variables = jax.jit(run.task.init)(jax.random.key(0))
  found = Evaluator(run)(variables)
  split = run.datasets["test"].tree  # all at once, by NumPy
  x = np.concatenate([split["x"] * split["mask"], split["mask"]], axis=1)
  layers = [variables["params"][f"Dense_{i}"] for i in range(3)]
  for layer in layers[:2]:
    x = np.tanh(x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]))
  outputs = x @ np.asarray(layers[2]["kernel"]) + np.asarray(layers[2]["bias"])
  squares = split["mask"] * np.square(outputs - split["y"])
  assert found == {"error": pytest.approx(np.sqrt(squares.sum() / split["mask"].sum()), rel=1e-5)}


@pytest.mark.parametrize("batch_size, devices", [(8, 8), (64, 1), (100, 8), (333, 8)])
@pytest.mark.thorough
def test_images(batch_size, devices, tiny_config):
  tiny_config.eval_batch_size, tiny_config.mesh.data = batch_size, devices
  tiny_config.model.num_blocks = 1
  run = experiment.build(tiny_config)
  variables = jax.tree.map(lambda x: x + 0.05, jax.jit(run.task.init)(jax.random.key(0)))
  metrics = Evaluator(run)(variables)
  split = run.datasets["test"].tree  # all 90 images at once, by NumPy
  batch = run.task.prepare(None, split, train=False)
  logits = np.float64(run.task.predict(variables, batch).outputs)
  log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
  assert metrics["top1"] == pytest.approx(np.mean(logits.argmax(1) == split["label"]), abs=1e-7)
  assert metrics["loss"] == pytest.approx(-log_p[np.arange(90), split["label"]].mean(), rel=1e-5)
  hits = logits.argmax(1) == split["label"]
  balanced = np.mean([hits[split["label"] == c].mean() for c in range(4)])
  assert metrics["balanced_accuracy"] == pytest.approx(balanced, abs=1e-6)
  assert metrics.keys() == {"loss", "top1", "balanced_accuracy"}  # top-5 of four is always right


def test_the_training_set_is_evaluated_when_asked():
  run = experiment.build(waves())
  assert list(evaluators(run)) == ["test"]
  variables, split = jax.jit(run.task.init)(jax.random.key(0)), run.datasets["train"].tree
  found = evaluators(run, ["train"])["train"](variables)
  outputs = run.task.predict(variables, split).outputs  # all at once
  squares = split["mask"] * np.square(outputs - split["y"])
  assert found == {"error": pytest.approx(np.sqrt(squares.sum() / split["mask"].sum()), rel=1e-5)}


def test_metrics_of_the_host_alone_need_no_pass_over_a_split(monkeypatch):
  """After the first batch, which tells that there are no sums."""
  run = experiment.build(waves(eval_batch_size=64))
  variables, taken = jax.jit(run.task.init)(jax.random.key(0)), []
  monkeypatch.setattr(run.task, "evaluate", lambda *_: {})
  monkeypatch.setattr(run.task, "host_metrics", lambda *_: {"best": np.float32(2.0)})
  evaluator = Evaluator(run)
  batches = evaluator._sums
  counted = lambda variables: (taken.append(1) or batch for batch in batches(variables))
  monkeypatch.setattr(evaluator, "_sums", counted)
  assert evaluator(variables) == {"best": 2.0} == evaluator(variables)
  assert json.dumps(evaluator(variables)) == '{"best": 2.0}'
  assert len(taken) == 3


@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_split_without_examples_is_refused(monkeypatch, split):
  task = tasks.find(waves().task)
  whole = task.datasets
  monkeypatch.setattr(task, "datasets", lambda self: {**whole(self), split: []})
  with pytest.raises(UserError, match=f"gives no example of the split '{split}'"):
    experiment.build(waves())


class Careless(Derivative):
  """Forgets the mask of padding."""

  def evaluate(self, variables, batch, mask):
    return super().evaluate(variables, batch, jnp.ones_like(mask))


def test_a_task_that_counts_padding_is_told_before_the_first_step():
  config = waves("sgd", num_steps=1, eval_steps=1)
  config.task = f"{__name__}:Careless"
  with pytest.raises(UserError, match="counts rows of padding in 'error'"):
    next(loop.evaluations(experiment.build(config)))


class Quiet(Derivative):
  """Has no metric of training."""

  def loss(self, variables, batch, key):
    return super().loss(variables, batch, key)[0], tasks.Aux({})


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_the_mean_loss_of_training_is_always_in_the_log(accum_steps):
  """The log of the task of the docs has the root of the same mean."""
  config = waves("sgd", num_steps=8, eval_steps=8, accum_steps=accum_steps)
  [(_, known)] = loop.evaluations(experiment.build(config))
  config.task = f"{__name__}:Quiet"
  [(_, row)] = loop.evaluations(experiment.build(config))
  np.testing.assert_allclose(row["train/loss"], known["train/error"] ** 2, rtol=1e-5)
