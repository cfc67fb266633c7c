"""Images and patches that are not square, from the command line to the weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

import mixer_jax
from mixer_jax import config as config_lib
from mixer_jax import experiment, models, pretrained, tasks
from mixer_jax.errors import UserError
from mixer_jax.images import augment, crops, sources
from mixer_jax.images.image_data import ImageData
from mixer_jax.images.views import Views, views
from mixer_jax.options import pair
from mixer_jax.tasks.segmentation import augment as mask_augment
from mixer_jax.tasks.segmentation.data import SegmentationData
from tests import children
from tests.tasks import runs
from tests.tasks.segmentation import files

PLAIN = dict(mean=(0.0,) * 3, std=(1.0,) * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Two classes of PNGs, 18 to 22 pixels high and 30 wide: bright at the left, or at the right."""
  root, rng = tmp_path_factory.mktemp("wide"), np.random.default_rng(0)
  for split, number in (("train", 16), ("test", 6)):
    for i in range(number):
      image = rng.integers(0, 60, (18 + i % 5, 30, 3)).astype(np.uint8)
      name = ("left", "right")[i % 2]
      image[:, :15] += 150 * (name == "left")
      image[:, 15:] += 150 * (name == "right")
      (root / split / name).mkdir(parents=True, exist_ok=True)
      Image.fromarray(image).save(root / split / name / f"{i}.png")
  return root


def fields(folder, **more):
  own = dict(image_size=(12, 16), stored_size=(18, 24), resize=(15, 20), random_crop=True, pad=0)
  return own | dict(name="folder", dir=str(folder), cache_dir=str(folder / "cache")) | more


def test_a_command_line_takes_a_side_or_both():
  config = config_lib.default()
  fields = ["data.image_size=(64,96)", "model.patch_size=8,16", "data.stored_size=32"]
  config_lib.check(config_lib.override(config, [*fields, "data.resize=[72, 108]"]))
  data = ImageData(**{k: config.data[k] for k in ("image_size", "resize")})
  assert (pair(data.image_size), pair(data.resize)) == ((64, 96), (72, 108))
  assert (config.model.patch_size, config.data.stored_size) == ((8, 16), 32)
  again = config_lib.from_json(json.loads(config.to_json()))
  config_lib.check(again)
  assert pair(again.data.image_size) == (64, 96)
  for field in ("data.image_size=(64,60)", "data.image_size=(60,96)", "data.image_size=(64,)"):
    with pytest.raises(UserError, match="data.image_size is"):
      config_lib.check(config_lib.override(config_lib.default(), [*fields, field]))


@pytest.mark.thorough
def test_a_run_from_the_command_line_to_its_weights_and_a_run_that_starts_from_them(
  folder, tmp_path
):
  sizes = [f"--config.data.{k}={v}" for k, v in fields(folder, cache_dir=tmp_path / "c").items()]
  model = dict(patch_size=(4, 8), hidden_dim=16, num_blocks=1, tokens_mlp_dim=8)
  sizes += [f"--config.model.{k}={v}" for k, v in model.items()]
  common = ["--config=configs/quickstart.py:adam", "--config.mesh.data=1", *sizes]
  common += ["--config.batch_size=8", "--config.num_steps=40", "--config.eval_steps=40"]
  run, weights = f"--workdir={tmp_path / 'run'}", str(tmp_path / "w.npz")
  done = children.command(tmp_path / "log", "main", *common, run)
  assert done.code == 0, done.err
  again = children.command(tmp_path / "log", "main", *common, run)
  assert again.code == 0 and "done: " in again.out, again.err
  image = next((folder / "test" / "right").glob("*.png"))
  asked = children.command(tmp_path / "log", "predict", run, str(image))
  answer = json.loads(next(x for x in asked.out.splitlines() if x.startswith("{")))
  assert answer["class"] == "right"
  # The same by Pillow and NumPy from the weights that the run exports.
  assert children.command(tmp_path / "log", "export", run, f"--out={weights}").code == 0
  read = pretrained.read(weights)
  assert (read.patch_size, read.grid) == ((4, 8), (3, 2))
  net = models.build("mixer_small", 2, channels_mlp_dim=512, **model)
  params = read.fit(
    jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 12, 16, 3)))["params"]
  )
  stored = Image.new("RGB", (24, 18))
  whole = Image.open(image)
  whole = whole.resize((24, round(24 * whole.size[1] / 30)), Image.Resampling.BILINEAR)
  stored.paste(whole, (0, round((18 - whole.size[1]) / 2)))
  crop = np.asarray(stored.resize((20, 15), Image.Resampling.BILINEAR), float)[1:13, 2:18]
  logits = np.asarray(net.apply({"params": params}, (crop[None] / 255 - 0.5) / 0.5))[0]
  expected = np.exp(logits[1]) / np.exp(logits).sum()
  assert answer["probability"] == pytest.approx(expected, abs=2e-2)
  drawn = children.command(tmp_path / "log", "report", "weights", run)
  assert drawn.code == 0, drawn.err
  assert json.loads((tmp_path / "run/weights/weights.json").read_text())["grid"] == [3, 2]
  # On twice as many patches side by side.
  again = [f"--config.pretrained={weights}", "--config.resize_tokens=interpolate_bilinear"]
  again += ["--config.data.image_size=(12,32)", "--config.data.resize=(15,40)"]
  wider = children.command(
    tmp_path / "log", "main", *common, *again, f"--workdir={tmp_path / 'wider'}"
  )
  assert wider.code == 0, wider.err
  assert mixer_jax.load_run(str(tmp_path / "wider")).task.read_images([image]).shape[1:3] == (
    18,
    24,
  )


def test_patches_are_those_of_numpy():
  images = np.random.default_rng(0).normal(size=(2, 12, 16, 3)).astype(np.float32)
  net = models.build("mixer_small", 0, patch_size=(4, 8), hidden_dim=6, num_blocks=1)
  variables = runs.shaken(net.init(jax.random.key(0), images))
  _, state = net.apply(variables, images, capture_intermediates=lambda m, _: m.name == "stem")
  found = np.asarray(state["intermediates"]["stem"]["__call__"][0])
  stem = variables["params"]["stem"]
  patches = images.reshape(2, 3, 4, 2, 8, 3).swapaxes(2, 3).reshape(2, 3, 2, -1)
  wanted = patches @ stem["kernel"].reshape(-1, 6) + stem["bias"]
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fit", ["pad", "crop", "squash"])
def test_files_are_fitted_to_a_rectangle(fit):
  """An image of 20x40 pixels, height first, to 12x16: two fifths of its size, or three."""
  ramp = np.arange(800, dtype=np.uint32).reshape(20, 40) * 255 // 799
  image = Image.fromarray(np.stack([ramp] * 3, -1).astype(np.uint8))
  found = np.asarray(crops.fitted(image, (12, 16), fit))
  resize = lambda w, h: np.asarray(image.resize((w, h), Image.Resampling.BILINEAR))
  if fit == "pad":
    wanted = np.pad(resize(16, 8), ((2, 2), (0, 0), (0, 0)))
  else:
    wanted = resize(24, 12)[:, 4:20] if fit == "crop" else resize(16, 12)
  np.testing.assert_array_equal(found, wanted)


def test_crops_on_the_device_are_windows_of_the_resized_image():
  images = np.random.default_rng(0).integers(0, 256, (5, 18, 24, 3)).astype(np.uint8)
  how = ImageData(image_size=(12, 16), resize=(15, 20), random_crop=True, flip=False, **PLAIN)
  whole = [
    np.asarray(Image.fromarray(x).resize((20, 15), Image.Resampling.BILINEAR)) for x in images
  ]
  found = np.asarray(augment.eval_input(images, how)) * 255
  np.testing.assert_allclose(found, np.stack(whole)[:, 2:14, 2:18], atol=1.01)
  found = np.asarray(augment.train_input(jax.random.key(0), images, how)) * 255
  windows = lambda x: [x[i : i + 12, j : j + 16] for i in range(4) for j in range(5)]
  for image, crop in zip(whole, found):
    assert min(np.abs(window - crop).max() for window in windows(image)) < 1.01


def test_random_areas_and_views_have_the_size(folder):
  data = ImageData(**fields(folder, crop="inception", stored_size=0, random_crop=False, workers=0))
  data.check()
  loaded = sources.load(data)
  assert loaded.splits["train"].spec["image"].shape == (12, 16, 3)
  image = Image.open(next((folder / "test" / "left").glob("*.png")))
  w, h = image.size
  size = (20, 20 * h // w) if 20 / w > 15 / h else (15 * w // h, 15)
  left, top = round((size[0] - 16) / 2), round((size[1] - 12) / 2)  # as torchvision's
  resized = image.resize(size, Image.Resampling.BILINEAR)
  found = crops.centre(image, shorter=(15, 20), size=(12, 16))
  np.testing.assert_array_equal(found, resized.crop((left, top, left + 16, top + 12)))
  images = np.zeros((2, 18, 24, 3), np.uint8)
  found = views(jax.random.key(0), images, Views(local=3), data)
  assert found["global"].shape == (2, 2, 12, 16, 3) and found["local"].shape == (2, 3, 12, 16, 3)
  found = views(jax.random.key(0), images, Views(local=3, local_size=(6, 8)), data)
  assert found["global"].shape == (2, 2, 12, 16, 3) and found["local"].shape == (2, 3, 6, 8, 3)


def test_masks_are_cropped_with_their_images():
  """At their own size a crop is a window, of the image and of the mask alike."""
  rng = np.random.default_rng(0)
  masks = rng.integers(0, 3, (4, 20, 24)).astype(np.uint8)
  images = np.stack([files.colours(mask) for mask in masks])
  how = dict(image_size=(8, 12), smallest_scale=1.0, largest_scale=1.0, flip=False, jitter=0.0)
  how = SegmentationData(**how, **PLAIN)
  found, ids = mask_augment.train_input(jax.random.key(0), images, masks, how)
  assert found.shape == (4, 8, 12, 3) and ids.shape == (4, 8, 12)
  assert how.window_stride == (5, 8)
  for mask, own in zip(masks, np.asarray(ids)):
    windows = (mask[i : i + 8, j : j + 12] for i in range(13) for j in range(13))
    assert any(np.array_equal(window, own) for window in windows)


@pytest.mark.parametrize(
  "task",
  [
    "segmentation",
    *(pytest.param(x, marks=pytest.mark.thorough) for x in ("self_distillation", "distillation")),
  ],
)
def test_other_tasks_take_rectangles(task, folder, tmp_path):
  """A step and an evaluation by shapes; segmentation by pixels of its own windows."""
  config = config_lib.default(task, "mixer_small")
  config.model.update(patch_size=(4, 8), hidden_dim=8, num_blocks=2)
  config.model.update(tokens_mlp_dim=8, channels_mlp_dim=8)
  config.batch_size, config.mesh.data = 8, 1
  if task == "segmentation":
    config.decoder.update(width=8, blocks=(0, 0, 1, 1))
    config.data.update(image_size=(8, 16), examples=16)
  else:
    config.data.update(fields(folder, random_crop=task == "distillation"))
  if task == "self_distillation":
    config.data.update(resize=(15, 20), random_crop=False)
  if task == "distillation":
    own = config_lib.default("image_classification", "mixer_small")
    own.model, own.data = config.model, config.data
    own.update(batch_size=8, num_steps=1)
    own.mesh.data = 1
    children.trained(own, tmp_path / "teacher")
    config.distillation.teacher = str(tmp_path / "teacher")
    config = tasks.find(task).complete(config)
  run = experiment.build(config)
  assert run.loss_shapes[0].total.shape == ()
  kernel = {"segmentation": "backbone", "self_distillation": "backbone"}.get(task)
  params = run.variable_shapes["params"]
  params = params[kernel] if kernel else params
  assert params["stem"]["kernel"].shape == (4, 8, 3, 8)
