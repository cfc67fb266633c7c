"""The zoo: names, options and the roles of parameters."""

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import models, options
from mixer_jax.models import absorb, text_heads, translation_blocks

SMALL = dict(patch_size=4, hidden_dim=8, num_blocks=1)


def shapes(model, size=8):
  """The shapes of a model's parameters by path."""
  images = jnp.zeros((1, size, size, 3))
  params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  return {k: x.shape for k, x in traverse_util.flatten_dict(params, sep="/").items()}


# Models that cut images into patches.
PATCHES = [name for name in models.VARIANTS if "patch_size" in models.fields(name)]


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.first(5)
def test_every_variant_builds_for_its_own_images(name):
  size, fields = models.image_size(name), models.fields(name)
  found = shapes(models.build(name, 10, scan_blocks=True), size)
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
  "layer", [absorb.TokenAffine(), text_heads.Bias(), translation_blocks.TokenDense(4)]
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


# By hand: the kind of a layer, and the axes over tokens of its kernel.
ROLES = {
  ("mixer_small", ""): {
    "stem": ("stem", ()),
    "MixerBlock_0/LayerNorm_0": ("norms", ()),
    "MixerBlock_0/token_mixing/Dense_0": ("token_mixing", ("in", "hidden")),
    "MixerBlock_0/token_mixing/Dense_1": ("token_mixing", ("hidden", "out")),
    "MixerBlock_0/LayerNorm_1": ("norms", ()),
    "MixerBlock_0/channel_mixing/Dense_0": ("channel_mixing", ()),
    "MixerBlock_0/channel_mixing/Dense_1": ("channel_mixing", ()),
    "pre_head_layer_norm": ("norms", ()),
    "head": ("head", ()),
  },
  ("mixer_small", "token_mixer=fourier"): {
    **{f"MixerBlock_0/token_mixing/{n}": ("token_mixing", ()) for n in ("q", "k", "v", "out")},
    **{f"MixerBlock_0/token_mixing/{n}_norm": ("norms", ()) for n in ("q", "k")},
  },
  ("resmlp_s12", "pooling=class_mlp"): {
    "ResMlpBlock_0/norm1": ("norms", ()),
    "ResMlpBlock_0/cross_patch": ("token_mixing", ("in", "out")),
    "ResMlpBlock_0/layer_scale_1": ("norms", ()),
    "ResMlpBlock_0/norm2": ("norms", ()),
    "ResMlpBlock_0/cross_channel/Dense_1": ("channel_mixing", ()),
    "ResMlpBlock_0/layer_scale_2": ("norms", ()),
    "class_token": ("stem", ()),
    "ClassMlpBlock_1/cross_patch": ("token_mixing", ()),
    "ClassMlpBlock_1/layer_scale_2": ("norms", ()),
    "ClassMlpBlock_1/cross_channel/Dense_0": ("channel_mixing", ()),
    "norm": ("norms", ()),
    "head": ("head", ()),
  },
  ("resmlp_s12", "patch_communication=mlp"): {
    "ResMlpBlock_0/cross_patch/Dense_0": ("token_mixing", ("in", "hidden")),
    "ResMlpBlock_0/cross_patch/Dense_1": ("token_mixing", ("hidden", "out")),
  },
  ("resmlp_s12", "patch_communication=separable"): {
    "ResMlpBlock_0/cross_patch_pointwise": ("token_mixing", ()),
  },
  ("amlp_small", ""): {
    "GmlpBlock_0/norm": ("norms", ()),
    "GmlpBlock_0/Dense_0": ("channel_mixing", ()),
    "GmlpBlock_0/tiny_attention/qkv": ("token_mixing", ()),
    "GmlpBlock_0/spatial_gating/norm": ("norms", ()),
    "GmlpBlock_0/spatial_gating/Dense_0": ("token_mixing", ("in", "out")),
    "GmlpBlock_0/Dense_1": ("channel_mixing", ()),
    "norm": ("norms", ()),
  },
  ("tmlp_small", ""): {
    "GmlpBlock_0/spatial_gating/ToeplitzDense_0": ("token_mixing", ()),
  },
}


@pytest.mark.parametrize("name, field", ROLES)
@pytest.mark.first(3)
def test_roles_of_parameters(name, field):
  fields = SMALL | ({k: v for k, _, v in [field.partition("=")]} if field else {})
  found = shapes(models.build(name, 5, **fields))
  scanned = set(shapes(models.build(name, 5, scan_blocks=True, **fields)))
  for layer, (kind, axes) in ROLES[name, field].items():
    leaves = {path.rpartition("/")[2] for path in found if path.rpartition("/")[0] == layer}
    assert leaves, layer
    for leaf in leaves:
      path = f"{layer}/{leaf}"
      own = {"kernel": axes, "bias": axes[1:]}.get(leaf, ())
      assert (models.layer_kind(path), models.token_axes(path)) == (kind, own), path
      reads = leaf == "kernel" and axes[:1] == ("in",)
      assert models.reads_tokens(path) == reads
      assert models.is_decayed(path) == (leaf in ("kernel", "diagonals"))
      assert models.layer_kind(f"backbone/{path}") == kind
      assert models.token_axes(f"backbone/{path}") == own
      together = path if layer.startswith("Class") else path.replace("Block_0", "Blocks")
      assert together in scanned
      assert (models.layer_kind(together), models.reads_tokens(together)) == (kind, reads)


@pytest.mark.parametrize("name", ["mixer_small", "resmlp_s12", "gmlp_small"])
@pytest.mark.thorough
def test_a_model_without_a_head_gives_what_the_head_sees(name):
  images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
  whole = models.build(name, 5, **SMALL)
  params = jax.jit(whole.init)(jax.random.key(1), images)["params"]
  params["head"]["kernel"] = jax.random.normal(jax.random.key(2), (8, 5))
  without = models.build(name, 0, **SMALL)
  assert shapes(whole).keys() - shapes(without).keys() == {"head/kernel", "head/bias"}
  features = without.apply({"params": params}, images)
  assert (features.shape, features.dtype) == ((2, 8), jnp.float32)
  logits = np.asarray(features) @ params["head"]["kernel"]
  np.testing.assert_allclose(whole.apply({"params": params}, images), logits, rtol=1e-4, atol=1e-6)


def test_layers_of_other_models_mix_channels():
  assert models.layer_kind("encoder/Dense_0/kernel") == "channel_mixing"
  assert models.token_axes("encoder/Dense_0/kernel") == ()
  assert models.is_decayed("encoder/Dense_0/kernel")
