"""Unbalanced classes: weights in the loss and in K-FAC, equal shares of a batch, metrics by class."""

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment, optim
from mixer_jax.data import dataset, order
from mixer_jax.errors import UserError
from mixer_jax.tasks import labels
from mixer_jax.training import loop
from mixer_jax.training.state import init_state
from mixer_jax.training.trainer import Trainer
from tests import children
from tests.tasks import runs

COUNTS = (20, 8, 4)
WEIGHTS = np.array([0.5, 1.0, 3.0])


@pytest.fixture
def config(tmp_path):
  """Three classes of 20, 8 and 4 training images, and 7, 5 and 0 test images."""
  rng, arrays = np.random.default_rng(0), {"class_names": np.array(["cat", "dog", "gnu"])}
  for split, counts in (("train", COUNTS), ("test", (7, 5, 0))):
    own = np.repeat(np.arange(3), counts)
    arrays[f"{split}_images"] = rng.integers(0, 256, (len(own), 8, 8, 3), np.uint8)
    arrays[f"{split}_labels"] = own.astype(np.int32)
  np.savez(tmp_path / "a.npz", **arrays)
  config = config_lib.default()
  fields = dict(hidden_dim=8, num_blocks=1, tokens_mlp_dim=4, channels_mlp_dim=8, patch_size=4)
  config.model = config_lib.model("mixer_small", **fields)
  config.data = config_lib.data("npz", like="cifar10")
  config.data.update(dir=str(tmp_path / "a.npz"), image_size=8, pad=0, flip=False)
  config.update(batch_size=8, eval_batch_size=5, class_weight="0.5,1,3")
  config.mesh.data = 1
  config.optimizer = config_lib.optimizer("adam", 1e-2)
  return config


def prepared(config, rows):
  """The task, shaken variables, and a training batch of some rows."""
  run = experiment.build(config)
  arrays = run.datasets["train"].arrays()
  examples = {name: jnp.asarray(x[np.array(rows)]) for name, x in arrays.items()}
  batch = run.task.prepare(jax.random.key(0), examples, train=True)
  return run.task, runs.shaken(jax.jit(run.task.init)(jax.random.key(0)), 0.3), batch


def classes_of(config, rows):
  return np.repeat(np.arange(3), COUNTS)[np.array(rows)]


ROWS = (0, 1, 20, 21, 28, 29, 2, 3)


def test_the_loss_is_pytorchs(config):
  """sum of w l / sum of w, for the test set without weights."""
  task, variables, batch = prepared(config, ROWS)
  log_probs = np.float64(jax.nn.log_softmax(task.predict(variables, batch).outputs))
  own = np.asarray(batch["label"])
  weights, losses = WEIGHTS[own], -log_probs[np.arange(8), own]
  loss = task.loss(variables, batch, jax.random.key(0))[0]
  np.testing.assert_allclose(loss.value(), (weights * losses).sum() / weights.sum(), rtol=1e-5)
  tested = task.evaluate(variables, batch, jnp.ones(8, bool))["loss"]
  np.testing.assert_allclose(tested.value(), losses.mean(), rtol=1e-5)


@pytest.mark.parametrize("form", ["softmax", "binary"])
def test_soft_labels_weigh_each_class(config, form):
  config.update(loss=form, label_smoothing=0.3)
  task, variables, batch = prepared(config, ROWS)
  logits = np.float64(task.predict(variables, batch).outputs)
  target = 0.7 * np.eye(3)[np.asarray(batch["label"])] + 0.1
  if form == "softmax":
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    parts, weights = -(WEIGHTS * target * log_probs).sum(1), target @ WEIGHTS
  else:
    binary = np.log1p(np.exp(logits)) - np.asarray(batch["target"]) * logits
    weights = np.asarray(batch["target"]) @ WEIGHTS
    parts = weights * binary.sum(1)
  loss = task.loss(variables, batch, jax.random.key(0))[0].value()
  np.testing.assert_allclose(loss, parts.sum() / weights.sum(), rtol=1e-5)


def test_kfac_sees_a_weight_as_so_many_copies(config):
  """Weights 1, 1 and 2: gradients of the loss and factors of outputs are those of copies.

  Factors of inputs are means over rows, without weights, as for any weighted likelihood.
  """
  gradients, inputs, outputs = [], [], []
  for weight, rows in (("1,1,2", (0, 1, 20, 28)), ("", (0, 1, 20, 28, 28)), ("", (0, 1, 20, 28))):
    config.class_weight = weight
    task, variables, batch = prepared(config, rows)
    view, params = task.curvature_view(), variables["params"]
    predicted = lambda params, batch, view=view: view({"params": params}, batch)
    how = dict(likelihood="categorical", estimation="exact")
    factors = optim.Curvature(predicted, params, batch, **how).factors(params, batch)
    loss = lambda params, task=task, batch=batch: task.loss(
      {"params": params}, batch, jax.random.key(0)
    )[0].value()
    gradients.append(jax.tree.leaves(jax.grad(loss)(params)))
    inputs.append([np.asarray(factors[name].inputs) for name in sorted(factors)])
    outputs.append([np.asarray(factors[name].outputs) for name in sorted(factors)])
  weighted, copies, plain = range(3)
  pairs = [(gradients[weighted], gradients[copies]), (outputs[weighted], outputs[copies])]
  for some, others in [*pairs, (inputs[weighted], inputs[plain])]:
    for a, b in zip(some, others, strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_balanced_weights_are_scikit_learns(config):
  weights = labels.class_weights("balanced", 3, lambda: np.array(COUNTS))
  np.testing.assert_allclose(weights, 32 / (3 * np.array(COUNTS)), rtol=1e-6)
  config.class_weight = "balanced"
  _, _, batch = prepared(config, ROWS)
  np.testing.assert_allclose(batch["weight"], weights[classes_of(config, ROWS)], rtol=1e-6)


@pytest.mark.parametrize("given", ["1,2", "1,2,0", "balance", "1,2,nan"])
def test_a_weight_for_each_class_is_above_zero(config, given):
  config.class_weight = given
  with pytest.raises(UserError, match="class_weight"):
    config_lib.check(config)
    prepared(config, ROWS)


@pytest.mark.parametrize("repeats", [1, 3])
def test_classes_come_equally_often(repeats):
  own = np.repeat(np.arange(3), (200, 17, 5))
  drawn = order.Order(0, 222, 20, repeats=repeats, labels=own)
  for epoch in (1, 2):
    ids = drawn.indices(epoch).ravel()
    counts = np.bincount(own[ids], minlength=3)
    assert len(ids) == 220 and np.ptp(counts) <= 2 * repeats
    for c in range(1, 3):  # whose examples all come, equally often
      times = np.bincount(ids, minlength=222)[own == c]
      assert repeats > 1 or (np.ptp(times) <= 1 and times.min() > 0)
  assert not np.array_equal(drawn.indices(1), drawn.indices(2))
  again = order.Order(0, 222, 20, repeats=repeats, labels=own)
  np.testing.assert_array_equal(again.indices(2), drawn.indices(2))
  steps = range(11, 22)
  np.testing.assert_array_equal([drawn(step) for step in steps], drawn.indices(2))
  seen = set()  # copies of an example have numbers of their own, so that they are cropped anew
  for step in steps:
    seen |= set(zip(drawn(step).tolist(), drawn.copies(step).tolist()))
  assert len(seen) == 220 and max(copy for _, copy in seen) > 3


@pytest.mark.thorough
def test_a_killed_run_that_samples_by_class_goes_on_bit_for_bit(config, tmp_path):
  config.data.sampling = "class"
  config.update(class_weight="balanced", num_steps=12, eval_steps=6, checkpoint_steps=6)
  runs.assert_kill_changes_nothing(config, tmp_path, 8)


def test_a_run_samples_by_class_and_tells_the_accuracy_of_each(config, tmp_path, capsys):
  """By the answers that `predict` writes; a class without a test image is left out of the mean."""
  config.data.sampling = "class"
  config.update(num_steps=3, eval_steps=3)
  run = experiment.build(config)
  sampled = np.repeat(np.arange(3), COUNTS)[run.order.indices(1).ravel()]
  assert np.ptp(np.bincount(sampled)) <= 1
  path = str(loop.train(config, str(tmp_path / "run")))
  found = evaluate.evaluate(path, per_class=True)["test"]
  done = children.command(
    *(tmp_path / "log", "predict", f"--workdir={path}", "--split=test", f"--out={tmp_path}/p.npz")
  )
  assert done.code == 0, done.err
  answers = np.load(tmp_path / "p.npz")
  hits = answers["outputs"].argmax(1) == answers["targets"]
  each = [hits[answers["targets"] == c].mean() for c in range(2)]
  assert found["accuracy/cat"] == pytest.approx(each[0])
  assert found["accuracy/dog"] == pytest.approx(each[1])
  assert np.isnan(found["accuracy/gnu"])
  assert found["balanced_accuracy"] == pytest.approx(np.mean(each))
  assert evaluate.evaluate(path)["test"].keys() == found.keys() - {
    f"accuracy/{name}" for name in ("cat", "dog", "gnu")
  }


def test_streamed_files_are_sampled_by_class(config, tmp_path):
  """Of a folder the labels are known before an image is read; an example comes in several crops."""
  rng = np.random.default_rng(0)
  for split in ("train", "test"):
    for name, number in (("cat", 14), ("dog", 2)):
      (tmp_path / split / name).mkdir(parents=True)
      for i in range(number):
        image = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(image).save(tmp_path / split / name / f"{i}.png")
  config.data.update(name="folder", dir=str(tmp_path), crop="inception", resize=12, workers=0)
  config.data.sampling, config.class_weight = "class", "balanced"
  config_lib.check(config)
  run = experiment.build(config)
  train = run.datasets["train"]
  assert train.arrays() is None
  names = np.array([path.split(b"/")[1] for path in train.paths])
  assert (names[run.order.indices(1).ravel()] == b"dog").sum() == 8
  weights = run.task.prepare(*(jax.random.key(0), dataset.examples(train, range(16))), train=True)[
    "weight"
  ]
  np.testing.assert_allclose(weights, np.where(names == b"dog", 4, 4 / 7), rtol=1e-6)
  trainer = Trainer(run, init_state(run))
  trainer.advance()
  dogs = np.flatnonzero(names == b"dog")
  draws = [(i, c) for i, c in zip(run.order.indices(1).ravel(), run.order.all_copies(1).ravel())]
  assert sorted(draw for draw in draws if draw[0] in dogs) == [
    (i, c) for i in dogs for c in range(4)
  ]
