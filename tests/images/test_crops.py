"""Crops on the host, read off images whose colours are their coordinates."""

import numpy as np
from PIL import Image
import pytest

from mixer_jax.data import order
from mixer_jax.images import crops


def coordinates(width, height):
  """An image whose red is x and whose green is y, in pixels."""
  y, x = np.mgrid[:height, :width]
  return Image.fromarray(np.stack([x, y, 0 * x], axis=-1).astype(np.uint8))


def boxes(width, height, smallest, n=400):
  """[n, 4] left, top, right, bottom of random crops, to about a pixel."""
  image, side = coordinates(width, height), 64
  found = []
  for i in range(n):
    crop = crops.random_area(np.random.default_rng(i), image, smallest, side)
    pixels = np.asarray(crop, float)
    assert pixels.shape == (side, side, 3)
    # The colours grow linearly; the first and last pixel are half a step from the edges.
    step = (pixels[-5, -5] - pixels[4, 4]) / (side - 9)
    low, high = pixels[4, 4] - 4.5 * step, pixels[-5, -5] + 4.5 * step
    found.append([low[0], low[1], high[0], high[1]])
  return np.array(found) + 0.5  # a pixel's colour is that of its left and upper edge


def test_random_areas_are_as_the_paper_says():
  width, height, smallest = 250, 200, 0.2
  left, top, right, bottom = boxes(width, height, smallest).T
  assert left.min() > -2 and top.min() > -2
  assert right.max() < width + 2 and bottom.max() < height + 2
  w, h = right - left, bottom - top
  share = w * h / (width * height)
  assert smallest - 0.02 < share.min() < smallest + 0.05 and 0.85 < share.max() < 1.02
  assert np.log(w / h).min() > np.log(3 / 4) - 0.06
  assert np.log(w / h).max() < np.log(4 / 3) + 0.06
  # Every part of the image is used, and neither shape is preferred.
  assert left.min() < 5 and right.max() > width - 5 and top.min() < 5 and bottom.max() > height - 5
  small = share < 0.5
  assert abs(np.log(w / h)[small].mean()) < 0.05
  assert abs(((left + right) / 2)[small].mean() - width / 2) < 10


@pytest.mark.parametrize(
  "size, box", [((250, 20), (112, 0, 139, 20)), ((20, 250), (0, 112, 20, 139))]
)
def test_what_never_fits_is_the_largest_allowed_centre(size, box):
  found = boxes(*size, smallest=0.9, n=3)
  np.testing.assert_allclose(found, np.tile(box, (3, 1)), atol=1.6)


def test_the_centre_keeps_its_scale():
  # 200x100 becomes 64x32; the middle 24 of those are 75 pixels of the image.
  pixels = np.asarray(crops.centre(coordinates(200, 100), shorter=32, size=24), float)
  assert pixels.shape == (24, 24, 3)
  expected = lambda length: length / 2 - 0.5 + (np.arange(24) - 11.5) * 100 / 32
  np.testing.assert_allclose(pixels[12, :, 0], expected(200), atol=1)
  np.testing.assert_allclose(pixels[:, 12, 1], expected(100), atol=1)


# Sizes, and what torchvision 0.29.1 makes of them: the size once resized, left and top of the crop.
TORCHVISION = {
  ((200, 133), 64, 56): ((96, 64), (20, 4)),
  ((67, 101), 48, 41): ((48, 72), (4, 16)),
  ((50, 33), 40, 31): ((60, 40), (14, 4)),
  ((37, 91), 30, 27): ((30, 73), (2, 23)),
  ((500, 375), 256, 224): ((341, 256), (58, 16)),
}


@pytest.mark.parametrize("case", TORCHVISION)
def test_the_centre_is_that_of_torchvision(case):
  (size, shorter, side), (resized, (left, top)) = case, TORCHVISION[case]
  pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3))
  image = Image.fromarray(pixels.astype(np.uint8))
  whole = np.asarray(image.resize(resized, Image.Resampling.BILINEAR))
  found = np.asarray(crops.centre(image, shorter, side))
  np.testing.assert_array_equal(found, whole[top : top + side, left : left + side])


def test_a_crop_is_a_function_of_seed_epoch_and_example():
  draw = lambda *key: order.crop_rng(*key).random()
  assert draw(1, 2, 3) == draw(1, 2, 3)
  keys = [(1, 2, 3), (2, 1, 3), (1, 3, 2), (1, 2, 0), (1, 2, 4), (0, 0, 0), (0, 0, 1)]
  keys += [(1, 2, 3, 1), (1, 2, 3, 2)]  # copies
  assert len({draw(*key) for key in keys}) == len(keys)
