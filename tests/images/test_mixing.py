"""Mixup, CutMix and erasing against their formulas; random areas against Pillow; rates."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
from PIL import Image
import pytest
import scipy.stats

from mixer_jax.images import augment, mixing, warp
from mixer_jax.images.policy import Augment
from tests.images.test_augment import augmentation
from tests.images.test_rand_augment import within

H, W = 12, 16
mix = jax.jit(mixing.mix, static_argnums=2)


def _coloured(n):
  """Images of one number each: [n, H, W, 3] of 0, 1, ... n - 1."""
  return np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None, None], (n, H, W, 3))


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 4.0])
def test_quantiles_are_those_of_the_beta_distribution(alpha):
  u = np.linspace(0.001, 0.999, 500)
  found = np.asarray(jax.jit(mixing.beta_quantile, static_argnums=1)(u, alpha))
  np.testing.assert_allclose(found, scipy.stats.beta(alpha, alpha).ppf(u), atol=1e-3)


def test_mixup_is_a_mean_of_two_with_beta_shares():
  images = np.random.default_rng(0).normal(size=(600, 2, 2, 3)).astype(np.float32)
  mixed, shares = mix(jax.random.key(0), images, Augment(mixup=0.8))
  s = np.asarray(shares, float)[:, None, None, None]
  np.testing.assert_allclose(mixed, s * images + (1 - s) * images[::-1], atol=1e-5)
  assert scipy.stats.kstest(shares, scipy.stats.beta(0.8, 0.8).cdf).pvalue > 1e-3


def test_cutmix_pastes_a_rectangle_and_counts_what_it_pasted():
  n = 800
  mixed, shares = mix(jax.random.key(1), _coloured(n), Augment(cutmix=1.0))
  own, other = np.arange(n), np.arange(n)[::-1]
  pasted = np.asarray(mixed)[..., 0] == other[:, None, None]
  assert (pasted | (np.asarray(mixed)[..., 0] == own[:, None, None])).all()
  np.testing.assert_allclose(shares, 1 - pasted.mean((1, 2)), atol=1e-6)
  for one in pasted:  # a rectangle is the product of its shadows
    np.testing.assert_array_equal(one, one.any(1)[:, None] & one.any(0))
  # Without the cut at the border the pasted share would have the mean of 1 - lambda, one half.
  assert 0.2 < pasted.mean() < 0.45
  middle = pasted[:, H // 2, W // 2].mean()
  assert middle > 1.5 * pasted[:, 0, 0].mean() > 0


@pytest.mark.parametrize(
  "side, centre, box",
  [
    (0.5, (0.5, 0.5), (4, 3, 8, 6)),
    (0.5, (0.0, 0.99), (0, 8, 4, 4)),
    (0.0, (0.5, 0.5), (8, 6, 0, 0)),
    (1.0, (0.5, 0.5), (0, 0, 16, 12)),
  ],
)
def test_boxes_are_cut_off_at_the_border(side, centre, box):
  cut = jax.jit(lambda s, c: (box := mixing.cut_box(s, c, H, W), mixing.inside(box, H, W)))
  found, inside = cut(np.float32(side), np.array(centre, np.float32))
  np.testing.assert_array_equal(found, box)
  assert inside.sum() == box[2] * box[3]


def test_either_of_both_at_the_rate_of_switch_for_each_example_or_the_batch():
  images = _coloured(1000)
  for switch in (0.5, 0.2):
    mixed, _ = mix(jax.random.key(2), images, Augment(mixup=0.8, cutmix=1.0, switch=switch))
    mixed = np.asarray(mixed)[..., 0]
    is_mixup = ((mixed % 1) != 0).all((1, 2))
    assert within(is_mixup.sum(), 1000, 1 - switch)
  of_batch = jax.jit(jax.vmap(lambda k: mixing.mix(k, images[:4], both)[1]))
  both = Augment(mixup=0.8, cutmix=1.0, mix="batch")
  shares = np.asarray(of_batch(jax.random.split(jax.random.key(3), 50)))
  assert (shares == shares[:, :1]).all() and len(np.unique(shares[:, 0])) > 40


def test_soft_labels_by_hand():
  found = mixing.soft_labels(jnp.array([0, 2, 1]), jnp.array([0.75, 0.5, 1.0]), 4, 0.1)
  hard = np.array([[0.75, 0.25, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]])
  np.testing.assert_allclose(found, 0.9 * hard + 0.1 / 4, atol=1e-6)
  np.testing.assert_allclose(mixing.soft_labels(jnp.array([1]), None, 2, 0.0), [[0, 1]])


def test_a_share_of_images_has_a_rectangle_of_normal_noise():
  n, height, width = 1500, 20, 24
  images = np.full((n, height, width, 3), 7.0, np.float32)
  out = np.asarray(jax.jit(mixing.erase, static_argnums=2)(jax.random.key(0), images, 0.25))
  erased = (out != 7).all(-1)
  np.testing.assert_array_equal(erased, (out != 7).any(-1))
  hit = erased.any((1, 2))
  assert within(hit.sum(), n, 0.25)
  noise = out[erased].astype(float)
  # All images share 1,440 numbers: 0.05 is exceeded with a probability of 0.1%.
  assert scipy.stats.kstest(noise.ravel(), "norm").statistic < 0.05
  shares = erased[hit].mean((1, 2))
  assert 0.01 < shares.min() < 0.05 and 0.28 < shares.max() < 0.36
  assert 0.14 < shares.mean() < 0.2  # a little less than uniform: some large ones do not fit
  for one in erased[hit]:
    rows, columns = one.any(1), one.any(0)
    np.testing.assert_array_equal(one, rows[:, None] & columns)
    assert 0.2 < rows.sum() / columns.sum() < 5
  first, second = (out[i][erased[i]] for i in np.flatnonzero(hit)[:2])
  assert not np.isin(first[:5], second[:5]).any()


def test_random_areas_are_those_of_pillow():
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (40, 33, 3), np.uint8)
  side = 24
  run = jax.jit(jax.vmap(lambda u: warp.random_area(u, jnp.asarray(image), (0.08, 1.0), side)))
  uniform = rng.uniform(size=(40, warp.BOX)).astype(np.float32)
  boxes = jax.jit(jax.vmap(lambda u: warp.random_box(u, (40, 33), (0.08, 1.0), 4 / 3)))(uniform)
  for one, (left, top, w, h) in zip(np.asarray(run(uniform), int), np.asarray(boxes, int)):
    assert left >= 0 and top >= 0 and left + w <= 33 and top + h <= 40
    box = (left, top, left + w, top + h)
    expected = Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR, box=box)
    assert np.abs(one - np.asarray(expected, int)).max() <= 2


def test_the_boxes_of_random_areas_are_as_the_paper_says():
  uniform = jax.random.uniform(jax.random.key(0), (3000, warp.BOX))
  of = jax.jit(jax.vmap(lambda u: warp.random_box(u, (300, 400), (0.2, 1.0), 4 / 3)))
  left, top, w, h = np.asarray(of(uniform)).T
  share, ratio = w * h / (300 * 400), w / h
  assert 0.19 < share.min() < 0.21 and share.max() > 0.95 and (w > 0).all()
  small = share < 0.5  # all of these fit: uniform shares and logarithms of ratios
  assert scipy.stats.kstest(share[small], "uniform", (0.2, 0.3)).pvalue > 1e-4
  low, high = -np.log(4 / 3), np.log(4 / 3)
  assert scipy.stats.kstest(np.log(ratio[small]), "uniform", (low, high - low)).pvalue > 1e-4
  assert left.min() == 0 and (left + w).max() == 400 and (top + h).max() == 300


def test_what_never_fits_is_the_largest_allowed_centre():
  image = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 30, 3), np.uint8))
  uniform = jnp.full(warp.BOX, 0.999)  # nearly the whole area, at a ratio of 4/3
  expected = Image.fromarray(np.asarray(image)).resize((8, 8), 2, box=(12, 0, 17, 4))
  found = np.asarray(
    jax.jit(warp.random_area, static_argnums=(2, 3))(uniform, image, (0.9, 1.0), 8), int
  )
  assert np.abs(found - np.asarray(expected, int)).max() <= 1


FULL = Augment("rand", mixup=0.8, cutmix=1.0, erasing=0.25, smallest_area=0.08)


@pytest.mark.thorough
def test_a_batch_is_a_function_of_the_key_on_one_device_and_on_eight():
  images, how = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3), np.uint8), augmentation(8)

  @functools.partial(jax.jit, static_argnums=2)
  def prepared(key, images, policy):
    return mixing.mix(key, augment.train_input(key, images, how, policy), policy)

  key = jax.random.key(0)
  one, shares = prepared(key, images, FULL)
  assert one.shape == (16, 8, 8, 3) and one.dtype == jnp.float32
  assert not np.allclose(prepared(jax.random.key(1), images, FULL)[0], one)
  mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
  spread = jax.device_put(images, NamedSharding(mesh, PartitionSpec("data")))
  assert mesh.size == 8
  eight, of_eight = prepared(key, spread, FULL)
  np.testing.assert_allclose(eight, one, atol=2e-2)  # a level of a byte: 1/255 times a factor
  np.testing.assert_allclose(of_eight, shares, atol=1e-6)
  assert (np.abs(np.asarray(eight) - one) > 1e-5).mean() < 1e-2
