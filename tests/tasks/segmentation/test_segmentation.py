"""The task: exact metrics, void pixels, K-FAC, starts, resumes, answers."""

import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment, models, optimizers, predict, pretrained, tasks
from mixer_jax.errors import UserError
from mixer_jax.tasks.metrics import Hits, MeanIou, empty, merge, values
from mixer_jax.training import loop, restore
from mixer_jax.training.checkpoint import Checkpoints
from mixer_jax.training.evaluator import Evaluator
from tests.tasks import runs
from tests.tasks.segmentation import files


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
  return files.write(tmp_path_factory.mktemp("pairs"), {"train": 16, "test": 7})


@pytest.fixture
def config(pairs):
  """Two blocks of width 8 on crops of 8x8 in patches of 4, of images of 20x24."""
  config = config_lib.default("segmentation", "mixer_small")
  config.model.update(patch_size=4, hidden_dim=8, num_blocks=2)
  config.model.update(tokens_mlp_dim=8, channels_mlp_dim=8)
  config.decoder.update(width=8, blocks=(0, 0, 1, 1))
  config.data.update(name="folder", dir=str(pairs), cache_dir=str(pairs / "cache"))
  config.data.update(void=files.VOID, image_size=8, jitter=0.0)
  config.update(batch_size=8, eval_batch_size=3, num_steps=4, eval_steps=2, checkpoint_steps=2)
  config.mesh.data = 1
  config.optimizer = config_lib.optimizer("adamw", learning_rate=1e-2)
  return config


def built(config):
  config_lib.check(config)
  return tasks.find("segmentation")(config)


def moved(task):
  return runs.shaken(jax.jit(task.init)(jax.random.key(0)), 0.3)


def by_numpy(logits, labels, weights):
  """Metrics of pixels, in float64."""
  logits = np.float64(logits)
  own = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
  losses, found = np.log(np.exp(logits).sum(-1)) - own, logits.argmax(-1)
  counted = weights > 0
  each = []
  for c in range(logits.shape[-1]):
    a, b = (labels == c) & counted, (found == c) & counted
    if (a | b).any():
      each.append((a & b).sum() / (a | b).sum())
  right = (found == labels)[counted].mean()
  return {"miou": np.mean(each), "accuracy": right, "loss": losses[counted].mean()}


@pytest.mark.thorough
def test_settings_of_jax_change_no_draw(config):
  config.data.jitter = 0.3
  config.decoder.dropout_rate = 0.5
  runs.assert_settings_change_no_draw(config)


@pytest.mark.parametrize("devices, size", [(1, 3), (2, 4), (8, 7)])
@pytest.mark.thorough
def test_metrics_of_ragged_batches_are_those_of_numpy(config, devices, size):
  config.mesh.data, config.eval_batch_size = devices, size
  run = experiment.build(config)
  variables = moved(run.task)
  arrays = run.datasets["test"].arrays()
  batch = jax.device_get(run.task.prepare(None, arrays, train=False))
  assert (batch["weight"] == (arrays["mask"] != files.VOID)).all()
  apply = jax.jit(lambda x: run.task.model.apply(variables, x)[0])
  total, count = np.zeros((7, 20, 24, 3)), np.zeros((20, 24, 1))
  for i, j in itertools.product((0, 5, 10, 12), (0, 5, 10, 15, 16)):
    logits = apply(batch["image"][:, i : i + 8, j : j + 8])
    assert logits.shape == (7, 8, 8, 3)  # two patches a side, four times as many points
    total[:, i : i + 8, j : j + 8] += logits
    count[i : i + 8, j : j + 8] += 1
  expected = by_numpy(total / count, batch["label"], batch["weight"])
  assert Evaluator(run)(variables) == pytest.approx(expected, rel=1e-5)


def test_counts_are_exact_beyond_float32_and_absent_classes_do_not_count():
  labels, found = np.array([0, 0, 1, 1, 1, 2]), np.array([0, 1, 1, 1, 0, 3])
  one = MeanIou.of(labels, found, 5, np.array([1, 1, 1, 1, 1, 0]))
  np.testing.assert_allclose(one.value(), (1 / 3 + 2 / 4) / 2, rtol=1e-6)
  sums, total = (
    {"x": one, "y": Hits(one.high, one.low)},
    empty({"x": one, "y": Hits(*([one.low] * 2))}),
  )
  doubled = jax.jit(lambda a, b: merge(a, b))
  for _ in range(33):
    total, sums = doubled(total, sums), doubled(sums, sums)
  n = 2**33 - 1
  exact = np.asarray(total["x"].high, object) * 2**20 + np.asarray(total["x"].low)
  assert exact.tolist()[:2] == [[n, n, 0, 0, 0, 0], [n, 2 * n, 0, 0, 0, 0]]
  assert values(total) == pytest.approx({"x": (1 / 3 + 2 / 4) / 2, "y": 3 / 5}, rel=1e-6)


def test_a_pixel_without_an_answer_is_a_wrong_one_of_its_own_class_alone():
  labels, found = np.array([0, 0, 2, 2]), np.array([0, 5, 2, 2])
  assert MeanIou.of(labels, found, 5).value() == (1 / 2 + 1) / 2
  one = MeanIou.of(labels, found, 5)
  assert Hits(one.high, one.low).value() == 3 / 4


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_answer_that_is_not_finite_is_wrong(config, value):
  task = built(config)
  images = jnp.zeros((2, 8, 8, 3)).at[1].set(value)
  batch = dict(image=images, label=jnp.zeros((2, 8, 8), jnp.uint8), weight=jnp.ones((2, 8, 8)))
  variables = task.init(jax.random.key(0))  # a zero head answers class 0
  found = values(task.evaluate(variables, batch, jnp.ones(2, bool)))
  assert found["accuracy"] == 0.5 and found["miou"] == 0.5 and np.isnan(found["loss"])


@pytest.mark.thorough
def test_void_pixels_give_no_gradient(config):
  task = built(config)
  variables, key = moved(task), jax.random.key(0)
  batch = task.prepare(key, task.datasets()["train"].arrays(), train=True)
  grad = jax.jit(jax.value_and_grad(lambda p, b: task.loss({"params": p}, b, key)[0].value()))
  loss, grads = grad(variables["params"], batch)
  other = dict(batch, label=jnp.where(batch["weight"] == 0, 2, batch["label"]))
  assert 0.05 < 1 - float(batch["weight"].mean()) < 0.9
  jax.tree.map(np.testing.assert_array_equal, grad(variables["params"], other), (loss, grads))
  nothing = dict(batch, weight=jnp.zeros_like(batch["weight"]))
  loss, grads = grad(variables["params"], nothing)
  assert loss == 0 and not any(x.any() for x in jax.tree.leaves(grads))


@pytest.mark.thorough
def test_the_second_head_adds_its_loss(config):
  config.decoder.update(auxiliary=0.4, dropout_rate=0.0)
  task = built(config)
  variables, key = moved(task), jax.random.key(0)
  batch = task.prepare(key, task.datasets()["train"].arrays(), train=True)
  loss, aux = jax.jit(task.loss)(variables, batch, key)
  logits, second = jax.jit(lambda v, x: task.model.apply(v, x, train=True))(
    variables, batch["image"]
  )
  assert second.shape == (16, 2, 2, 3)
  second = jax.image.resize(second, (16, 8, 8, 3), "linear")
  of = lambda logits: by_numpy(logits, *(np.asarray(batch[k]) for k in ("label", "weight")))["loss"]
  np.testing.assert_allclose(loss.value(), of(logits) + 0.4 * of(second), rtol=1e-5)
  np.testing.assert_allclose(aux.metrics["loss"].value(), of(logits), rtol=1e-5)


def test_ids_become_classes_without_the_void_one(config):
  config.data.void = 1
  config.data.classes = "a,b,c"
  task = tasks.find("segmentation")(config)
  mask = np.array([[[0, 1], [2, 3]]], np.uint8)
  batch = task.prepare(None, {"image": np.zeros((1, 2, 2, 3), np.uint8), "mask": mask}, train=False)
  np.testing.assert_array_equal(batch["label"], [[[0, 0], [1, 2]]])
  np.testing.assert_array_equal(batch["weight"], [[[1, 0], [1, 1]]])


@pytest.mark.thorough
def test_the_curvature_s_labels_are_those_at_the_grid_s_centres(config):
  config.model.patch_size, config.data.image_size = 8, 16  # a grid of 8 for 16 pixels
  task = built(config)
  batch = task.prepare(jax.random.key(0), task.datasets()["train"].arrays(), train=True)
  found = jax.jit(task.curvature_view())(moved(task), batch)
  chosen = np.asarray(batch["label"])[:, 1::2, 1::2].reshape(16, -1)
  np.testing.assert_array_equal(found.targets, chosen)
  np.testing.assert_array_equal(
    found.weights, np.asarray(batch["weight"])[:, 1::2, 1::2].reshape(16, -1)
  )


@pytest.fixture
def by_kfac(config):
  """Twelve steps of K-FAC on scanned blocks."""
  config.model.scan_blocks = True
  config.data.update(smallest_scale=1.0, largest_scale=1.0)
  config.update(num_steps=12, eval_steps=6)
  config.optimizer = config_lib.optimizer("kfac", learning_rate=0.1, damping=1e-2, factor_decay=0.5)
  config.optimizer.update(factor_period=3, inverse_period=6)
  return config


@pytest.mark.thorough
def test_kfac_sees_the_decoder_s_grid(by_kfac):
  run = experiment.build(by_kfac)
  shapes = jax.eval_shape(run.problem.predict, run.problem.params, run.problem.batch)
  assert shapes.outputs.shape == (8, 64, 3) and shapes.weights.shape == (8, 64)
  blocks = optimizers.curvature_blocks(by_kfac.optimizer, run.problem)
  kinds = {block.name: block.kind for block in blocks}
  [stack] = [block for block in blocks if block.name == "backbone/MixerBlocks/token_mixing/Dense_0"]
  assert stack.kind == "kronecker" and stack.stacked == (2,)
  assert kinds["fusion/conv"] == kinds["up_2/dense"] == kinds["head"] == "kronecker"


@pytest.mark.thorough
def test_kfac_lowers_the_loss(by_kfac):
  [_, (_, row)] = loop.evaluations(experiment.build(by_kfac))
  assert row["test/loss"] < 0.9 * np.log(3)


@pytest.mark.thorough
def test_a_run_goes_on_bit_for_bit_predicts_and_draws(config, tmp_path):
  whole = loop.train(config, str(tmp_path / "whole"))
  parts = shutil.copytree(whole, tmp_path / "parts")
  shutil.rmtree(parts / "checkpoints" / "4")
  loop.train(config, str(parts))
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  kept = [
    Checkpoints(p, read_only=True).restore_variables("latest", device) for p in (whole, parts)
  ]
  jax.tree.map(np.testing.assert_array_equal, *kept)
  run, variables, step = restore.restore(str(whole))
  found = predict.arrays(run, variables)
  assert step == 4 and found["outputs"].shape == found["targets"].shape == (7, 20, 24)
  assert found["outputs"].dtype == np.uint8 and set(np.unique(found["weights"])) == {0, 1}
  assert found["class_names"].tolist() == ["0", "1", "2"]
  image = np.zeros((13, 30, 3), np.uint8)
  Image.fromarray(image).save(tmp_path / "a.png")
  [answer] = run.task.answer(variables, [str(tmp_path / "a.png")])
  assert sum(answer["shares"].values()) == pytest.approx(1) and answer["shares"].keys() <= {*"012"}
  assert list(answer["shares"].values()) == sorted(answer["shares"].values(), reverse=True)
  assert run.task.pictures(variables, run.datasets["test"]).keys() == {"masks", "confusion"}
  assert run.task.prepared_pictures(jax.random.key(0)).keys() == {"augmented"}


@pytest.mark.thorough
def test_a_backbone_starts_from_weights_of_a_classifier_and_leaves_its_head(config, tmp_path):
  fields = dict(patch_size=4, hidden_dim=8, num_blocks=2, tokens_mlp_dim=8, channels_mlp_dim=8)
  model = models.build("mixer_small", 10, **fields)
  params = jax.jit(model.init)(jax.random.key(7), jnp.zeros((1, 8, 8, 3)))["params"]
  pretrained.save(tmp_path / "a.npz", params, model)
  config.pretrained = str(tmp_path / "a.npz")
  config = tasks.find("segmentation").complete(config)
  task = built(config)
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  found = task.initial(shapes, restore.stored)
  kept = {name: tree for name, tree in params.items() if name != "head"}
  jax.tree.map(np.testing.assert_array_equal, dict(task.backbone(found)), kept)
  assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, shapes)


@pytest.mark.parametrize(
  "field, value",
  [
    ("decoder.blocks", (0, 1, 2, 3)),
    ("data.image_size", 10),
    ("resize_tokens", "block_diagonal"),
    ("model.name", "resnet18"),  # it has no tokens
  ],
)
def test_a_mistake_names_its_field(config, field, value):
  config.update_from_flattened_dict({field: value})
  with pytest.raises(UserError, match=field):
    built(config).datasets()


def test_labels_of_eight_bits_do_not_wrap():
  labels = np.array([0, 20, 5, 13], np.uint8)
  for metric in (Hits, MeanIou):
    assert metric.of(labels, labels.astype(np.int32), 21).value() == 1


@pytest.mark.parametrize("ade", [False, True])
def test_another_folder_is_tested_as_by_numpy(config, ade, tmp_path):
  """By the classes of the answers to its images, which are larger than those of the run."""
  root, size = files.write(tmp_path, {"other": 4}, (24, 28)), (4, 24, 28)
  places = [root / "other", root / "otherannot"]
  if ade:
    for i, name in enumerate(("images", "annotations")):
      (root / name).mkdir()
      places[i] = places[i].rename(root / name / "other")
  config.data.test_sets = f"other={places[0]}"
  run = experiment.build(config)
  variables = moved(run.task)
  read = lambda place: np.stack([np.asarray(Image.open(place / f"a{i}.png")) for i in range(4)])
  images, masks = map(read, places)
  logits = np.zeros((*size, 3))
  np.put_along_axis(logits, run.task.classes(variables, images)[..., None].astype(int), 9.0, -1)
  expected = by_numpy(logits, np.where(masks == files.VOID, 0, masks), masks != files.VOID)
  found = Evaluator(run, "other")(variables)
  assert [found[k] for k in ("miou", "accuracy")] == pytest.approx(
    [expected[k] for k in ("miou", "accuracy")], rel=1e-6
  )


def test_class_weights_are_those_of_the_pixels(config, pairs):
  """Balanced by the files' own masks; void pixels have no weight."""
  config.class_weight, config.decoder.dropout_rate = "balanced", 0.0
  masks = np.stack([np.asarray(Image.open(pairs / "trainannot" / f"a{i}.png")) for i in range(16)])
  counts = np.bincount(masks[masks != files.VOID], minlength=3)
  wanted = counts.sum() / (3 * counts)
  run = experiment.build(config)
  arrays = {k: jnp.asarray(x[:4]) for k, x in run.datasets["train"].arrays().items()}
  batch = jax.device_get(run.task.prepare(jax.random.key(0), arrays, train=True))
  inside = batch["weight"] > 0
  np.testing.assert_allclose(batch["weight"][inside], wanted[batch["label"][inside]], rtol=1e-5)
  assert 0 < inside.mean() < 1
  variables = moved(run.task)
  logits = run.task.model.apply(variables, batch["image"])[0]
  logits = np.float64(jax.image.resize(logits, (4, 8, 8, 3), "linear", antialias=False))
  own = np.take_along_axis(logits, batch["label"][..., None], -1)[..., 0]
  losses, weights = np.log(np.exp(logits).sum(-1)) - own, batch["weight"]
  loss = run.task.loss(variables, batch, jax.random.key(0))[0].value()
  np.testing.assert_allclose(loss, (weights * losses).sum() / weights.sum(), rtol=1e-4)


def test_each_class_has_its_intersection_over_union(config):
  run = experiment.build(config)
  variables, arrays = moved(run.task), run.datasets["test"].arrays()
  found, masks = run.task.classes(variables, arrays["image"]), arrays["mask"]
  scores = Evaluator(run)(variables, per_class=True)
  for c in range(3):
    a, b = masks == c, (found == c) & (masks != files.VOID)
    expected = (a & b).sum() / (a | b).sum() if (a | b).any() else np.nan
    assert scores[f"iou/{c}"] == pytest.approx(expected, nan_ok=True)
