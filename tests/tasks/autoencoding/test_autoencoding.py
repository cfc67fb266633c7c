"""The task of autoencoders against NumPy, and through the commands."""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax import tasks
from mixer_jax.errors import UserError
from mixer_jax.optim.curvature import likelihoods
from mixer_jax.rundir import metrics_file
from mixer_jax.tasks.autoencoding import autoencoder, pixels
from mixer_jax.training import loop
from mixer_jax.training.checkpoint import Checkpoints
from tests import children
from tests.tasks import runs

LIKELIHOODS = ("normal", "bernoulli")


def grey_rows(images, side):
  """Grey images by Pillow, [n, side * side] in [0, 1]."""
  grey = images.astype(np.float32).mean(3) / 255
  resize = lambda x: Image.fromarray(x, "F").resize((side, side), Image.Resampling.BILINEAR)
  return np.stack([np.asarray(resize(x)).ravel() for x in grey])


@pytest.fixture(scope="module")
def images(tmp_path_factory):
  """An .npz with images of smooth shades, and its arrays."""
  rng, arrays = np.random.default_rng(0), {}
  for split, n in (("train", 48), ("test", 9)):
    small = rng.uniform(0, 255, (n, 3, 3, 3)).astype(np.uint8)
    large = [np.asarray(Image.fromarray(x).resize((12, 12), Image.BILINEAR)) for x in small]
    arrays |= {f"{split}_images": np.stack(large), f"{split}_labels": np.arange(n) % 2}
  path = tmp_path_factory.mktemp("data") / "a.npz"
  np.savez(path, **arrays)
  return path, arrays


@pytest.fixture(params=LIKELIHOODS)
def config(request, images):
  config = config_lib.default("autoencoding", "autoencoder_small")
  config.update(likelihood=request.param, batch_size=16, eval_batch_size=4)
  config.model.widths = (6, 3)
  config.data.update(name="npz", dir=str(images[0]), image_size=6)
  return config


@pytest.fixture
def task(config):
  config_lib.check(config)
  return tasks.find("autoencoding")(config)


@pytest.fixture
def variables(task):
  return runs.shaken(jax.jit(task.init)(jax.random.key(0)), 0.2)


def reconstructed(params, x, likelihood):
  """Outputs and codes by NumPy, float64."""
  dense = lambda name, x: x @ np.float64(params[name]["kernel"]) + params[name]["bias"]
  code = dense("code", np.tanh(dense("encoder_0", x)))
  return dense("output", np.tanh(dense("decoder_0", code))), code


def test_images_are_resized_as_pillow_does(task, images):
  for name, split in task.datasets().items():
    expected = grey_rows(images[1][f"{name}_images"], 6)
    np.testing.assert_allclose(split.arrays()["image"], expected, atol=2e-6)


def test_colours_are_kept_and_sizes_may_stay(images):
  data = pixels.PixelData("npz", str(images[0]), image_size=12, grey=False)
  found = pixels.load(data).splits["test"].arrays()["image"]
  np.testing.assert_allclose(found.reshape(9, 12, 12, 3), images[1]["test_images"] / 255, atol=1e-6)


@pytest.mark.first(1)
def test_losses_and_metrics_are_those_of_numpy(task, variables, config):
  x = np.float64(task.datasets()["test"].arrays()["image"])
  outputs, _ = reconstructed(variables["params"], x, config.likelihood)
  means, mask = outputs, np.arange(9) != 4
  losses = np.square(outputs - x).sum(1)
  if config.likelihood == "bernoulli":
    means = 1 / (1 + np.exp(-outputs))
    losses = -(x * np.log(means) + (1 - x) * np.log(1 - means)).sum(1)
  squares = np.square(means - x).sum(1)
  spread = np.square(x - task.datasets()["train"].arrays()["image"].mean(0)).sum(1)
  expected = {"loss": losses[mask].mean(), "error": squares[mask].mean()}
  expected["unexplained"] = squares[mask].sum() / spread[mask].sum()
  if config.likelihood == "normal":
    expected.pop("error")  # the loss
  batch = task.prepare(None, {"image": jnp.float32(x)}, train=False)
  found = task.evaluate(variables, batch, jnp.array(mask))
  assert {k: pytest.approx(float(v.value()), rel=1e-5) for k, v in found.items()} == expected
  loss, aux = task.loss(variables, batch, jax.random.key(0))
  np.testing.assert_allclose(loss.value(), losses.mean(), rtol=1e-5)
  assert aux.metrics == {"loss": loss}


@pytest.mark.first(1)
def test_the_loss_is_the_one_that_kfac_takes(task, variables):
  """The gradient of each image's loss is that of minus the log-likelihood."""
  images = jnp.asarray(task.datasets()["test"].arrays()["image"])
  outputs, targets, *_ = task.predict(variables, {"image": images})
  mean = lambda y: jnp.sum(task._losses(y, images))
  of_kfac = likelihoods.likelihood_of(task.likelihood).gradient(outputs, targets)
  np.testing.assert_allclose(jax.grad(mean)(outputs), of_kfac, atol=1e-5)


def test_codes_and_reconstructions(task, variables, config):
  x = task.datasets()["test"].arrays()["image"]
  outputs, codes = reconstructed(variables["params"], x, config.likelihood)
  found = task.representations(variables, {"image": x})
  np.testing.assert_allclose(found["codes"], codes, atol=1e-5)
  means = outputs if config.likelihood == "normal" else 1 / (1 + np.exp(-outputs))
  np.testing.assert_allclose(found["reconstructions"], means.reshape(9, 6, 6, 1), atol=1e-5)
  figure = task.pictures(variables, task.datasets()["test"])["reconstructions"]
  shown = [axis.images[0].get_array() for axis in figure.axes]
  np.testing.assert_allclose(shown[0], x[0].reshape(6, 6))
  np.testing.assert_allclose(shown[9], np.clip(means[0], 0, 1).reshape(6, 6), atol=1e-5)


def test_published_shapes():
  """Parameters of the networks that Martens and Grosse train; Hinton's for MNIST is 784-...-30."""
  sizes = {"mnist": (784, 2_837_314), "curves": (784, 842_340), "faces": (625, 7_537_655)}
  for name, (inputs, parameters) in sizes.items():
    model = autoencoder.VARIANTS[f"autoencoder_{name}"]()
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, inputs)))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == parameters


def test_sparse_weights():
  kernel = autoencoder.sparse(15, 0.25)(jax.random.key(0), (200, 300))
  counts = np.count_nonzero(kernel, axis=0)
  assert (counts == 15).all()
  drawn = np.asarray(kernel)[np.nonzero(kernel)]
  np.testing.assert_allclose(drawn.std(), 0.25, rtol=0.05)
  uses = np.count_nonzero(kernel, axis=1)  # 22.5 on average, binomial
  assert 5 < uses.min() and uses.max() < 45


def test_images_before_a_broken_one_are_answered(task, variables, tmp_path):
  paths = [str(tmp_path / f"{i}.png") for i in range(6)]  # a batch has 4
  for i, path in enumerate(paths[:5]):
    Image.fromarray(np.full((8, 8, 3), 40 * i, np.uint8)).save(path)
  pathlib.Path(paths[5]).write_bytes(b"no image")
  answers = task.answer(variables, paths)
  assert [next(answers)["path"] for _ in range(5)] == paths[:5]
  with pytest.raises(UserError, match="5.png"):
    next(answers)
  assert not list(task.answer(variables, []))


@pytest.mark.parametrize("stored", [0, 10])
def test_a_file_is_answered_as_in_its_split(config, variables, stored, tmp_path):
  """Files of 30x24 pixels, stored as squares of 10, and of 12x12, stored as they are."""
  shape, rng = ((24, 30) if stored else (12, 12), np.random.default_rng(0))
  for split in ("train", "test"):
    for i in range(4):
      folder = tmp_path / "set" / split / f"class{i % 2}"
      folder.mkdir(parents=True, exist_ok=True)
      Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)).save(folder / f"{i}.png")
  config.data.update(name="folder", dir=str(tmp_path / "set"), stored_size=stored)
  config.data.cache_dir = str(tmp_path / "cache")
  task, again = (tasks.find("autoencoding")(config) for _ in range(2))
  split = task.datasets()["test"]
  again.recall(json.loads(json.dumps(task.notes())))
  files = [tmp_path / "set" / os.fsdecode(path) for path in split.paths]
  answers = list(again.answer(variables, list(map(str, files))))
  codes = task.representations(variables, {"image": split.arrays()["image"]})["codes"]
  np.testing.assert_allclose([a["code"] for a in answers], codes, rtol=1e-4, atol=1e-6)


def test_images_that_are_not_square_are_refused():
  with pytest.raises(UserError, match="8x6"):
    pixels.rows(np.zeros((4, 6, 8, 3), np.uint8), pixels.PixelData("npz"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, images):
  """The directory of a run whose rates overshoot, and its config."""
  config = config_lib.default("autoencoding", "autoencoder_small")
  config.update(batch_size=16, num_steps=14, eval_steps=2, checkpoint_steps=4, eval_batch_size=16)
  config.mesh.data = 1
  config.model.widths = (6, 3)
  config.data.update(name="npz", dir=str(images[0]), image_size=6)
  options = dict(damping=1e-2, factor_decay=0.8, factor_period=1, inverse_period=2)
  config.optimizer = config_lib.optimizer("kfac", 0.5, norm_constraint=1.0, **options)
  return loop.train(config, str(tmp_path_factory.mktemp("runs") / "run")), config


@pytest.mark.thorough
def test_it_is_resumed_bit_for_bit(run, tmp_path):
  runs.assert_kill_changes_nothing(run[1], tmp_path, 5, whole=run[0])


def test_the_best_checkpoint_has_the_lowest_loss(run):
  path, _ = run
  rows = metrics_file.read(path)
  losses = {row["step"]: row["test/loss"] for row in rows}
  best = min(losses, key=losses.get)
  assert best < rows[-1]["step"] and losses[best] < 0.9 * losses[2]  # it overshot after it
  assert (rows[-1]["test/best_step"], rows[-1]["test/best_loss"]) == (best, losses[best])
  assert Checkpoints(path, read_only=True).find("best") == best


@pytest.mark.thorough
def test_it_is_evaluated_and_predicted_and_drawn(run, images, tmp_path):
  workdir, path = f"--workdir={run[0]}", tmp_path
  row = metrics_file.read(run[0])[-1]
  ended = children.command(path / "log", "evaluate", workdir)
  assert ended.code == 0, ended.err
  assert f"loss {row['test/loss']:.6g}" in ended.out.splitlines()[-1]
  ended = children.command(path / "log", "predict", workdir, f"--out={path}/p.npz")
  shapes = "codes [9, 3], outputs [9, 36], reconstructions [9, 6, 6, 1], targets [9, 36]"
  assert ended.code == 0 and shapes in ended.out, ended.err
  found = np.load(path / "p.npz")
  squares = np.square(found["reconstructions"].reshape(9, 36) - found["targets"]).sum(1)
  assert squares.mean() == pytest.approx(row["test/loss"], rel=1e-5)

  Image.fromarray(images[1]["test_images"][0]).save(path / "a.png")
  ended = children.command(path / "log", "predict", workdir, f"{path}/a.png")
  assert ended.code == 0, ended.err
  answer = json.loads(ended.out.splitlines()[-1])
  np.testing.assert_allclose(answer["code"], found["codes"][0], rtol=1e-4)
  assert answer["error"] == pytest.approx(squares[0], rel=1e-4)
  ended = children.command(path / "log", "report.__main__", "pictures", workdir)
  assert ended.code == 0 and ended.out.endswith("pictures/reconstructions.png\n"), ended.err


@pytest.mark.thorough
def test_settings_of_jax_change_no_connection(config):
  config.model.initializer = "sparse"
  runs.assert_settings_change_no_draw(config)


def test_images_that_are_not_square_are_resized_as_by_pillow():
  images = np.random.default_rng(0).integers(0, 256, (3, 12, 20, 3)).astype(np.uint8)
  data = pixels.PixelData("npz", image_size=(6, 10))
  assert data.shape == (6, 10, 1)
  grey = images.astype(np.float32).mean(3) / 255
  wanted = [Image.fromarray(x, "F").resize((10, 6), Image.Resampling.BILINEAR) for x in grey]
  found = pixels.rows(images, data)
  np.testing.assert_allclose(found, np.stack(wanted).reshape(3, 60), atol=1e-6)
