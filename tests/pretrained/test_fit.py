"""Other classes and resolutions, against their meaning for images and tokens."""

import logging
import re

import jax
import numpy as np
from PIL import Image
import pytest

from mixer_jax import pretrained
from mixer_jax.errors import UserError
from tests.pretrained.conftest import FAMILIES, random_params, run, shapes


def saved(tmp_path, family, size, **fields):
  """Random weights of a small model, read back from a file."""
  params = random_params(FAMILIES[family](**fields), size)
  pretrained.save(tmp_path / "w.npz", params)
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


def test_block_diagonal_widens_token_mixing_of_a_mixer_only(tmp_path):
  for family, width in (("mixer", 8 * 9), ("resmlp", None), ("gmlp", None)):
    _, weights = saved(tmp_path, family, 24)
    assert weights.model_fields(72, "block_diagonal").get("tokens_mlp_dim") == width
    assert "tokens_mlp_dim" not in weights.model_fields(72, "interpolate_bilinear")
    assert "tokens_mlp_dim" not in weights.model_fields(24, "block_diagonal")


def resized(tokens, old, new, kind):
  """[old^2, channels] to [new^2, channels], by Pillow."""
  channels = [Image.fromarray(c.reshape(old, old).astype(np.float32)) for c in tokens.T]
  return np.stack([np.asarray(c.resize((new, new), kind)).ravel() for c in channels], axis=1)


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


def test_another_grid_needs_an_option_that_allows_it(tmp_path):
  _, weights = saved(tmp_path, "mixer", 32)
  template = shapes(FAMILIES["mixer"](), 48)
  with pytest.raises(UserError, match="a 4x4 grid of patches, the model one of 6x6.*block_diag"):
    weights.fit(template)
  with pytest.raises(UserError, match="an integer multiple of it, not to 6x6.*interpolate_bil"):
    weights.fit(template, "block_diagonal")
  with pytest.raises(UserError, match="an integer multiple of it, not to 6x6.*interpolate_bil"):
    weights.model_fields(48, "block_diagonal")
  for use in (
    lambda: weights.fit(template, "nearest"),
    lambda: weights.model_fields(48, "nearest"),
  ):
    with pytest.raises(UserError, match="resize_tokens is 'nearest'; known: .*interpolate_bicubic"):
      use()
  # The model is the file's, not one of the width that block-diagonal copies need.
  with pytest.raises(UserError, match=r"Dense_0/kernel of shape \[64, 32\] instead of \[64, 8\]"):
    weights.fit(shapes(FAMILIES["mixer"](), 64), "block_diagonal")


def test_only_square_grids_are_resized(tmp_path):
  _, weights = saved(tmp_path, "mixer", 32)
  images = np.zeros((1, 16, 48, 3))
  template = jax.eval_shape(FAMILIES["mixer"]().init, jax.random.key(0), images)["params"]
  with pytest.raises(UserError, match="the model: 12 tokens are no square grid"):
    weights.fit(template, "interpolate_bilinear")
  with pytest.raises(UserError, match=r"Dense_0/kernel of shape \[16, 8\] instead of \[12, 8\]"):
    weights.fit(template)


# 24 units are no square; nine are, as are the tokens of an image of 24x24 pixels.
@pytest.mark.parametrize("hidden", [24, 9])
@pytest.mark.parametrize("resize", ["", *pretrained.RESIZES])
@pytest.mark.first(1)
def test_a_transposed_kernel_is_named_with_both_shapes(tmp_path, hidden, resize):
  params = random_params(FAMILIES["mixer"](tokens_mlp_dim=hidden))
  first = params["MixerBlock_0"]["token_mixing"]["Dense_0"]
  first["kernel"] = first["kernel"].T
  pretrained.save(tmp_path / "w.npz", params)
  weights = pretrained.read(str(tmp_path / "w.npz"))
  template = shapes(FAMILIES["mixer"](tokens_mlp_dim=hidden))
  wrong = f"_0/token_mixing/Dense_0/kernel of shape [{hidden}, 16] instead of [16, {hidden}]"
  with pytest.raises(UserError, match=rf"model: MixerBlock{re.escape(wrong)}$"):
    weights.fit(template, resize)
  assert weights.num_tokens == 16
  assert weights.model_fields(64, "block_diagonal")["tokens_mlp_dim"] == 4 * hidden
  for block in params.values():  # as a file has them whose writer never transposed
    for layer in block.get("token_mixing", {}).values():
      layer["kernel"] = layer["kernel"].T
  first["kernel"] = first["kernel"].T
  pretrained.save(tmp_path / "w.npz", params)
  if not resize:  # nor is resizing advised for another image
    with pytest.raises(UserError, match=r"_\{0-1\}/token_mixing/Dense_1/bias of shape \[16\] inst"):
      pretrained.read(str(tmp_path / "w.npz")).fit(
        shapes(FAMILIES["mixer"](tokens_mlp_dim=hidden), 24)
      )
  with pytest.raises(UserError, match=re.escape(wrong.replace("_0/", "_{0-1}/", 1))):
    pretrained.read(str(tmp_path / "w.npz")).fit(template, resize)


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


def test_every_difference_is_named_at_once(tmp_path):
  _, weights = saved(tmp_path, "mixer", 32)
  template = shapes(FAMILIES["mixer"](num_blocks=5, channels_mlp_dim=60))
  with pytest.raises(UserError) as caught:
    weights.fit(template)
  message = str(caught.value)
  assert "MixerBlock_{2-4}/token_mixing/Dense_1/bias" in message
  assert "MixerBlock_{0-1}/channel_mixing/Dense_0/kernel" in message
  assert "of shape [16, 64] instead of [16, 60]" in message
  # Blocks 2 to 4 have twelve parameters each; of two blocks two kernels and a bias differ.
  assert message.count("MixerBlock_{2-4}/") == 12
  assert message.count("MixerBlock_{0-1}/") == 3
  assert "\n" not in message


def test_left_over_and_missing_parameters(tmp_path):
  params = random_params(FAMILIES["mixer"]())
  params["MixerBlock_1"]["extra"] = params["MixerBlock_1"].pop("LayerNorm_0")
  params["head"] = {"kernel": params["head"]["kernel"]}
  pretrained.save(tmp_path / "w.npz", params)
  weights = pretrained.read(str(tmp_path / "w.npz"))
  with pytest.raises(UserError) as caught:
    weights.fit(shapes(FAMILIES["mixer"]()))
  missing, left_over = str(caught.value).split("; ")
  assert "missing are" in missing and "head/bias" in missing
  assert "MixerBlock_1/LayerNorm_0/scale, MixerBlock_1/LayerNorm_0/bias" in missing or (
    "MixerBlock_1/LayerNorm_0/bias, MixerBlock_1/LayerNorm_0/scale" in missing
  )
  assert left_over.startswith("left over are ") and left_over.count("MixerBlock_1/extra/") == 2


def test_weights_of_another_family_are_refused(peer):
  weights = pretrained.read(peer("timm_resmlp").path)
  for size in (32, 64):
    with pytest.raises(UserError, match="missing are .*MixerBlock_.*left over are .*ResMlpBlock_"):
      weights.fit(shapes(FAMILIES["mixer"](), size))


@pytest.mark.parametrize("resize", pretrained.RESIZES)
@pytest.mark.first(1)
def test_a_block_of_another_size_is_named(tmp_path, resize):
  params = random_params(FAMILIES["resmlp"]())
  params["ResMlpBlock_1"]["cross_patch"]["kernel"] = np.ones((16, 9), np.float32)
  pretrained.save(tmp_path / "w.npz", params)
  template = shapes(FAMILIES["resmlp"](), 64)
  expected = r"model: ResMlpBlock_1/cross_patch/kernel of shape \[16, 9\] instead of \[64, 64\]$"
  with pytest.raises(UserError, match=expected):
    pretrained.read(str(tmp_path / "w.npz")).fit(template, resize)
