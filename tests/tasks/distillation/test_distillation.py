"""Distillation: losses in NumPy, the teacher in the state, runs without its folder, mistakes."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment, export, models, predict, pretrained, probe, tasks
from mixer_jax.data import dataset
from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file
from mixer_jax.tasks.distillation.task import from_teacher
from mixer_jax.training import loop, nonfinite, restore
from mixer_jax.training.state import init_state
from mixer_jax.training.trainer import Trainer
from tests.tasks import runs

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def softmax(x):
  e = np.exp(x - x.max(1, keepdims=True))
  return e / e.sum(1, keepdims=True)


def closed_form(kind, logits, taught, temperature):
  s, t = softmax(logits / temperature), softmax(taught / temperature)
  if kind == "hard":
    return -np.log(softmax(logits)[np.arange(len(logits)), taught.argmax(1)])
  return temperature**2 * (t * np.log(t / s)).sum(1)


@pytest.mark.parametrize("kind", ["hard", "soft", "consistent"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.first(3)
def test_losses_are_the_closed_forms(kind, temperature):
  logits, taught = np.random.default_rng(0).normal(0, 3, (2, 6, 5))
  found = from_teacher(kind, *(jnp.float32(x) for x in (logits, taught)), temperature)
  np.testing.assert_allclose(found, closed_form(kind, logits, taught, temperature), rtol=1e-5)
  if kind != "hard":
    same = from_teacher(kind, jnp.float32(taught), jnp.float32(taught), temperature)
    np.testing.assert_allclose(same, 0, atol=1e-6)


@pytest.fixture(scope="module")
def teacher_run(shapes_npz, tmp_path_factory):
  """A convnet that has learned a little, on images normalised otherwise than the student's."""
  config = config_lib.default()
  config.update(num_epochs=3, batch_size=32, eval_batch_size=32)
  config.mesh.data = 1
  config.model = config_lib.model("resnet_20", stages=(1,), width=8)
  config.data = config_lib.data("npz", like="cifar10")
  config.data.update(dir=str(shapes_npz), image_size=8, pad=0, flip=False, mean=MEAN, std=STD)
  config.optimizer = config_lib.optimizer("sgd", learning_rate=0.1)
  path = tmp_path_factory.mktemp("teacher") / "run"
  loop.train(config, str(path))
  return path


@pytest.fixture
def config(tiny_config, teacher_run):
  config = config_lib.default("distillation")
  for name in ("model", "data", "optimizer", "mesh"):
    config[name] = tiny_config[name]
  config.model.num_blocks = 1
  config.update(num_epochs=1, batch_size=32, eval_batch_size=32)
  config.distillation.teacher = str(teacher_run)
  return config


def started(config):
  """The completed config's run, its variables with the teacher, and a training batch."""
  config_lib.check(config)
  run = experiment.build(tasks.find("distillation").complete(config))
  variables = run.task.initial(run.variable_shapes, restore.stored)
  variables["params"] = runs.shaken(variables["params"])
  examples = jax.tree.map(lambda x: x[:32], run.datasets["train"].arrays())
  prepare = jax.jit(lambda key, x: run.task.prepare(key, x, train=True))
  return run, variables, jax.device_get(prepare(jax.random.key(0), examples))


@pytest.mark.parametrize("kind, weight", [("hard", 0.5), ("soft", 0.25), ("consistent", 0.25)])
@pytest.mark.first(1)
def test_the_loss_of_a_batch_is_that_of_numpy(config, kind, weight):
  """With Mixup: the teacher sees the mixed images, by its own statistics."""
  config.distillation.update(kind=kind, weight=weight, temperature=2.0)
  config.augment.mixup, config.label_smoothing = 0.8, 0.1
  run, variables, batch = started(config)
  loss, aux = jax.jit(run.task.loss)(variables, batch, jax.random.key(0))
  logits = jax.jit(run.task.model.apply)({"params": variables["params"]}, batch["image"])
  logits = np.asarray(logits, float)
  own, its = (np.array(x) for x in ((config.data.mean, config.data.std), (MEAN, STD)))
  images = ((batch["image"] * own[1] + own[0]) - its[0]) / its[1]
  taught = jax.jit(run.task.teacher.apply)(variables["teacher"], images.astype(np.float32))
  taught = np.asarray(taught, float)
  labels = -(batch["target"] * np.log(softmax(logits))).sum(1)
  share = {"hard": 0.5, "soft": 0.25, "consistent": 1.0}[kind]
  expected = (1 - share) * labels + share * closed_form(kind, logits, taught, 2.0)
  np.testing.assert_allclose(loss.value(), expected.mean(), rtol=1e-4)
  agreement = (logits.argmax(1) == taught.argmax(1)).mean()
  np.testing.assert_allclose(aux.metrics["agreement"].value(), agreement, rtol=1e-6)
  top1 = (logits.argmax(1) == batch["label"]).mean()
  np.testing.assert_allclose(aux.metrics["top1"].value(), top1, rtol=1e-6)


@pytest.mark.thorough
def test_no_gradient_flows_into_the_teacher(config):
  run, variables, batch = started(config)
  loss = lambda teacher: run.task.loss({**variables, "teacher": teacher}, batch, jax.random.key(0))
  value = lambda teacher: loss(teacher)[0].value()
  grads = jax.jit(jax.grad(value))(variables["teacher"])
  assert all(not np.any(x) for x in jax.tree.leaves(grads))


@pytest.mark.thorough
def test_a_run_that_has_read_no_teacher_stops(config):
  run = experiment.build(tasks.find("distillation").complete(config))
  state = init_state(run, run.task.init(jax.random.key(0)))  # `initial` would read it
  with pytest.raises(nonfinite.Nonfinite, match="of step 1 is not finite"):
    Trainer(run, state).advance()


@pytest.mark.thorough
def test_the_teacher_answers_as_its_own_run(config, teacher_run):
  """Logits of training images as `predict` of the run gives them, and its accuracy, once."""
  config.distillation.teacher = str(teacher_run)
  run, variables, _ = started(config)
  own = restore.restore(str(teacher_run))
  expected = predict.predict(own.run, own.variables)
  arrays = run.datasets["test"].arrays()
  batch = run.task.prepare(None, arrays, train=False)
  found = jax.jit(run.task.taught)(variables, batch["image"])
  np.testing.assert_allclose(found, expected.outputs, rtol=1e-4, atol=1e-4)
  fresh = probe._fresh(run)["params"]  # that of a run of the seed without a teacher
  initial = run.task.initial(run.variable_shapes, restore.stored)["params"]
  jax.tree.map(np.testing.assert_array_equal, initial, fresh)
  test = run.datasets["test"]
  top1 = run.task.host_metrics(variables, test)["teacher_top1"]
  assert top1 == pytest.approx(metrics_file.read(teacher_run)[-1]["test/top1"], abs=1e-6)
  assert run.task.host_metrics({}, test) == {"teacher_top1": top1}  # known without the teacher
  answers, n = np.asarray(expected.outputs).argmax(1), len(test)
  sets = np.eye(expected.outputs.shape[1], dtype=bool)[answers]
  sets[: n // 2] = ~sets[: n // 2]  # other classes than the teacher's answer
  sets[-1] = False  # an image without a class
  several = dataset.Arrays(dict(test.arrays()) | {"label": sets})
  right = (n - n // 2 - 1) / (n - 1)
  assert run.task.host_metrics(variables, several)["teacher_top1"] == pytest.approx(right)


@pytest.mark.thorough
def test_another_size_is_resized(config):
  config.data.update(resize=16, image_size=16)
  run, variables, batch = started(config)
  small = jax.image.resize(batch["image"], (32, 8, 8, 3), "bilinear")
  taught = jax.jit(run.task.taught)
  found, expected = taught(variables, batch["image"]), taught(variables, small)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_run_keeps_its_teacher_and_resumes_without_its_folder(config, teacher_run, tmp_path):
  """A student with batch statistics, averages, two parts of a batch, repeats, two devices."""
  given = restore.stored(str(teacher_run))[1]
  shutil.copytree(teacher_run, tmp_path / "teacher")
  config.distillation.teacher = str(tmp_path / "teacher")
  config.model = config_lib.model("resnet_20", stages=(1,), width=4)
  config.update(num_epochs=2, accum_steps=2, ema_decay=0.9)
  config.data.repeats = 3
  config.mesh.data = 2
  forget = lambda: shutil.rmtree(tmp_path / "teacher")
  completed = tasks.find("distillation").complete(config)
  runs.assert_kill_changes_nothing(completed, tmp_path, 5, before_resume=forget)
  _, variables = restore.stored(str(tmp_path / "whole"))
  jax.tree.map(np.testing.assert_array_equal, dict(variables["teacher"]), dict(given))
  row = metrics_file.read(tmp_path / "parts")[-1]
  assert evaluate.evaluate(str(tmp_path / "parts"))["test"]["top1"] == row["test/top1"]
  its_own = metrics_file.read(teacher_run)[-1]["test/top1"]
  assert row["test/teacher_top1"] == pytest.approx(its_own, abs=1e-6)
  assert 0 < row["train/agreement"] <= 1
  file = export.export(str(tmp_path / "parts"), "latest", str(tmp_path / "w.npz"))
  kernel = pretrained.read(str(file)).arrays["BasicBlock_0/conv1/kernel"]
  np.testing.assert_array_equal(kernel, variables["params"]["BasicBlock_0"]["conv1"]["kernel"])


@pytest.mark.thorough
def test_it_learns_from_the_teacher_with_kfac(config, tmp_path):
  config.distillation.kind = "consistent"
  config.num_epochs = 8
  config.optimizer = config_lib.optimizer("kfac", learning_rate=0.05, damping=0.1, inverse_period=4)
  rows = metrics_file.read(loop.train(config, str(tmp_path / "run")))
  assert rows[-1]["train/loss"] < 0.5 * rows[0]["train/loss"]
  assert rows[-1]["train/agreement"] > 0.7


def public(model, classes, path):
  """A file of random weights as `pretrained` reads it."""
  built, rng = model, np.random.default_rng(0)
  images = jnp.zeros((1, 8, 8, 3))
  shapes = jax.eval_shape(built.clone(num_classes=classes).init, jax.random.key(0), images)
  params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), shapes["params"])
  pretrained.save(path, params, built, pretrained.Normalization(MEAN, STD))
  return params


@pytest.mark.thorough
def test_a_file_of_weights_is_a_teacher(config, tmp_path, monkeypatch):
  small = models.build("mixer_small", 4, hidden_dim=8, num_blocks=1, tokens_mlp_dim=4,
                       channels_mlp_dim=8, gelu="exact")  # fmt: skip
  params = public(small, 4, tmp_path / "w.npz")
  sizes = dict(hidden_dim=8, num_blocks=1, tokens_mlp_dim=4, channels_mlp_dim=8, patch_size=2)
  monkeypatch.setitem(models.VARIANTS, "tiny", functools.partial(models.Mixer, **sizes))
  monkeypatch.setitem(models._IMAGE_SIZES, "tiny", 32)  # the file's own are the student's
  assert small.patch_size == 4  # as the file shows
  config.distillation.update(teacher=str(tmp_path / "w.npz"), teacher_model="tiny")
  run, variables, batch = started(config)
  jax.tree.map(np.testing.assert_array_equal, variables["teacher"]["params"], params)
  own, its = (np.array(x) for x in ((config.data.mean, config.data.std), (MEAN, STD)))
  images = ((batch["image"] * own[1] + own[0]) - its[0]) / its[1]
  expected = jax.jit(small.apply)({"params": params}, images.astype(np.float32))
  found = jax.jit(run.task.taught)(variables, batch["image"])
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  # Weights of 16x16 pixels: it sees the student's images resized.
  images = jnp.zeros((1, 16, 16, 3))
  larger = jax.jit(small.init)(jax.random.key(0), images)["params"]
  pretrained.save(tmp_path / "large.npz", larger, small, pretrained.Normalization(MEAN, STD))
  config.distillation.teacher = str(tmp_path / "large.npz")
  run, _, _ = started(config)
  assert run.task._teacher.image_size == 16
  config.distillation.teacher = str(tmp_path / "w.npz")
  public(small, 7, tmp_path / "w.npz")
  with pytest.raises(UserError, match="w.npz.*7 classes"):
    started(config)
  config.distillation.teacher_model = ""
  with pytest.raises(UserError, match="teacher_model"):
    started(config)


def test_a_mistake_names_its_field_or_file(config, teacher_run, tmp_path, shapes_npz):
  def refused(match, **fields):
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=match) as error:
      started(other)
    assert "\n" not in str(error.value)

  refused("distillation.teacher", **{"distillation.teacher": ""})
  refused("loss is 'binary'", loss="binary")
  (tmp_path / "config.json").write_text('{"task": "masked_lm"}')
  refused("task masked_lm", **{"distillation.teacher": str(tmp_path)})
  stored = json.loads((teacher_run / "config.json").read_text()) | {"task": "segmentation"}
  (tmp_path / "config.json").write_text(json.dumps(stored))
  refused("task segmentation", **{"distillation.teacher": str(tmp_path)})
  refused("nowhere", **{"distillation.teacher": str(tmp_path / "nowhere")})
  arrays = dict(np.load(shapes_npz))
  arrays["train_labels"][0] = 4
  np.savez(tmp_path / "five.npz", **arrays)
  refused("4 classes, the data 5", **{"data.dir": str(tmp_path / "five.npz")})
  other = shutil.copytree(teacher_run, tmp_path / "other")
  record = (other / "run.json").read_text()
  (other / "run.json").write_text(record.replace('"2"', '"cat"'))
  refused("'cat' where the data have '2'", **{"distillation.teacher": str(other)})
  stored = (other / "config.json").read_text().replace('"loss": "softmax"', '"loss": "binary"')
  (other / "config.json").write_text(stored)
  refused("distillation.kind", **{"distillation.teacher": str(other), "distillation.kind": "soft"})


def test_evaluation_does_without_the_teacher(config):
  run, variables, _ = started(config)
  batch = run.task.prepare(None, run.datasets["test"].arrays(), train=False)
  mask = np.ones(len(batch["label"]), bool)
  alone = {"params": variables["params"]}
  assert "loss" in jax.eval_shape(run.task.evaluate, alone, batch, mask)


def test_image_files_are_answered_by_the_student(config, tmp_path):
  run, variables, _ = started(config)
  batch = jax.tree.map(lambda x: x[:3], run.task.datasets()["test"].arrays())
  files = [str(tmp_path / f"{i}.png") for i in range(3)]
  for file, image in zip(files, batch["image"]):
    Image.fromarray(image).save(file)
  found = [x["probability"] for x in run.task.answer(variables, files)]
  logits, *_ = run.task.predict(variables, run.task.prepare(None, batch, train=False))
  np.testing.assert_allclose(found, softmax(np.float64(logits)).max(1), rtol=1e-4)


@pytest.mark.thorough
def test_settings_of_jax_change_no_draw(config):
  config.augment.mixup = 0.8
  config_lib.check(config)
  runs.assert_settings_change_no_draw(tasks.find("distillation").complete(config))
