"""Parameters that a file lacks or has in other shapes, by their names in the file."""

import re

import jax
import numpy as np
import pytest

from mixer_jax import models, pretrained
from mixer_jax.errors import UserError
from tests.pretrained.conftest import FAMILIES, file_arrays, rewrite, shapes

PEERS = ("google_mixer", "timm_mixer", "timm_resmlp", "deit_resmlp", "timm_gmlp")


@pytest.mark.parametrize("classes", [5, 7])
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.first(3)
def test_half_a_head_is_refused(peer, name, classes):
  """A fresh head is for files that have none at all."""
  peer = peer(name)
  arrays, template = file_arrays(peer), shapes(peer.model(num_classes=classes))
  for theirs, ours in zip(sorted(k for k in arrays if k.startswith("head")), ("bias", "kernel")):
    rewrite(peer, {k: v for k, v in arrays.items() if k != theirs})
    with pytest.raises(UserError, match=f"missing are head/{ours}"):
      pretrained.read(peer.path).fit(template)


@pytest.mark.parametrize("resize", ["", "interpolate_bilinear"])
def test_other_patches_are_told_before_the_tokens(peer, resize):
  peer = peer("timm_mixer")
  template = shapes(peer.model(patch_size=4))
  with pytest.raises(UserError, match="patches of 8x8 pixels, the model of 4x4; set the .* to 8$"):
    pretrained.read(peer.path).fit(template, resize)


def test_the_stem_of_a_convnet_has_no_patches(tmp_path):
  make = lambda stem: models.build("resnet_18", 5, width=4, stages=(1, 1, 1, 1), stem=stem)
  of = lambda model: jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 32, 3)))
  large = make("large")
  ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), of(large))
  pretrained.save(tmp_path / "large.npz", pretrained.beside(ones), large)
  with pytest.raises(UserError, match=r"stem/kernel of shape \[7, 7, 3, 4\] instead of \[3, 3"):
    pretrained.read(tmp_path / "large.npz").fit_variables(of(make("small")))


@pytest.mark.parametrize("name", PEERS[1:])
@pytest.mark.first(2)
def test_messages_have_the_names_in_the_file(peer, name):
  peer = peer(name)
  arrays, template = file_arrays(peer), shapes(peer.model())
  for missing in arrays:
    rewrite(peer, {k: v for k, v in arrays.items() if k != missing})
    with pytest.raises(
      UserError, match=rf"missing are [\w/]+ \({re.escape(missing)}(, transposed)?\)$"
    ):
      pretrained.read(peer.path).fit(template)


def test_blocks_are_named_together_as_in_the_file(peer):
  weights = pretrained.read(peer("timm_mixer").path)
  expected = "channel_mixing/Dense_0/kernel (blocks.{0-1}.mlp_channels.fc1.weight, transposed) of"
  with pytest.raises(UserError, match=re.escape(f"{{0-1}}/{expected} shape [16, 64] instead of")):
    weights.fit(shapes(FAMILIES["mixer"](channels_mlp_dim=60)))


@pytest.mark.parametrize("shape", [(8, 2), (1, 16), (16, 1)])
@pytest.mark.parametrize(
  "name", ["blocks.0.norm1.alpha", "norm.beta", "blocks.1.gamma_2", "blocks.0.attn.bias"]
)
@pytest.mark.first(4)
def test_vectors_of_another_shape_are_refused(peer, name, shape):
  peer = peer("deit_resmlp")
  arrays = file_arrays(peer)
  rewrite(peer, arrays | {name: arrays[name].reshape(shape)})
  expected = rf"\({name}\) of shape \[{shape[0]}, {shape[1]}\] instead of \[16\]$"
  with pytest.raises(UserError, match=expected):
    pretrained.read(peer.path).fit(shapes(peer.model()))


def test_a_file_without_a_layer_over_tokens_is_refused_by_name_alone(peer):
  peer = peer("timm_mixer")
  rewrite(peer, {k: v for k, v in file_arrays(peer).items() if "mlp_tokens.fc2" not in k})
  weights = pretrained.read(peer.path)
  assert weights.model_fields(64, "block_diagonal") == weights.fields
  with pytest.raises(UserError, match=r"missing are .*\(blocks.\{0-1\}.mlp_tokens.fc2.bias\)"):
    weights.fit(shapes(peer.model()))


def test_another_grid_hides_no_missing_names(peer):
  peer = peer("timm_mixer")
  arrays = file_arrays(peer)
  rewrite(peer, {k: v for k, v in arrays.items() if k not in ("norm.bias", "norm.weight")})
  template = shapes(peer.model(), 48)
  with pytest.raises(UserError, match=r"missing are [^;]*$"):  # not of arrays that are resized
    pretrained.read(peer.path).fit(template, "interpolate_bilinear")
  with pytest.raises(
    UserError, match=r"missing are .*norm\.(bias|weight).*token_mixing.* of shape"
  ):
    pretrained.read(peer.path).fit(template)
