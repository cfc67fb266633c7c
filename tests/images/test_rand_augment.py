"""Each operation against Pillow, and how often each is chosen."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
import pytest
import scipy.ndimage

from mixer_jax.images import colour, decode, rand_augment, sources, tfds_images, warp
from mixer_jax.images.policy import Augment
from mixer_jax.images.rand_augment import OPERATIONS

FILL = (125, 12, 240)
SIZE = (24, 32)  # height and width
NONE = len(OPERATIONS)


def _affine(*numbers):
  how = dict(resample=Image.Resampling.BILINEAR, fillcolor=FILL)
  return lambda i: i.transform(i.size, Image.Transform.AFFINE, numbers, **how)


def _add(number):
  table = [min(255, i + number) if i < 128 else i for i in range(256)]
  return lambda i: i.point(table * 3)


def _rotate(degrees):
  return lambda i: i.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=FILL)


def _enhance(name):
  return lambda factor: lambda i: getattr(ImageEnhance, name)(i).enhance(factor)


# By name: a function of the argument that gives one of an image, and some arguments.
PILLOW = {
  "AutoContrast": (lambda _: ImageOps.autocontrast, (0,)),
  "Equalize": (lambda _: ImageOps.equalize, (0,)),
  "Invert": (lambda _: ImageOps.invert, (0,)),
  "Rotate": (_rotate, (-30, -7.3, 0, 27, 90)),
  "Posterize": (
    lambda bits: lambda i: ImageOps.posterize(i, bits) if bits else i.point([0] * 768),
    range(9),
  ),
  "Solarize": (lambda at: lambda i: ImageOps.solarize(i, at), (0, 26, 200, 256)),
  "SolarizeAdd": (_add, (0, 55, 110)),
  **{
    name: (_enhance(name), (0.0, 0.1, 0.77, 1.0, 1.9))
    for name in ("Color", "Contrast", "Brightness", "Sharpness")
  },
  "ShearX": (lambda x: _affine(1, x, 0, 0, 1, 0), (-0.3, 0.13)),
  "ShearY": (lambda x: _affine(1, 0, 0, x, 1, 0), (-0.3, 0.13)),
  "TranslateX": (lambda x: _affine(1, 0, x, 0, 1, 0), (-14.4, -3, 0.5, 20)),
  "TranslateY": (lambda x: _affine(1, 0, 0, 0, 1, x), (-14.4, -3, 0.5, 20)),
}


@pytest.fixture(scope="module")
def images():
  """Photographs, noise, an even colour, two values and a ramp: uint8 [n, *SIZE, 3]."""
  records = tfds_images.Source(sources.SAMPLE_NAME, str(sources.SAMPLE_DIR)).read("test")
  natural = [decode.decode_image(records.read(i)[0], records.where(i))[4:28] for i in range(4)]
  noise = np.random.default_rng(0).integers(0, 256, (2, *SIZE, 3), np.uint8)
  even, two = np.full((*SIZE, 3), (7, 128, 255), np.uint8), np.zeros((*SIZE, 3), np.uint8)
  two[:3, :5] = (200, 3, 17)
  ramp = np.arange(np.prod(SIZE) * 3).reshape(*SIZE, 3) // 12 + 20
  return np.stack([*natural, *noise, even, two, ramp.astype(np.uint8)])


@pytest.fixture(scope="module")
def run():
  return jax.jit(lambda *x: rand_augment.apply(*x, jnp.array(FILL)))


def test_single_operations_are_those_of_pillow(images, run):
  cases = [(i, n, v) for i in range(len(images)) for n in OPERATIONS for v in PILLOW[n][1]]
  kinds = [[OPERATIONS.index(name)] for _, name, _ in cases]
  found = run(
    images[[i for i, _, _ in cases]],
    np.array(kinds),
    np.array([[v] for *_, v in cases], np.float32),
  )
  for one, (i, name, value) in zip(np.asarray(found, int), cases):
    expected = np.asarray(PILLOW[name][0](value)(Image.fromarray(images[i])), int)
    far = np.abs(one - expected).max(-1) > 2
    # A pixel may be in or out at the very edge, where float32 and float64 differ.
    assert far.sum() <= (2 if name == "Rotate" else 0), (i, name, value)


@pytest.mark.thorough
def test_pairs_are_one_after_the_other(images, run):
  """But of two geometric ones, which are tested below."""
  rng, cases = np.random.default_rng(1), []
  while len(cases) < 60:
    names = rng.choice(OPERATIONS, 2)
    if not set(names) <= set(warp.GEOMETRY) and "Equalize" != names[1] != "AutoContrast":
      cases.append([(n, rng.choice(PILLOW[n][1])) for n in names])
  seen = rng.integers(0, 4, len(cases))
  kinds = np.array([[OPERATIONS.index(n) for n, _ in case] for case in cases])
  values = np.array([[v for _, v in case] for case in cases], np.float32)
  found = np.asarray(run(images[seen], kinds, values), int)
  for one, i, case in zip(found, seen, cases):
    expected = Image.fromarray(images[i])
    for name, value in case:
      value = int(value) if name in ("Posterize", "Solarize") else value
      expected = PILLOW[name][0](value)(expected)
    # The second one may magnify a difference of one level, and thresholds jump.
    differ = np.abs(one - np.asarray(expected, int)) > 4
    assert differ.mean() < 0.02, case


def test_two_geometric_operations_interpolate_once(images, run):
  kinds = np.array([[OPERATIONS.index(n) for n in ("Rotate", "TranslateX")]])
  found = np.asarray(run(images[:1], kinds, np.array([[20.0, 6.0]], np.float32)))[0]
  height, width = SIZE
  y, x = np.mgrid[:height, :width] + 0.5
  x = x + 6
  outside = (x < 0) | (x >= width)
  angle, a, b = np.radians(20), x - width / 2, y - height / 2
  x = np.cos(angle) * a - np.sin(angle) * b + width / 2
  y = np.sin(angle) * a + np.cos(angle) * b + height / 2
  outside |= (x < 0) | (x >= width) | (y < 0) | (y >= height)
  planes = [
    scipy.ndimage.map_coordinates(
      images[0, ..., c].astype(float), [y - 0.5, x - 0.5], order=1, mode="nearest"
    )
    for c in range(3)
  ]
  expected = np.where(outside[..., None], FILL, np.stack(planes, -1))
  assert outside.any() and (np.abs(found - expected).max(-1) > 2).sum() <= 2


def test_without_an_operation_images_stay(images, run):
  kinds, values = np.full((len(images), 1), NONE), np.zeros((len(images), 1), np.float32)
  np.testing.assert_array_equal(run(images, kinds, values), images)


def test_arguments_are_those_of_timm():
  """By its formulas in Python, for both signs and scales."""
  for sign in (1, -1):
    for m in (0.0, 3.3, 9.0, 9.37, 10.0):
      plain, grown = (
        {k: float(v) for k, v in rand_augment.arguments(m / 10, sign, inc, (24, 32)).items()}
        for inc in (False, True)
      )
      factor, changed = m / 10 * 1.8 + 0.1, max(0.1, 1 + sign * m / 10 * 0.9)
      for name in ("Color", "Contrast", "Brightness", "Sharpness"):
        np.testing.assert_allclose((plain[name], grown[name]), (factor, changed), rtol=1e-6)
      assert (plain["Posterize"], grown["Posterize"]) == (int(m / 10 * 4), 4 - int(m / 10 * 4))
      assert (plain["Solarize"], grown["Solarize"]) == (int(m * 25.6), 256 - int(m * 25.6))
      assert plain["SolarizeAdd"] == grown["SolarizeAdd"] == int(m * 11)
      moved = dict(Rotate=3 * m, ShearX=0.03 * m, ShearY=0.03 * m)
      moved |= dict(TranslateX=0.045 * m * 32, TranslateY=0.045 * m * 24)
      for name, value in moved.items():
        np.testing.assert_allclose(grown[name], sign * value, rtol=1e-5)


def within(count, n, p):
  """Whether a binomial count is within five standard deviations."""
  return abs(count - n * p) <= 5 * np.sqrt(n * p * (1 - p))


@pytest.mark.thorough
def test_rates_of_operations_and_their_strength():
  n = 20_000
  kinds, values = rand_augment.draw(jax.random.key(0), n, Augment(policy="rand"), SIZE)
  kinds, values = np.asarray(kinds), np.asarray(values)
  assert within((kinds == NONE).sum(), 2 * n, 0.5)
  for i in range(NONE):
    for place in (0, 1):
      assert within((kinds[:, place] == i).sum(), n, 0.5 / NONE)
  assert within((kinds[:, 0] == kinds[:, 1]).sum(), n, 0.25 + 0.25 / NONE)  # independent
  angles = values[kinds == OPERATIONS.index("Rotate")]
  assert within((angles > 0).sum(), len(angles), 0.5)
  levels = np.abs(angles) / 3  # normal of mean 9 and deviation 0.5, cut at 10
  assert levels.max() <= 10 + 1e-5 and within((levels > 10 - 1e-5).sum(), len(levels), 0.02275)
  assert abs(levels.mean() - 9) < 0.1 and 0.4 < levels.std() < 0.55
  other = dict(probability=1.0, magnitude_noise=0.0, magnitude=5.0, operations=3)
  kinds, values = rand_augment.draw(jax.random.key(1), 50, Augment(**other), SIZE)
  assert kinds.shape == (50, 3) and (np.asarray(kinds) < NONE).all()
  np.testing.assert_allclose(np.abs(values[kinds == OPERATIONS.index("Rotate")]), 15, rtol=1e-6)


def test_three_augment_is_grey_solarise_or_blur(images):
  n = 300
  out = jax.jit(rand_augment.three_augment)(jax.random.key(0), np.repeat(images[:1], n, 0))
  grey = np.asarray(ImageOps.grayscale(Image.fromarray(images[0])))[..., None].repeat(3, -1)
  solarized = np.asarray(ImageOps.solarize(Image.fromarray(images[0]), 128))
  out = np.asarray(out)
  is_grey, is_solar = ((out == x).all((1, 2, 3)) for x in (grey, solarized))
  assert within(is_grey.sum(), n, 1 / 3) and within(is_solar.sum(), n, 1 / 3)
  assert not (is_grey & is_solar).any()
  blurred = out[~(is_grey | is_solar)].astype(float)
  spread = blurred.std((1, 2, 3))
  assert (blurred[0] != images[0]).any() and spread.max() <= images[0].std() + 0.5
  assert spread.min() < 0.9 * spread.max()  # radii differ


@pytest.mark.parametrize("radius", [0.1, 0.8, 2.0])
@pytest.mark.first(1)
def test_blur_is_gaussian_and_near_pillow_s(images, radius):
  for image in images[3:5]:
    found = np.asarray(warp.blurred(jnp.asarray(image), radius), float)
    sigma = (radius, radius, 0)
    exact = scipy.ndimage.gaussian_filter(
      image.astype(float), sigma, mode="nearest", truncate=8 / radius
    )
    assert np.abs(found - exact).max() < 0.51 + 1e-3
  # Of a photograph, where three boxes and a Gaussian are alike.
  by_boxes = Image.fromarray(images[0]).filter(ImageFilter.GaussianBlur(radius))
  found = np.asarray(warp.blurred(jnp.asarray(images[0]), radius), float)
  assert np.abs(found - by_boxes).mean() < 2


def _turned(move):
  """Moves the hue of an image by a share of its circle, pixel by pixel, in Python's own HSV."""

  def turn(image):
    pixels = np.asarray(image).reshape(-1, 3) / 255
    hsv = [colorsys.rgb_to_hsv(*pixel) for pixel in pixels]
    rgb = np.array([colorsys.hsv_to_rgb((h + move) % 1, s, v) for h, s, v in hsv])
    return Image.fromarray(np.uint8(255 * rgb.reshape(*image.size[::-1], 3) + 0.5))

  return turn


@pytest.mark.parametrize("most", [(0.3, 0.3, 0.3), (0.4, 0.4, 0.2, 0.1)])
@pytest.mark.first(1)
def test_jitter_is_pillow_s_in_some_order(images, most):
  image = images[0]
  n, kinds = 60, len(most)
  out = jax.jit(rand_augment.colour_jitter, static_argnums=2)(
    jax.random.key(3), np.repeat(image[None], n, 0), most
  )
  drawn = np.asarray(jax.random.uniform(jax.random.key(3), (n, kinds, 2)))
  orders = drawn[..., 0].argsort(1)
  moves = np.array(most)[orders] * (2 * drawn[..., 1] - 1)
  for one, order, each in zip(np.asarray(out, int), orders, moves):
    expected = Image.fromarray(image)
    for kind, move in zip(order, each):
      blended = _enhance(("Brightness", "Contrast", "Color")[min(kind, 2)])
      expected = (blended(float(1 + move)) if kind < 3 else _turned(move))(expected)
    assert np.abs(one - np.asarray(expected, int)).max() <= 2
  assert len({tuple(order) for order in orders}) >= 6


def test_a_moved_hue_is_that_of_hsv():
  pixels = np.random.default_rng(1).integers(0, 256, (20, 30, 3), np.uint8)
  pixels[0], pixels[1, :, 0], pixels[2, :, 1] = 77, pixels[1, :, 1], pixels[2, :, 2]  # grey, ties
  for move in (-0.5, -0.1, 0.0, 0.037, 0.5):
    found = np.asarray(jax.jit(colour.hue_moved)(pixels, move), int)
    assert np.abs(found - np.asarray(_turned(move)(Image.fromarray(pixels)), int)).max() <= 1


def test_a_grey_value_is_pillow_s(images):
  for image in images:
    np.testing.assert_array_equal(
      colour.grey(image), np.asarray(Image.fromarray(image).convert("L"))
    )
