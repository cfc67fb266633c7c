"""Views for learning without labels: areas of the crops, rates of the choices, mistakes."""

import functools

import jax
import numpy as np
import pytest
import scipy.stats

from mixer_jax.errors import UserError
from mixer_jax.images.image_data import ImageData
from mixer_jax.images.views import Views, views
from tests.images.test_rand_augment import within

BYTES = ImageData(pad=0, image_size=16, mean=(0, 0, 0), std=(1 / 255,) * 3)
PLAIN = dict(jitter=0.0, grey=0.0, blur=(0, 0, 0), solarise=0.0)


def drawn(images, data=BYTES, **fields):
  run = functools.partial(views, how=Views(**fields), data=data)
  return {k: np.asarray(v) for k, v in jax.jit(run)(jax.random.key(0), images).items()}


def ramps(n, side=64):
  """The numbers of columns and rows as red and green: uint8 [n, side, side, 3]."""
  column, row = np.meshgrid(np.arange(side), np.arange(side))
  image = np.stack([column, row, 0 * row], -1).astype(np.uint8) * 4
  return np.broadcast_to(image, (n, *image.shape))


def accepted(n, low, high, side=64):
  """Shares and logarithms of aspect ratios of the first of ten random rectangles that fits."""
  rng, found = np.random.default_rng(0), []
  while len(found) < n:
    area, ratio = side**2 * rng.uniform(low, high), np.exp(rng.uniform(-1, 1) * np.log(4 / 3))
    w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
    if max(w, h) <= side:
      found.append((w * h / side**2, np.log(w / h)))
  return np.array(found).T


def test_areas_have_the_published_shares_and_half_are_mirrored():
  found = drawn(ramps(300), local=2, local_size=8, **PLAIN)
  assert found["global"].shape == (300, 2, 16, 16, 3)
  assert found["local"].shape == (300, 2, 8, 8, 3)
  for name, low, high in (("global", 0.4, 1.0), ("local", 0.05, 0.4)):
    crops = found[name].reshape(-1, *found[name].shape[2:])
    side = crops.shape[1]
    # Of inner pixels, since the border of the image flattens a ramp.
    slope = lambda x: (x[:, -3] - x[:, 2]) / (side - 5) * side / 256
    across, down = slope(crops[:, side // 2, :, 0]), slope(crops[:, :, side // 2, 1])
    shares, ratios = np.abs(across) * down, np.log(np.abs(across) / down)
    expected, others = accepted(5000, low, high)
    assert scipy.stats.ks_2samp(shares, expected).pvalue > 1e-3
    assert scipy.stats.ks_2samp(ratios, others).statistic < 0.15  # blurred by 8 bits of the ramp
    assert within((across < 0).sum(), len(crops), 0.5)


def test_an_equal_size_is_the_default_and_nothing_is_drawn_twice():
  found = drawn(ramps(20), local=3, **PLAIN)
  assert found["local"].shape == (20, 3, 16, 16, 3)
  both = np.concatenate([found["global"], found["local"]], 1).reshape(100, -1)
  assert len(np.unique(both, axis=0)) == 100
  assert drawn(ramps(2), local=0, **PLAIN)["local"].shape == (2, 0, 16, 16, 3)


def test_rates_of_jitter_grey_and_solarisation():
  n, colour = 1500, np.array([200, 150, 100])
  images = np.broadcast_to(colour.astype(np.uint8), (n, 8, 8, 3))
  data = ImageData(pad=0, image_size=4, mean=(0, 0, 0), std=(1 / 255,) * 3)
  found = drawn(images, data, local=1, blur=(0, 0, 0))
  values = np.concatenate([found["global"], found["local"]], 1)[:, :, 0, 0].round().astype(int)
  grey = np.full(3, round(0.299 * 200 + 0.587 * 150 + 0.114 * 100))
  solarised = lambda x: np.where(x < 128, x, 255 - x)
  is_one = lambda x, *of: np.any([(np.abs(x - y) <= 1).all(-1) for y in of], 0)
  for view in (0, 2):
    assert within(is_one(values[:, view], colour, grey).sum(), n, 0.2)
  assert within((np.ptp(values[:, 0], axis=-1) == 0).sum(), n, 0.2)
  at_all = drawn(images, data, local=1, blur=(0, 0, 0), jitter=0.5)["global"][:, 0, 0, 0]
  unjittered = is_one(at_all.round().astype(int), colour, grey)
  is_grey = np.ptp(at_all, axis=-1) == 0
  assert within((is_grey & unjittered).sum(), unjittered.sum(), 0.2)  # whatever jitter does
  plain = is_one(values[:, 1], colour, grey)
  inverted = is_one(values[:, 1], solarised(colour), solarised(grey))
  assert within(inverted.sum(), n, 0.2 * 0.2) and within((plain | inverted).sum(), n, 0.2)
  assert not is_one(values[:, [0, 2]], solarised(colour)).any()


@pytest.mark.thorough
def test_rates_of_blur():
  n = 400
  images = np.random.default_rng(0).integers(0, 256, (n, 8, 8, 3), np.uint8)
  plain = drawn(images, local=1, **PLAIN)
  found = drawn(images, local=1, **PLAIN | dict(blur=(1, 0.1, 0.5)))
  changed = {k: (found[k] != plain[k]).any((2, 3, 4)).mean(0) for k in plain}
  # Radii start at 0.1, and change nothing up to about 0.3.
  assert 0.85 <= changed["global"][0] <= 1
  assert within(changed["global"][1] * n, n, 0.09)
  assert within(changed["local"][0] * n, n, 0.45)


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(local_share=(0.5, 0.4)), r"^views.local_share is \(0.5, 0.4\); allowed: the least"),
    (dict(jitter_most=(0.4, 0.4, 0.2, 0.6)), "^views.jitter_most is .*allowed: a hue up to 0.5"),
  ],
)
def test_mistakes(fields, message):
  with pytest.raises(UserError, match=message):
    Views(**fields).check()
