"""Pictures of weights and the numbers beside them."""

import json

import jax
import numpy as np
from PIL import Image
import pytest

from mixer_jax import models
from mixer_jax.errors import UserError
from mixer_jax.report import weight_pictures


def mixer_like(blocks=11, tokens=6):
  rng = np.random.default_rng(0)
  kernel = lambda *shape: {"kernel": rng.normal(size=shape)}
  block = lambda: {
    "token_mixing": {"Dense_0": kernel(tokens, 5), "Dense_1": kernel(5, tokens)},
    "LayerNorm_0": {"scale": np.ones(4)},
  }
  return {f"MixerBlock_{i}": block() for i in range(blocks)} | {"stem": kernel(2, 2, 3, 4)}


def test_sparsity_by_hand():
  kernel = np.array([[1.0, -0.049, 0.05], [0.0, -2.0, 0.099]])
  # Below 5% of 2.0, strictly: -0.049, 0.05, 0.0 and 0.099.
  assert weight_pictures.sparsity(kernel) == 4 / 6
  assert weight_pictures.sparsity(np.zeros((2, 2))) == 1.0


def test_layers_are_in_the_order_of_depth_and_scanned_blocks_are_layers_of_their_own():
  expected = weight_pictures.kernels(mixer_like())
  names = [name for name in expected if name.endswith("token_mixing/Dense_0/kernel")]
  assert names == [f"MixerBlock_{i}/token_mixing/Dense_0/kernel" for i in range(11)]
  found = weight_pictures.kernels(models.stacked(mixer_like()))
  assert list(found) == list(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_draws_one_image_per_unit_and_writes_the_numbers(tmp_path):
  params = mixer_like(blocks=2)
  files = weight_pictures.draw(params, (2, 3), tmp_path / "new")
  assert [f.name for f in files] == ["token_mixing.png", "sparsity.png", "weights.json"]
  for picture in files[:2]:
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20  # more than an empty frame
  written = json.loads(files[2].read_text())
  kernel = params["MixerBlock_1"]["token_mixing"]["Dense_1"]["kernel"]
  expected = np.mean(np.abs(kernel) < 0.05 * np.abs(kernel).max())
  assert written["sparsity"]["MixerBlock_1/token_mixing/Dense_1/kernel"] == expected
  assert written["grid"] == [2, 3]


def test_a_model_without_such_a_matrix_is_refused(tmp_path):
  with pytest.raises(UserError, match="the model has no matrix over tokens"):
    convolutions = {"BasicBlock_0": {"conv1": {"kernel": np.ones((3, 3, 4, 4))}}}
    weight_pictures.draw(convolutions, (10, 10), tmp_path)
  with pytest.raises(UserError, match="no token-mixing matrix for 3x3 patches.*MixerBlock_0"):
    weight_pictures.draw(mixer_like(), (3, 3), tmp_path)
