"""The zoo: names, options and the roles of parameters."""

import jax
import jax.numpy as jnp
import pytest

from mixer_jax import models, options
from mixer_jax.models import layers, translation_blocks
from tests.models.common import shapes_of

SMALL = dict(patch_size=4, hidden_dim=8, num_blocks=1)


# Models that cut images into patches.
PATCHES = [name for name in models.VARIANTS if "patch_size" in models.fields(name)]


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.first(5)
def test_every_variant_builds_for_its_own_images(name):
  size, fields = models.image_size(name), models.fields(name)
  found = shapes_of(models.build(name, 10, scan_blocks=True), size)
  blocks = {k: shape for k, shape in found.items() if "Blocks/" in k}
  assert blocks and {shape[0] for shape in blocks.values()} == {fields["num_blocks"]}
  assert found["stem/kernel"] == (*[fields["patch_size"]] * 2, 3, fields["hidden_dim"])
  assert found["head/kernel"] == (fields["hidden_dim"], 10)


@pytest.mark.parametrize(
  "name, fields",
  [
    ("mixer_small", {}),
    ("resmlp_s12", dict(pooling="class_mlp")),
    ("resmlp_s12", dict(normalization="layer_norm")),
    ("amlp_small", {}),
    ("tmlp_small", {}),
    ("resnet_20", {}),
  ],
)
def test_parameters_are_float32_where_jax_has_64_bits(name, fields):
  small = SMALL if name in PATCHES else dict(stages=(1,), width=8)
  model = models.build(name, 10, **small, **fields)
  with jax.enable_x64(True):
    found = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 3), jnp.float32))
  assert {str(x.dtype) for x in jax.tree.leaves(found)} == {"float32"}


@pytest.mark.parametrize(
  "layer", [layers.Affine(bias_axes=2), layers.LayerScale(0.1), translation_blocks.TokenDense(4)]
)
def test_layers_outside_the_zoo_have_float32_parameters_there_too(layer):
  with jax.enable_x64(True):
    found = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 3, 4), jnp.float32))
  assert {str(x.dtype) for x in jax.tree.leaves(found)} == {"float32"}


def test_images_of_32_pixels_are_for_the_small_patches():
  small = {name for name in PATCHES if models.image_size(name) == 32}
  assert small == {name for name in PATCHES if models.fields(name)["patch_size"] == 4}
  assert {models.image_size(name) for name in models.VARIANTS} == {32, 224}


@pytest.mark.parametrize("cls", [models.Mixer, models.ResMlp, models.Gmlp, models.ResNet])
def test_every_field_is_an_option(cls):
  fields = set(cls.__dataclass_fields__) - {"num_classes", "feature_blocks", "parent", "name"}
  assert set(options.of(cls)) == fields
