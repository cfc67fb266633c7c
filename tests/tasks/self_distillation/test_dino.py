"""DINO's loss, centre, schedules and teacher over several steps, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from mixer_jax import config as config_lib
from mixer_jax import options, tasks
from mixer_jax.data import dataset
from mixer_jax.errors import UserError
from mixer_jax.images import sources
from mixer_jax.images.image_data import ImageData
from mixer_jax.tasks.self_distillation import dino

STEPS, K = 5, 6


@pytest.fixture(scope="module")
def config(shapes_npz):
  return small(shapes_npz)


def small(path):
  """A run of 8x8 images, 5 steps, three small views."""
  config = config_lib.default("self_distillation", "resmlp_s12")
  config.model.update(patch_size=4, hidden_dim=8, num_blocks=1, channels_mlp_dim=8)
  config.data.update(name="npz", dir=str(path), image_size=8)
  config.views.update(local=3, jitter=0.0, blur=(0, 0, 0))  # which take time to compile
  config.dino.update(out_dim=K, hidden_dim=12, bottleneck_dim=4, momentum=0.9)
  config.dino.update(temperature_epochs=0.25, freeze_epochs=0.25)
  config.num_steps, config.batch_size = STEPS, 32  # 8 steps an epoch
  return config


@pytest.fixture(scope="module")
def task(config):
  config_lib.check(config)
  return tasks.find("self_distillation")(config)


def head(params, x):
  """The equations of the head, float64."""
  for i in range(3):
    layer = params[f"Dense_{i}"]
    x = x if i == 0 else x * (1 + scipy.special.erf(x / np.sqrt(2))) / 2
    x = x @ layer["kernel"].astype(float) + layer["bias"]
  x /= np.linalg.norm(x, axis=-1, keepdims=True)
  last = params["last"]["kernel"].astype(float)
  return x @ (last / np.linalg.norm(last, axis=0))


@pytest.fixture(scope="module")
def steps(task):
  """Variables and batch before each step, and loss and aux of it; the student jumps at random."""
  variables = jax.device_get(jax.jit(task.init)(jax.random.key(0)))
  arrays = task.datasets()["train"].arrays()
  prepare = jax.jit(lambda key, x: task.prepare(key, x, train=True))
  loss, rng, found = jax.jit(task.loss), np.random.default_rng(0), []
  for step in range(STEPS):
    key, rows = jax.random.key(step), slice(4 * step, 4 * step + 4)
    batch = prepare(key, jax.tree.map(lambda x: x[rows], arrays))
    value, aux = jax.device_get(loss(variables, batch, key))
    found.append((variables, jax.device_get(batch), value, aux))
    jump = lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32)
    variables = {**aux.collections, "params": jax.tree.map(jump, variables["params"])}
  return found


def test_steps_are_those_of_the_paper(task, steps):
  teacher, centre = jax.tree.map(np.float64, steps[0][0]["params"]), np.zeros(K)
  for t, (variables, batch, loss, aux) in enumerate(steps):
    if t:  # after the student's step t - 1
      m = 1 - 0.1 * (1 + np.cos(np.pi * (t - 1) / STEPS)) / 2
      move = lambda old, new, m=m: m * old + (1 - m) * np.float64(new)
      teacher = jax.tree.map(move, teacher, variables["params"])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    jax.tree.map(close, task.teacher(variables), teacher)
    jax.tree.map(close, task.backbone(variables), teacher["backbone"])
    images = np.concatenate([batch["global"], batch["local"]], axis=1)
    features = lambda params, x: np.float64(
      task.model.backbone.apply({"params": jax.tree.map(np.float32, params["backbone"])}, x)
    )
    of = lambda params, views: np.stack(
      [head(params["head"], features(params, images[:, v])) for v in views], axis=1
    )
    outputs, student = of(teacher, (0, 1)), of(variables["params"], range(5)) / 0.1
    temperature = 0.04 + 0.03 * min(t / 2, 1)  # a quarter of an epoch has two steps
    targets = scipy.special.softmax((outputs - centre) / temperature, axis=-1)
    logs = scipy.special.log_softmax(student, axis=-1)
    each = [-(targets[:, i] * logs[:, v]).sum(-1) for i in (0, 1) for v in range(5) if v != i]
    assert len(each) == 8
    np.testing.assert_allclose(loss.value(), np.mean(each), rtol=2e-4)
    np.testing.assert_allclose(aux.metrics["loss"].value(), np.mean(each), rtol=2e-4)
    entropy = -(targets * np.log(targets)).sum(-1).mean()
    np.testing.assert_allclose(aux.metrics["teacher_entropy"].value(), entropy, rtol=2e-3)
    centre = 0.9 * centre + 0.1 * outputs.mean((0, 1))
    progress = aux.collections["progress"]
    np.testing.assert_allclose(progress["centre"], centre, rtol=1e-4, atol=1e-6)
    norm = np.linalg.norm(centre)
    np.testing.assert_allclose(aux.metrics["centre_norm"].value(), norm, rtol=1e-4)
    assert progress["step"] == t + 1
    x = np.concatenate([features(teacher, images[:, v]) for v in (0, 1)])
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    spread = np.square(x - x.mean(0)).sum(1).mean()
    np.testing.assert_allclose(aux.metrics["spread"].value(), spread, rtol=1e-2, atol=1e-5)


@pytest.mark.thorough
def test_what_kfac_sees_has_the_loss_as_its_weighted_mean(task, steps):
  variables, batch, _, _ = steps[3]
  predict = task.curvature_view()
  outputs, targets, weights, _ = jax.device_get(jax.jit(predict)(variables, batch))
  assert outputs.shape == (4 * 5, K) and targets.shape == weights.shape == (20,)
  assert weights.reshape(4, 5).tolist() == [[1, 1, 2, 2, 2]] * 4
  logs = scipy.special.log_softmax(outputs.astype(float), axis=-1).reshape(4, 5, K)
  of = task.model.apply({"params": task.teacher(variables)}, batch["global"].reshape(8, 8, 8, 3))
  shares = np.asarray(of, float).reshape(4, 2, K) - variables["progress"]["centre"]
  shares = scipy.special.softmax(shares / 0.07, axis=-1)
  learned = np.stack([shares[:, 1], shares[:, 0]] + [shares.mean(1)] * 3, axis=1)
  losses = -(learned * logs).sum(-1).ravel()
  loss = jax.jit(task.loss)(variables, batch, jax.random.key(0))[0].value()  # nothing drops
  np.testing.assert_allclose((weights * losses).sum() / weights.sum(), loss, rtol=1e-4)
  np.testing.assert_array_equal(targets.reshape(4, 5), learned.argmax(-1))


def test_the_last_layer_gets_no_gradient_in_the_first_epochs(task, steps):
  slope = jax.jit(
    jax.grad(lambda p, v, b: task.loss({**v, "params": p}, b, jax.random.key(0))[0].total)
  )
  for t, frozen in ((0, True), (1, True), (2, False)):
    variables, batch, *_ = steps[t]
    grads = slope(variables["params"], variables, batch)["head"]
    assert (np.abs(grads["last"]["kernel"]).max() == 0) == frozen
    assert np.abs(grads["Dense_2"]["kernel"]).max() > 0
    # Only the direction of a column counts.
    kernel = variables["params"]["head"]["last"]["kernel"]
    np.testing.assert_allclose((grads["last"]["kernel"] * kernel).sum(0), 0, atol=1e-4)


def test_steps_of_a_collapse_are_counted_in_a_row_up_to_the_limit():
  uniform, count = np.log(K), dino.counted
  assert count(3, 0.985 * uniform, K, 9) == 0 and count(3, 0.015 * uniform, K, 9) == 0
  assert count(3, 0.995 * uniform, K, 9) == 4 and count(3, 0.005 * uniform, K, 9) == 4
  assert count(9, 0.5 * uniform, K, 9) == 9 and count(9, 0.5 * uniform, K, 0) == 0


def test_spread_and_entropy_by_hand():
  assert dino.spread(jnp.array([[1.0, 0], [5, 0]])) == pytest.approx(0, abs=1e-6)
  assert dino.spread(jnp.array([[1.0, 0], [-2, 0]])) == pytest.approx(1)
  assert dino.entropy(jnp.zeros((3, K))) == pytest.approx(np.log(K))


@pytest.mark.parametrize(
  "field, value, others",
  [
    ("accum_steps", 2, {}),
    ("ema_decay", 0.9, {}),
    ("data.pad", 4, {}),
    ("data.random_crop", True, {"data.resize": 8}),
    ("data.image_size", 10, {}),
    ("views.local_size", 6, {}),
  ],
)
def test_a_contradiction_names_its_field(config, field, value, others):
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict({field: value, **others})
  with pytest.raises(UserError, match=f"^{field}"):
    config_lib.check(config)


def test_test_sets_with_sets_of_labels_are_refused(config, monkeypatch):
  loaded = sources.load(options.made(ImageData, config.data), labelled=False)
  test = dict(loaded.splits["test"].arrays())
  test["label"] = np.eye(4, dtype=bool)[test["label"]]
  several = loaded._replace(splits=dict(loaded.splits) | {"real": dataset.Arrays(test)})
  monkeypatch.setattr(sources, "load", lambda *_, **__: several)
  with pytest.raises(UserError, match="split real"):
    tasks.find(config.task)(config).datasets()


@pytest.mark.thorough
def test_small_views_of_another_size_are_for_models_of_any_number_of_tokens(config):
  config = config.copy_and_resolve_references()
  config.views.local_size = 4
  with pytest.raises(UserError, match="^views.local_size is 4"):
    tasks.find("self_distillation")(config).datasets()
  config.model.patch_communication = "depthwise"
  task = tasks.find("self_distillation")(config)
  arrays = jax.tree.map(lambda x: x[:4], task.datasets()["train"].arrays())
  variables = jax.jit(task.init)(jax.random.key(0))

  def loss(key):
    return task.loss(variables, task.prepare(key, arrays, train=True), key)[0].value()

  assert np.isfinite(jax.jit(loss)(jax.random.key(0)))
