"""Crops at random scales, against Pillow; images and masks stay together."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from mixer_jax.tasks.segmentation import augment
from mixer_jax.tasks.segmentation.data import SegmentationData
from tests.tasks.segmentation import files

HOW = SegmentationData(image_size=16, void=files.VOID, jitter=0.0, mean=(0, 0, 0), std=(1, 1, 1))


def inputs(n=24):
  rng = np.random.default_rng(0)
  return tuple(np.stack(x) for x in zip(*(files.example(rng, (40, 48)) for _ in range(n))))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("scale, x, y", [(0.55, 0.2, 0.4), (1.9, 0.9, 0.1)])
@pytest.mark.first(1)
def test_a_crop_is_pillow_s(scale, x, y, flip):
  rng = np.random.default_rng(1)
  image, mask = rng.integers(0, 256, (40, 48, 3), np.uint8), files.example(rng, (40, 48))[1]
  drawn = jnp.array([(scale - 0.5) / 1.5, y, x, 0.0 if flip else 0.9])
  found, ids, inside = augment._placed(drawn, image, mask, HOW)
  length = 16 / scale
  box = (x * (48 - length), y * (40 - length))
  box = (*box, box[0] + length, box[1] + length)
  cut = lambda array, how: np.asarray(Image.fromarray(array).resize((16, 16), how, box=box))
  turned = lambda array: array[:, ::-1] if flip else array
  expected = cut(image, Image.Resampling.BILINEAR).astype(int)
  assert np.asarray(inside).all()
  assert np.abs(turned(np.asarray(found)).astype(int) - expected).max() <= 2
  np.testing.assert_array_equal(turned(np.asarray(ids)), cut(mask, Image.Resampling.NEAREST))


def test_colours_and_labels_stay_together():
  images, masks = inputs()
  how = dataclasses.replace(HOW, image_size=28)
  found, ids = jax.jit(lambda k: augment.train_input(k, images, masks, how))(jax.random.key(0))
  found, ids = np.asarray(found) * 255, np.asarray(ids)
  outside = (found == 0).all(-1)
  assert (ids[outside] == files.VOID).all() and 0.02 < outside.mean() < 0.6
  moves = list(itertools.product((-2, -1, 0, 1, 2), repeat=2))
  same = [(np.roll(ids, m, (1, 2)) == ids) & ~np.roll(outside, m, (1, 2)) for m in moves]
  flat = np.all(same, axis=0)
  flat[:, :2] = flat[:, -2:] = flat[:, :, :2] = flat[:, :, -2:] = False
  assert flat.mean() > 0.15
  assert np.abs(found - files.colours(ids))[flat].max() <= 2
  assert set(np.unique(ids[flat])) >= {0, 1, 2}


@pytest.mark.thorough
def test_scales_places_and_mirror_images_have_the_wanted_rates():
  """Columns of an image that is its own coordinate tell the place of each crop."""
  n, how = 400, SegmentationData(image_size=8, jitter=0.0, mean=(0, 0, 0), std=(1 / 255,) * 3)
  ramp = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None] + 20, (200, 200, 3))
  images, masks = np.stack([ramp] * n), np.zeros((n, 200, 200), np.uint8)
  found, ids = jax.jit(lambda k: augment.train_input(k, images, masks, how))(jax.random.key(1))
  assert not np.asarray(ids).any()
  steps = np.asarray(found)[:, 4, 6, 0] - np.asarray(found)[:, 4, 1, 0]
  assert abs((steps < 0).mean() - 0.5) < 4 * np.sqrt(0.25 / n)
  scales = 5 / np.abs(steps)
  assert scales.min() > 0.42 and scales.max() < 2.6
  assert abs(np.median(scales) - 1.25) < 0.12


@pytest.mark.thorough
def test_jitter_changes_colours_alone():
  images, masks = inputs(4)
  both = []
  for how in (HOW, dataclasses.replace(HOW, jitter=0.4)):
    crop = jax.jit(lambda k, how=how: augment.train_input(k, images, masks, how))
    both.append(crop(jax.random.key(0)))
  np.testing.assert_array_equal(both[0][1], both[1][1])
  outside = (np.asarray(both[0][0]) == 0).all(-1)
  assert (np.asarray(both[1][0])[outside] == 0).all()
  assert np.abs(both[0][0] - both[1][0]).max() > 0.05
