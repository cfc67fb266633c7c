import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from mixer_jax.errors import UserError
from mixer_jax.images import augment
from mixer_jax.images.image_data import ImageData


def augmentation(size, **fields):
  plain = dict(pad=0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
  return ImageData(image_size=size, **plain | fields)


def _images(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize(
  "height,width,size", [(32, 32, 256), (20, 33, 64), (300, 200, 96), (50, 400, 128)]
)
@pytest.mark.first(2)
def test_resize_is_that_of_pillow_and_jax(height, width, size):
  images = _images(2, height, width, 3)
  ours = augment.eval_input(images, augmentation(size, resize=size))
  by_jax = jax.image.resize(
    images.astype(np.float32) / 255, (2, size, size, 3), "bilinear", antialias=True
  )
  np.testing.assert_allclose(ours, by_jax, atol=1e-5)
  for image, ours_one in zip(images, ours):
    by_pillow = (
      np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)) / 255
    )
    np.testing.assert_allclose(
      ours_one, by_pillow, atol=1 / 255 + 1e-6
    )  # Pillow rounds after each axis.


def test_images_that_a_resize_distorts_are_told(caplog):
  augment.check_stored(augmentation(32, resize=36), (40, 40, 3))
  assert not caplog.text
  augment.check_stored(augmentation(32, resize=36), (40, 32, 3))
  assert "data.resize=36 makes 36x36 of images of 32x40 pixels" in caplog.text


def test_centre_crop_is_the_middle_of_the_resized_image():
  images = _images(2, 32, 32, 3)
  whole = augment.eval_input(images, augmentation(256, resize=256))
  cropped = augment.eval_input(images, augmentation(224, resize=256))
  np.testing.assert_allclose(cropped, whole[:, 16:240, 16:240], atol=1e-6)


def test_normalises_by_hand_values():
  images = np.full((1, 1, 1, 3), [0, 51, 255], np.uint8)
  spec = augmentation(1, mean=(0.5, 0.1, 0.0), std=(0.25, 0.1, 2.0))
  out = augment.eval_input(images, spec)
  np.testing.assert_allclose(out[0, 0, 0], [-2.0, 1.0, 0.5], atol=1e-6)
  assert out.dtype == jnp.float32


def test_padded_crops_are_windows_of_the_padded_image_and_all_occur():
  image = _images(1, 4, 4, 3)
  padded = np.pad(image[0], ((1, 1), (1, 1), (0, 0)))
  windows = [padded[y : y + 4, x : x + 4] for y in range(3) for x in range(3)]
  windows += [window[:, ::-1] for window in windows]
  spec = augmentation(4, pad=1)
  out = augment.train_input(jax.random.key(0), np.repeat(image, 500, 0), spec) * 255
  counts = [
    sum(np.allclose(one, window, atol=1e-3) for one in np.asarray(out)) for window in windows
  ]
  assert sum(counts) == 500  # Each is exactly one of the windows,
  assert min(counts) > 10  # and all 18 of them occur (28 expected of each).


def test_flips_half_of_the_images_and_none_without_flip():
  images = np.repeat(_images(1, 8, 8, 3), 400, 0)
  out = augment.train_input(jax.random.key(1), images, augmentation(8)) * 255
  flipped = np.isclose(out, images[:, :, ::-1], atol=1e-3).all((1, 2, 3))
  same = np.isclose(out, images, atol=1e-3).all((1, 2, 3))
  assert (flipped ^ same).all() and 150 < flipped.sum() < 250
  out = augment.train_input(jax.random.key(1), images, augmentation(8, flip=False))
  np.testing.assert_array_equal(out, augment.eval_input(images, augmentation(8)))


def test_random_crop_of_a_resized_image_is_one_of_its_windows():
  images = np.repeat(_images(1, 6, 9, 3), 40, 0)
  whole = np.asarray(augment.eval_input(images[:1], augmentation(16, resize=16)))[0]
  windows = np.stack([whole[y : y + 13, x : x + 13] for y in range(4) for x in range(4)])
  out = augment.train_input(
    jax.random.key(2), images, augmentation(13, resize=16, flip=False, random_crop=True)
  )
  matches = np.isclose(np.asarray(out)[:, None], windows, atol=1e-5).all((2, 3, 4))
  assert (matches.sum(1) == 1).all()
  assert matches.any(0).sum() > 8


def test_resized_training_images_are_test_images_up_to_a_flip():
  images = _images(8, 32, 32, 3)
  spec = augmentation(28, resize=32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
  test = np.asarray(augment.eval_input(images, spec))
  for one, plain in zip(np.asarray(augment.train_input(jax.random.key(3), images, spec)), test):
    assert np.allclose(one, plain, atol=1e-5) or np.allclose(one, plain[:, ::-1], atol=1e-5)


def test_depends_on_the_key_only_and_jit_changes_nothing():
  images, spec = _images(16, 32, 32, 3), augmentation(32, pad=4)
  plain = augment.train_input(jax.random.key(0), images, spec)
  jitted = jax.jit(augment.train_input, static_argnums=2)
  np.testing.assert_allclose(jitted(jax.random.key(0), images, spec), plain, atol=1e-6)
  assert not np.allclose(jitted(jax.random.key(1), images, spec), plain)


def test_another_size_is_refused():
  with pytest.raises(
    UserError, match="the images are 30 pixels high and 32 wide; set .* or data.stored_size to 224"
  ):
    augment.eval_input(np.zeros((1, 30, 32, 3), np.uint8), augmentation(224))
