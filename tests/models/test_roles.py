"""Roles of parameters, by hand: the kind of a layer, and the axes over tokens of its kernel."""

import jax
import numpy as np
import pytest

from mixer_jax import models
from tests.models import test_operators, test_resnet, test_text, test_translation
from tests.models.common import flat, tree_of

SMALL = dict(patch_size=4, hidden_dim=8, num_blocks=1)


def image_model(name, **fields):
  build = lambda **more: models.build(name, 5, **SMALL | fields | more)
  trees = (tree_of(build(scan_blocks=scan), np.zeros((1, 8, 8, 3))) for scan in (False, True))
  return tuple(set(flat(tree)) for tree in trees)


def convnet(name):
  model = models.build(name, 4, **test_resnet.CASES[name])
  return set(flat(tree_of(model, np.zeros((1, 8, 8, 3))))), None


def text_model(backbone, **fields):
  model = test_text.small(backbone, **fields)
  features = np.zeros((3, test_text.TOKENS, 3)) if fields else None
  return set(flat(tree_of(model, *test_text.sequences(), features))), None


def translator(mixing, tied):
  return set(flat(test_translation.shapes(test_translation.small(mixing, tied=tied)))), None


def operator(name):
  model = test_operators.build(name)
  tree = jax.eval_shape(lambda: test_operators.drawn(model, test_operators.CASES[name][0])[0])
  return set(flat(tree["params"])), None


_NORMS, _CHANNELS, _TOKENS = ("norms",), ("channel_mixing",), ("token_mixing",)
_STEM, _HEAD, _SQUARE = ("stem",), ("head",), ("token_mixing", "in", "out")
_IN, _OUT = ("token_mixing", "in", "hidden"), ("token_mixing", "hidden", "out")
# The paths of a model, its layers with kinds and axes.
ROLES = {
  "mixer": (
    lambda: image_model("mixer_small"),
    {
      "stem": _STEM,
      "MixerBlock_0/LayerNorm_0": _NORMS,
      "MixerBlock_0/token_mixing/Dense_0": _IN,
      "MixerBlock_0/token_mixing/Dense_1": _OUT,
      "MixerBlock_0/channel_mixing/Dense_0": _CHANNELS,
      "MixerBlock_0/channel_mixing/Dense_1": _CHANNELS,
      "pre_head_layer_norm": _NORMS,
      "head": _HEAD,
    },
  ),
  "fourier": (
    lambda: image_model("mixer_small", token_mixer="fourier"),
    {f"MixerBlock_0/token_mixing/{n}": _TOKENS for n in ("q", "k", "v", "out")}
    | {f"MixerBlock_0/token_mixing/{n}_norm": _NORMS for n in ("q", "k")},
  ),
  "resmlp": (
    lambda: image_model("resmlp_s12", pooling="class_mlp"),
    {
      "ResMlpBlock_0/norm1": _NORMS,
      "ResMlpBlock_0/cross_patch": _SQUARE,
      "ResMlpBlock_0/layer_scale_1": _NORMS,
      "ResMlpBlock_0/cross_channel/Dense_1": _CHANNELS,
      "class_token": _STEM,
      "ClassMlpBlock_1/cross_patch": _TOKENS,
      "ClassMlpBlock_1/layer_scale_2": _NORMS,
      "ClassMlpBlock_1/cross_channel/Dense_0": _CHANNELS,
      "norm": _NORMS,
    },
  ),
  "resmlp mlp": (
    lambda: image_model("resmlp_s12", patch_communication="mlp"),
    {"ResMlpBlock_0/cross_patch/Dense_0": _IN, "ResMlpBlock_0/cross_patch/Dense_1": _OUT},
  ),
  "resmlp separable": (
    lambda: image_model("resmlp_s12", patch_communication="separable"),
    {"ResMlpBlock_0/cross_patch_pointwise": _TOKENS},
  ),
  "amlp": (
    lambda: image_model("amlp_small"),
    {
      "GmlpBlock_0/norm": _NORMS,
      "GmlpBlock_0/Dense_0": _CHANNELS,
      "GmlpBlock_0/tiny_attention/qkv": _TOKENS,
      "GmlpBlock_0/spatial_gating/norm": _NORMS,
      "GmlpBlock_0/spatial_gating/Dense_0": _SQUARE,
      "GmlpBlock_0/Dense_1": _CHANNELS,
    },
  ),
  "tmlp": (
    lambda: image_model("tmlp_small"),
    {"GmlpBlock_0/spatial_gating/ToeplitzDense_0": _TOKENS},
  ),
  "resnet_18": (
    lambda: convnet("resnet_18"),
    {
      "stem_norm": _NORMS,
      "BasicBlock_1/conv2": _TOKENS,
      "BasicBlock_1/norm2": _NORMS,
      "BasicBlock_1/shortcut": _CHANNELS,
      "BasicBlock_1/shortcut_norm": _NORMS,
    },
  ),
  "resnet_50": (
    lambda: convnet("resnet_50"),
    {"BottleneckBlock_0/conv1": _CHANNELS, "BottleneckBlock_0/conv2": _TOKENS, "head": _HEAD},
  ),
  "regnety_002": (
    lambda: convnet("regnety_002"),
    {
      "RegNetYBlock_0/conv1": _CHANNELS,
      "RegNetYBlock_2/conv2": _TOKENS,
      "RegNetYBlock_0/excite": _CHANNELS,
    },
  ),
  "bert": (
    lambda: text_model("bert"),
    {
      "words": _STEM,
      "segment_types": _STEM,
      "positions": _STEM,
      "embeddings_norm": _NORMS,
      "TransformerBlock_1/attention/query": _TOKENS,
      "TransformerBlock_1/attention_norm": _NORMS,
      "TransformerBlock_1/Dense_1": _CHANNELS,
    },
  ),
  "features": (lambda: text_model("resmlp", features_dim=3), {"project": _STEM}),
  "untied linear": (
    lambda: translator("linear", tied=False),
    {
      "source_words": _STEM,
      "target_words": _STEM,
      "head": _HEAD,
      "encoder_norm": _NORMS,
      "EncoderBlock_0/cross_patch": _SQUARE,
      "EncoderBlock_0/cross_channel/Dense_0": _CHANNELS,
      "DecoderBlock_0/mix_branch/layer_scale": _NORMS,
      "DecoderBlock_0/cross_branch/norm": _NORMS,
    },
  ),
  "tied attention": (
    lambda: translator("attention", tied=True),
    {
      "words": _STEM,
      "EncoderBlock_0/attention/query": _TOKENS,
      "DecoderBlock_0/cross_attention/out": _TOKENS,
    },
  ),
  "galerkin_2d": (
    lambda: operator("galerkin_2d"),
    {
      "stem/conv2/conv": _STEM,
      "GalerkinBlock_0/attention/q": _TOKENS,
      "GalerkinBlock_1/attention/k_norm": _NORMS,
      "GalerkinBlock_1/Dense_0": _CHANNELS,
      "refinement/conv0/conv": _TOKENS,
      "decoder_in": _CHANNELS,
      "SpectralBlock_1/conv/modes": _TOKENS,
      "SpectralBlock_1/skip": _CHANNELS,
    },
  ),
}


@pytest.mark.parametrize("case", ROLES)
@pytest.mark.first(5)
def test_roles_of_parameters(case):
  paths, layers = ROLES[case]
  found, scanned = paths()
  for layer, (kind, *axes) in layers.items():
    leaves = [path for path in found if path.rpartition("/")[0] == layer]
    assert leaves, layer
    for path in leaves:
      leaf = path.rpartition("/")[2]
      own = {"kernel": tuple(axes), "bias": tuple(axes[1:])}.get(leaf, ())
      reads = leaf == "kernel" and axes[:1] == ["in"]
      for prefix in ("", "backbone/", "encoder/"):
        assert models.layer_kind(prefix + path) == kind, path
        assert models.token_axes(prefix + path) == own, path
      assert models.reads_tokens(path) == reads
      decayed = leaf in ("kernel", "diagonals") or (leaf == "embedding" and layer != "class_token")
      assert models.is_decayed(path) == decayed, path
      if scanned:
        together = path if layer.startswith("Class") else path.replace("Block_0", "Blocks")
        assert together in scanned
        assert (models.layer_kind(together), models.reads_tokens(together)) == (kind, reads)


def test_layers_of_other_models_mix_channels():
  assert models.layer_kind("encoder/Dense_0/kernel") == "channel_mixing"
  assert models.token_axes("encoder/Dense_0/kernel") == ()
  assert models.is_decayed("encoder/Dense_0/kernel")
