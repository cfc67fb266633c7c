"""Saved files have the layout of Google's, and come back unchanged."""

from flax.core import freeze, unfreeze
import jax
import numpy as np
import pytest

from mixer_jax import pretrained
from tests.pretrained.conftest import FAMILIES, random_params, shapes


@pytest.mark.parametrize("scan", [False, True])
def test_a_saved_mixer_has_the_layout_of_googles_file(peer, tmp_path, scan):
  google = peer("google_mixer").path
  weights = pretrained.read(google)
  params = weights.fit(shapes(FAMILIES["mixer"](scan_blocks=scan)))
  assert ("MixerBlocks" in params) == scan
  pretrained.save(tmp_path / "ours.npz", params)
  # As vit_jax.checkpoint.load and big_vision read it: the names make the tree.
  with np.load(google) as theirs, np.load(tmp_path / "ours.npz", allow_pickle=False) as ours:
    assert sorted(ours.files) == sorted(theirs.files)
    for name in theirs.files:
      np.testing.assert_array_equal(ours[name], theirs[name])
      assert ours[name].dtype == theirs[name].dtype


@pytest.mark.parametrize(
  "family, fields",
  [
    ("mixer", dict(gelu="exact", layer_norm_epsilon=0, token_mixer="mlp")),  # a whole number
    ("resmlp", dict(gelu="tanh", layer_norm_epsilon=1e-5, normalization="layer_norm")),
    ("gmlp", dict(gelu="exact", layer_norm_epsilon=1e-6, gate_epsilon=1e-4, gating="additive")),
  ],
)
@pytest.mark.first(1)
def test_what_is_saved_comes_back(tmp_path, family, fields):
  model = FAMILIES[family](**fields)
  params = random_params(model)
  normalization = pretrained.Normalization((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
  path = tmp_path / "w.npz"
  pretrained.save(path, params, model, normalization)
  weights = pretrained.read(str(path))
  jax.tree.map(np.testing.assert_array_equal, weights.fit(shapes(model)), params)
  assert weights.fields == fields
  assert weights.normalization == normalization
  pretrained.save(path, jax.tree.map(np.negative, params), model)  # replaces it
  again = pretrained.read(str(path))
  np.testing.assert_array_equal(again.arrays["stem/bias"], -params["stem"]["bias"])
  assert again.normalization is None
  assert [p.name for p in tmp_path.iterdir()] == ["w.npz"]


def test_a_failed_save_leaves_what_was_there(tmp_path):
  path = tmp_path / "w.npz"
  pretrained.save(path, {"stem": {"bias": np.ones(3)}})
  before = path.read_bytes()
  with pytest.raises(ValueError):
    pretrained.save(path, {"stem": {"bias": np.ones(3), "kernel": np.array([object()])}})
  assert path.read_bytes() == before
  assert [p.name for p in tmp_path.iterdir()] == ["w.npz"]


def test_frozen_trees_of_scanned_blocks_are_trees(tmp_path):
  model = FAMILIES["mixer"](scan_blocks=True)
  params = random_params(model)
  pretrained.save(tmp_path / "w.npz", freeze(params), model)
  found = pretrained.read(str(tmp_path / "w.npz")).fit(freeze(shapes(model)))
  jax.tree.map(np.testing.assert_array_equal, unfreeze(found), params)
