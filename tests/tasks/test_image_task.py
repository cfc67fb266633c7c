"""The task as commands use it, against NumPy."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax import pretrained, tasks
from mixer_jax.errors import UserError
from mixer_jax.tasks.image_classification import pictures
from tests.conftest import optimizer_of
from tests.images import loading
from tests.images.loading import error, load
from tests.tasks import runs


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  rng = np.random.default_rng(0)
  path = tmp_path_factory.mktemp("data") / "a.npz"
  arrays = {}
  for split, n in (("train", 20), ("test", 9)):
    arrays[f"{split}_images"] = rng.integers(0, 256, (n, 8, 8, 3), np.uint8)
    arrays[f"{split}_labels"] = np.arange(n) % 7
  np.savez(path, **arrays)
  config = config_lib.default()
  fields = dict(hidden_dim=8, num_blocks=1, tokens_mlp_dim=4, channels_mlp_dim=8, patch_size=4)
  config.model = config_lib.model("mixer_small", **fields)
  config.data = config_lib.data("npz", like="cifar10")
  config.data.update(dir=str(path), image_size=8, pad=1)
  return config


@pytest.fixture(scope="module")
def task(config):
  config_lib.check(config)
  return tasks.find("image_classification")(config)


@pytest.fixture(scope="module")
def variables(task):
  """Parameters whose head is not zero."""
  fresh = jax.jit(task.init)(jax.random.key(0))
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32), fresh)


def test_metrics_are_those_of_numpy(task, variables):
  arrays = task.datasets()["test"].arrays()
  batch = task.prepare(None, arrays, train=False)
  outputs, labels, *_ = jax.jit(task.predict)(variables, batch)
  logits, mask = np.asarray(outputs, float), np.arange(9) != 4
  np.testing.assert_array_equal(labels, arrays["label"])
  losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(9), labels]
  ranks = [list(np.argsort(-row)).index(label) for row, label in zip(logits, labels)]
  expected = dict(loss=losses, top1=np.array(ranks) < 1, top5=np.array(ranks) < 5)
  found = jax.jit(task.evaluate)(variables, batch, jnp.array(mask))
  assert {metric.name for metric in task.metrics} == expected.keys()
  hits = (np.array(ranks) < 1)[mask]
  each = [hits[labels[mask] == c].mean() for c in np.unique(labels[mask])]
  np.testing.assert_allclose(found.pop("balanced_accuracy").value(), np.mean(each), rtol=1e-6)
  assert found.keys() == expected.keys()
  for name, values in expected.items():
    np.testing.assert_allclose(found[name].value(), values[mask].mean(), rtol=1e-5)
    assert found[name].weight == 8
  loss, aux = jax.jit(task.loss)(variables, batch, jax.random.key(0))
  np.testing.assert_allclose(loss.value(), losses.mean(), rtol=1e-5)
  assert aux.metrics.keys() == {"loss", "top1"}


def test_representations_are_what_the_head_sees(task, variables):
  batch = task.prepare(None, task.datasets()["test"].arrays(), train=False)
  features = np.asarray(task.representations(variables, batch)["features"])
  head = variables["params"]["head"]
  logits = task.predict(variables, batch).outputs
  np.testing.assert_allclose(features @ head["kernel"] + head["bias"], logits, rtol=1e-4, atol=1e-5)


def _recipe(config, **fields):
  other = config.copy_and_resolve_references()
  other.augment.update(mixup=0.8, cutmix=1.0)
  other.update(label_smoothing=0.1, **fields)
  config_lib.check(other)
  return tasks.find("image_classification")(other)


@pytest.mark.parametrize("loss", ["softmax", "binary"])
@pytest.mark.thorough
def test_losses_of_mixed_labels_are_those_of_numpy(config, variables, loss):
  task = _recipe(config, loss=loss)
  arrays = task.datasets()["train"].arrays()
  batch = jax.jit(lambda k, x: task.prepare(k, x, train=True))(jax.random.key(0), arrays)
  target, labels = np.asarray(batch["target"], float), arrays["label"]
  np.testing.assert_allclose(target.sum(1), 1, rtol=1e-5)
  mixed = (target > 0.1 / 7 + 1e-3).sum(1)
  assert set(mixed) <= {1, 2} and (mixed == 2).any()
  # Shares of the own label and of the partner's, the larger of which is "label".
  np.testing.assert_array_equal(target.argmax(1) == batch["label"], True)
  assert (target[np.arange(20), labels] + target[np.arange(20), labels[::-1]] > 0.9).all()
  logits = np.asarray(task.model.apply(variables, batch["image"]), float)
  if loss == "softmax":
    expected = np.log(np.exp(logits).sum(1)) - (target * logits).sum(1)
  else:
    expected = (np.log1p(np.exp(logits)) - target * logits).sum(1)
  found, aux = jax.jit(task.loss)(variables, batch, jax.random.key(0))
  np.testing.assert_allclose(found.value(), expected.mean(), rtol=1e-5)
  hits = (logits.argmax(1) == batch["label"]).mean()
  np.testing.assert_allclose(aux.metrics["top1"].value(), hits, rtol=1e-6)
  # K-FAC: labels or targets, by the likelihood; test batches have hard labels.
  predict = task.curvature_view()
  wanted = {"softmax": "categorical", "binary": "bernoulli"}[loss]
  assert task.likelihood == wanted
  seen = predict(variables, batch).targets
  np.testing.assert_array_equal(seen, batch["label" if loss == "softmax" else "target"])
  plain = task.prepare(None, task.datasets()["test"].arrays(), train=False)
  assert plain.keys() == {"image", "label"}


def test_binary_losses_of_test_sets_take_hard_labels(config, variables):
  task = _recipe(config, loss="binary")
  batch = task.prepare(None, task.datasets()["test"].arrays(), train=False)
  logits = np.asarray(task.predict(variables, batch).outputs, float)
  hard = np.eye(7)[np.asarray(batch["label"])]
  found = task.evaluate(variables, batch, jnp.ones(9, bool))["loss"].value()
  expected = (np.log1p(np.exp(logits)) - hard * logits).sum(1).mean()
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  rows = task.probabilities(variables, task.datasets()["test"].arrays()["image"])
  np.testing.assert_allclose(rows, 1 / (1 + np.exp(-logits)), rtol=1e-5)


def test_ties_go_to_the_lower_class_and_nan_is_no_hit():
  from mixer_jax.tasks.image_classification.task import _hits

  logits = jnp.array(
    [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [jnp.nan] * 3, [0.0, 2.0, 1.0], [jnp.nan, 1, 0]]
  )
  top1, top5 = _hits(logits, jnp.array([0, 1, 0, 2, 1]))
  assert top1.tolist() == [True, False, False, False, False]
  assert top5.tolist() == [True, True, False, True, False]


def test_answers_name_classes_of_images_and_other_files_are_refused(task, variables, tmp_path):
  images = task.datasets()["test"].arrays()["image"]
  paths = [str(tmp_path / f"{i}.png") for i in range(2)]
  for path, image in zip(paths, images):
    Image.fromarray(image).resize((32, 16), Image.Resampling.NEAREST).save(path)
  assert task.read_images(paths).shape == (2, 8, 8, 3)
  found = list(task.answer(variables, paths))
  rows = task.probabilities(variables, task.read_images(paths))
  np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-5)
  for path, row, answer in zip(paths, rows, found, strict=True):
    assert answer["path"] == path and answer["class"] == str(row.argmax())
    assert answer["probability"] == row.max() and len(answer["top"]) == 5
  broken = task.answer(variables, [*paths, str(tmp_path / "none.png"), paths[0]])
  assert [next(broken), next(broken)] == found  # what comes before it is answered
  with pytest.raises(UserError, match="none.png: cannot be read: No such file"):
    next(broken)


def test_the_record_of_a_run_takes_the_place_of_its_data_in_answers(task, variables, tmp_path):
  path = str(tmp_path / "0.png")
  Image.fromarray(task.datasets()["test"].arrays()["image"][0]).save(path)
  other = task._config.copy_and_resolve_references()
  other.data.dir = str(tmp_path / "gone.npz")
  later = tasks.find("image_classification")(other)
  later.recall(json.loads(json.dumps(task.notes())))
  later.class_names = task.class_names
  assert list(later.answer(variables, [path])) == list(task.answer(variables, [path]))


def test_pictures_show_confusion_and_the_most_confident_mistakes(task, variables):
  labels = np.array([0, 1, 1, 2, 2])
  rows = np.array([[8, 1, 1], [2, 8, 0], [9, 1, 0], [6, 4, 0], [0, 0, 9]]) / 10
  assert pictures.confusion(labels, rows).tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
  assert pictures.worst(labels, rows).tolist() == [2, 3]
  figures = task.pictures(variables, task.datasets()["test"])
  assert figures.keys() == {"confusion", "mistakes"}


def test_exported_weights_start_another_run(config, task, variables, tmp_path):
  path = tmp_path / "w.npz"
  task.export(variables, path)
  assert pretrained.read(str(path)).normalization.mean == config.data.mean
  other = config.copy_and_resolve_references()
  other.pretrained = str(path)
  completed = type(task).complete(other)
  assert completed.model.gelu == "tanh" or completed.model.gelu == task.model.gelu
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  jax.tree.map(
    np.testing.assert_array_equal, type(task)(completed).initial(shapes, None), dict(variables)
  )
  other.data.mean = (0.5, 0.5, 0.5)
  with pytest.raises(UserError, match="any_normalization=True"):
    type(task).complete(other)


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(image_size=9), "multiple of the patch size 4"),
    (dict(resize=4), "data.resize is 4"),
    (dict(mean=(0.5, 0.5)), "data.mean is"),
    (dict(repeats=0), "data.repeats is 0"),
  ],
)
def test_mistakes_are_named_before_data_are_read(config, fields, message):
  other = config.copy_and_resolve_references()
  other.data.update(dir="/nowhere.npz", **fields)
  with pytest.raises(UserError, match=message):
    config_lib.check(other)


def test_a_bad_model_is_told_before_data_are_read(config):
  other = config.copy_and_resolve_references()
  other.data.dir = "/nowhere.npz"
  other.model = config_lib.model("gmlp_s16", patch_size=4, ffn_dim=3)
  with pytest.raises(UserError, match="model gmlp_s16"):
    tasks.find("image_classification")(other).datasets()


def test_validation_and_further_test_sets(config):
  options = dataclasses.replace(
    *(loading.config(name="npz", dir=config.data.dir),),
    train_split="train[:75%]",
    validation_split="train[75%:]",
    extra_test_splits="test[:4], test[4:]",
  )
  found = load(options).splits
  assert {name: len(split) for name, split in found.items()} == {
    "train": 15,
    "test": 9,
    "validation": 5,
    "test[:4]": 4,
    "test[4:]": 5,
  }
  shared = dataclasses.replace(options, train_split="test+train[:80%]")
  assert "shares examples of 'train'" in error(shared)


def test_splits_that_share_examples(config, caplog):
  options = loading.config(name="npz", dir=config.data.dir)
  twice = dataclasses.replace(options, test_split="test+test[:2]")
  assert "the test split 'test+test[:2]' takes examples of 'test' twice" in error(twice)
  repeated = dataclasses.replace(options, train_split="train+train[:25%]")
  assert len(load(repeated).splits["train"]) == 25
  assert not caplog.text
  load(dataclasses.replace(options, validation_split="test[:4]"))
  assert "(test) shares examples of 'test' with data.validation_split='test[:4]'" in caplog.text


@pytest.mark.thorough
def test_no_key_is_drawn_from_twice(config, monkeypatch):
  """Crops, flips, policies, jitter, erasing and Mixup are independent of each other."""
  other = config.copy_and_resolve_references()
  other.augment.update(policy="rand", colour_jitter=0.4, erasing=0.5, mixup=0.8, cutmix=1.0)
  task, keys = tasks.find("image_classification")(other), []

  def recorded(draw):
    def call(key, *args, **kwargs):
      keys.append(tuple(jax.random.key_data(key).ravel().tolist()))
      return draw(key, *args, **kwargs)

    return call

  for name in ("bernoulli", "normal", "randint", "split", "uniform"):
    monkeypatch.setattr(jax.random, name, recorded(getattr(jax.random, name)))
  with jax.disable_jit():
    task.prepare(jax.random.key(0), task.datasets()["train"].arrays(), train=True)
  assert len(keys) >= 10 and len(set(keys)) == len(keys)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sgd", "kfac"])
def test_settings_of_jax_change_no_draw(tiny_config, name):
  """Crops, mixing, erasing, depths and, of K-FAC, the labels of the Fisher matrix."""
  tiny_config.data.flip = True
  tiny_config.augment.update(policy="rand", mixup=0.8, cutmix=1.0, erasing=0.5)
  tiny_config.model.stochastic_depth = 0.5
  tiny_config.optimizer = optimizer_of(name)
  runs.assert_settings_change_no_draw(tiny_config)
