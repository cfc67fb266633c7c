"""Other classes and resolutions, against their meaning for images and tokens."""

import logging

import jax
import numpy as np
from PIL import Image
import pytest

from mixer_jax import pretrained
from mixer_jax.errors import UserError
from mixer_jax.options import pair
from tests.pretrained.conftest import FAMILIES, random_params, run, shapes


def saved(tmp_path, family, size, **fields):
  """Random weights of a small model, read back from a file."""
  params = random_params(FAMILIES[family](**fields), size)
  pretrained.save(tmp_path / "w.npz", params, image_size=size)
  return params, pretrained.read(str(tmp_path / "w.npz"))


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.first(1)
def test_block_diagonal_mixes_each_tile_as_the_small_net_does(tmp_path, family, times):
  """K times larger images of K x K tiles (Mixer paper, Appendix C)."""
  side, grid = 24, 3
  params, weights = saved(tmp_path, family, side)
  fields = weights.model_fields(side * times, "block_diagonal")
  big = FAMILIES[family](**fields)
  fitted = weights.fit(shapes(big, side * times), "block_diagonal")
  # Tile by tile [2, times, times, side, side, 3], and put together to big images.
  tiles = np.random.default_rng(1).normal(size=(2, times, times, side, side, 3))
  images = tiles.swapaxes(2, 3).reshape(2, side * times, side * times, 3)
  _, tokens = run(big, fitted, images)
  found = tokens.reshape(2, times, grid, times, grid, -1).swapaxes(2, 3)
  _, expected = run(FAMILIES[family](), params, tiles.reshape(-1, side, side, 3))
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=0, atol=1e-5 * scale)


def resized(tokens, old, new, kind):
  """Tokens [old grid, channels] on the new grid, by Pillow, which takes the width first."""
  old, new = pair(old), pair(new)
  channels = [Image.fromarray(c.reshape(old).astype(np.float32)) for c in tokens.T]
  return np.stack([np.asarray(c.resize(new[::-1], kind)).ravel() for c in channels], axis=1)


def dense(x, layer):
  """Over tokens, of [tokens, channels]."""
  return (x.T @ layer["kernel"] + layer["bias"]).T


def mixer_layer(x, block):
  hidden = np.asarray(jax.nn.gelu(dense(x, block["token_mixing"]["Dense_0"])))
  return dense(hidden, block["token_mixing"]["Dense_1"])


LAYERS = {
  "mixer": ("MixerBlock_1", mixer_layer),
  "resmlp": ("ResMlpBlock_1", lambda x, block: dense(x, block["cross_patch"])),
  "gmlp": ("GmlpBlock_1", lambda x, block: dense(x, block["spatial_gating"]["Dense_0"])),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_block_diagonal_of_rectangles(tmp_path, family):
  """Tiles of 2x3 patches of 8x4 pixels, two below each other and three beside each other."""
  size, times, patch = (16, 12), (2, 3), dict(patch_size=(8, 4))
  params, weights = saved(tmp_path, family, size, **patch)
  assert (weights.patch_size, weights.grid, weights.only_size) == ((8, 4), (2, 3), size)
  fields = weights.model_fields((32, 36), "block_diagonal")
  big = FAMILIES[family](**fields | patch)
  fitted = weights.fit(shapes(big, (32, 36)), "block_diagonal", grid=(4, 9))
  tiles = np.random.default_rng(1).normal(size=(2, *times, *size, 3))
  images = tiles.swapaxes(2, 3).reshape(2, 32, 36, 3)
  _, tokens = run(big, fitted, images)
  found = tokens.reshape(2, 2, 2, 3, 3, -1).swapaxes(2, 3)
  _, expected = run(FAMILIES[family](**patch), params, tiles.reshape(-1, *size, 3))
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("old, new", [((2, 6), (3, 4)), ((4, 3), (2, 6)), ((2, 3), (5, 4))])
@pytest.mark.parametrize("family", FAMILIES)
def test_interpolation_of_rectangles(tmp_path, family, old, new):
  """Also of as many tokens on another grid, which are no longer those of the file."""
  side = lambda grid: (8 * grid[0], 8 * grid[1])
  params, weights = saved(tmp_path, family, side(old))
  model = shapes(FAMILIES[family](), side(new))
  fitted = weights.fit(model, "interpolate_bilinear", grid=new)
  block, layer = LAYERS[family]
  x = np.random.default_rng(2).normal(size=(new[0] * new[1], 16))
  pillow = Image.Resampling.BILINEAR
  expected = resized(layer(resized(x, new, old, pillow), params[block]), old, new, pillow)
  np.testing.assert_allclose(layer(x, fitted[block]), expected, rtol=1e-5, atol=1e-5)
  with pytest.raises(UserError, match=f"w.npz mixes a {old[0]}x{old[1]} grid .* {new[0]}x{new[1]}"):
    weights.fit(model, grid=new)


@pytest.mark.parametrize("old, new", [(3, 4), (4, 3), (3, 6), (4, 2)])
@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.first(2)
def test_interpolation_does_on_the_new_grid_what_was_done_on_the_old(
  tmp_path, family, kind, old, new
):
  params, weights = saved(tmp_path, family, 8 * old)
  fitted = weights.fit(shapes(FAMILIES[family](), 8 * new), f"interpolate_{kind}")
  block, layer = LAYERS[family]
  x = np.random.default_rng(2).normal(size=(new * new, 16))
  pillow = getattr(Image.Resampling, kind.upper())
  expected = resized(layer(resized(x, new, old, pillow), params[block]), old, new, pillow)
  np.testing.assert_allclose(layer(x, fitted[block]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("resize", ["", *pretrained.RESIZES])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.first(2)
def test_equal_grids_change_nothing(tmp_path, family, resize):
  params, weights = saved(tmp_path, family, 32)
  fitted = weights.fit(shapes(FAMILIES[family]()), resize)
  jax.tree.map(np.testing.assert_array_equal, fitted, params)


def test_convolutions_fit_any_resolution(tmp_path):
  params, weights = saved(tmp_path, "resmlp", 32, patch_communication="depthwise")
  model = FAMILIES["resmlp"](patch_communication="depthwise")
  jax.tree.map(np.testing.assert_array_equal, weights.fit(shapes(model, 64)), params)


def test_another_number_of_classes_gets_a_zero_head(tmp_path, caplog):
  params, weights = saved(tmp_path, "mixer", 32)
  with caplog.at_level(logging.INFO):
    same = weights.fit(shapes(FAMILIES["mixer"]()))
    assert "head" not in caplog.text
    np.testing.assert_array_equal(same["head"]["kernel"], params["head"]["kernel"])
    other = weights.fit(shapes(FAMILIES["mixer"](num_classes=7)))
  assert "w.npz has a head for 5 classes; fresh zero head for 7" in caplog.text
  assert other["head"]["kernel"].shape == (16, 7)
  assert not np.any(other["head"]["kernel"]) and not np.any(other["head"]["bias"])
  for name in params.keys() - {"head"}:
    jax.tree.map(np.testing.assert_array_equal, other[name], params[name])
