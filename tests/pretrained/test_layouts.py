"""Every public layout, read as a file, against outputs of the peer's own code."""

import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from mixer_jax import models, pretrained
from mixer_jax.pretrained import layouts
from tests import make_fixtures
from tests.pretrained.conftest import (
  FIXTURES,
  error,
  file_arrays,
  google_arrays,
  rewrite,
  run,
  safetensors,
  shapes,
  torch_state,
  write,
)

HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
ZERO = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PEERS = {
  "google_mixer": (dict(gelu="tanh", layer_norm_epsilon=1e-6), HALF),
  "timm_mixer": (dict(gelu="exact", layer_norm_epsilon=1e-6), HALF),
  "timm_resmlp": (dict(gelu="exact", normalization="affine"), IMAGENET),
  "deit_resmlp": (dict(gelu="exact", normalization="affine"), IMAGENET),
  "timm_gmlp": (dict(gelu="exact", layer_norm_epsilon=1e-6, gate_epsilon=1e-5), HALF),
}


def outputs(peer, **fields):
  weights = pretrained.read(peer.path)
  model = peer.model(**weights.model_fields(image_size=32) | fields)
  return run(model, weights.fit(shapes(model)), peer.images)


@pytest.mark.parametrize("name", ["google_mixer", "deit_resmlp", "timm_gmlp"])
@pytest.mark.first(1)
def test_scanned_blocks_take_them_too(peer, name):
  peer = peer(name)
  logits, tokens = outputs(peer, scan_blocks=True)
  assert error(logits, peer.logits) < 1e-5
  assert error(tokens, peer.tokens) < 1e-5


@pytest.mark.parametrize("name", PEERS)
def test_the_peers_settings_come_with_the_file(peer, name):
  weights = pretrained.read(peer(name).path)
  assert (weights.model_fields(image_size=32), weights.normalization) == PEERS[name]
  assert (weights.num_classes, weights.num_tokens, weights.patch_size) == (5, 16, 8)


@pytest.mark.parametrize(
  "name, wrong",
  [
    ("google_mixer", dict(gelu="exact")),
    ("google_mixer", dict(layer_norm_epsilon=1e-5)),
    ("timm_resmlp", dict(gelu="tanh")),
    ("timm_gmlp", dict(layer_norm_epsilon=1e-5)),
    ("timm_gmlp", dict(gate_epsilon=1e-6)),
  ],
)
@pytest.mark.first(2)
def test_these_comparisons_would_see_a_wrong_setting(peer, name, wrong):
  peer = peer(name)
  assert error(outputs(peer, **wrong)[1], peer.tokens) > 5e-5


@pytest.mark.parametrize(
  "path, classes, expected",
  [
    ("models--timm--mixer_b16_224.miil_in21k_ft_in1k/model.safetensors", 5, ZERO),
    ("mixer_b16_224_miil-9229a591.pth", 5, ZERO),
    ("anything", 11221, ZERO),
    ("mixer_b16_224.goog_in21k_ft_in1k/model.safetensors", 5, HALF),
    ("miil/anything", 5, HALF),
  ],
)
def test_local_files_of_miil_want_neither_mean_nor_std(peer, tmp_path, path, classes, expected):
  """timm's configs of both files: mean=(0., 0., 0.), std=(1., 1., 1.)."""
  peer = peer("timm_mixer")
  head = {"head.weight": np.ones((classes, 16), "f4"), "head.bias": np.ones(classes, "f4")}
  arrays = file_arrays(peer)
  peer.path = str(tmp_path / "local" / path)
  pathlib.Path(peer.path).parent.mkdir(parents=True)
  rewrite(peer, arrays | head)
  assert pretrained.read(peer.path).normalization == expected
  assert pretrained.CATALOG["timm/mixer_b16_224.miil_in21k_ft_in1k"].normalization == ZERO


def timm_config(mean, std, **more):
  own = {"mean": mean, "std": std, "num_classes": 5, "input_size": [3, 32, 32], **more}
  return {"architecture": "mixer_b16_224", "num_classes": 5, "pretrained_cfg": own}


@pytest.mark.parametrize("name", ["timm_mixer", "timm_resmlp", "timm_gmlp", "deit_resmlp_pth"])
@pytest.mark.parametrize("flat", [False, True])
def test_timms_config_beside_a_file_has_its_statistics(peer, tmp_path, caplog, name, flat):
  mean, std = [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]
  config = timm_config(mean, std)
  if flat:  # as older ones are
    config = {"architecture": "mixer_b16_224", **config["pretrained_cfg"]}
  peer = peer(name)
  (tmp_path / "config.json").write_text(json.dumps(config))
  with caplog.at_level("INFO"):
    assert pretrained.read(peer.path).normalization == (tuple(mean), tuple(std))
  assert "config.json has mean (0.4, 0.5, 0.6)" in caplog.text  # for others are usual


def test_other_configs_beside_a_file(peer, tmp_path, caplog):
  peer = peer("timm_mixer")
  (tmp_path / "config.json").write_text(json.dumps({"task": "image_classification", "data": {}}))
  assert pretrained.read(peer.path).normalization == HALF  # the config of a run
  stale = timm_config(*HALF) | {"num_classes": 1000}
  (tmp_path / "config.json").write_text(json.dumps(stale))
  assert pretrained.read(peer.path).normalization == HALF
  assert "1000 classes, but timm_mixer has 5" in caplog.text


def pre_linen(arrays, second_norm):
  """The names before Linen, as big_vision and vit_jax convert them, and their axes of size 1."""
  old = {}
  for name, array in arrays.items():
    name = name.replace("pre_head_layer_norm", "Mixer/encoder_norm").replace("stem", "embedding")
    name = name.replace("MixerBlock_", "Mixer/encoderblock_")
    name = name.replace("LayerNorm_1", second_norm)
    for i in (0, 1):
      for kind in ("token_mixing", "channel_mixing"):
        for leaf in ("kernel", "bias"):
          name = name.replace(f"{kind}/Dense_{i}/{leaf}", f"{kind}_phase_0/{leaf}{i + 1}")
    old[name] = array[None] if "bias2" in name or "kernel1" in name else array
  return old


@pytest.mark.parametrize("second_norm", ["LayerNorm_1", "LayerNorm_2"])
def test_before_linen(peer, second_norm):
  peer = peer("google_mixer")
  arrays = pre_linen(google_arrays(peer), second_norm)
  assert "Mixer/encoderblock_1/token_mixing_phase_0/kernel1" in arrays
  write(peer.path, arrays)
  logits, tokens = outputs(peer)
  assert pretrained.read(peer.path).layout == "pre_linen"
  assert error(logits, peer.logits) < 1e-5
  assert error(tokens, peer.tokens) < 1e-5


@pytest.mark.parametrize("prefix", ["params/", "opt/target/"])
@pytest.mark.parametrize("before_linen", [False, True])
def test_training_checkpoints_of_big_vision(peer, prefix, before_linen):
  peer = peer("google_mixer")
  arrays = google_arrays(peer)
  if before_linen:
    arrays = pre_linen(arrays, "LayerNorm_1")
  rest = {"opt/state/step": np.int32(7), "extra/loss": np.float32(1)}
  write(peer.path, {prefix + k: v for k, v in arrays.items()} | rest, np.savez_compressed)
  assert error(outputs(peer)[1], peer.tokens) < 1e-5


def test_half_precision(peer):
  peer = peer("google_mixer")
  arrays = google_arrays(peer)
  low = {k: v.astype(ml_dtypes.bfloat16) for k, v in arrays.items()}
  write(peer.path, low)
  npz = pretrained.read(peer.path).arrays
  # All the same in .safetensors, some of it in float16 and float64.
  kinds = {"stem/bias": ("F16", np.float16), "head/bias": ("F64", np.float64)}
  mixed = {k: kinds.get(k, ("BF16", ml_dtypes.bfloat16)) for k in arrays}
  content = safetensors({k: (kind, arrays[k].astype(t)) for k, (kind, t) in mixed.items()})
  pathlib.Path(peer.path).write_bytes(content)
  read = pretrained.read(peer.path).arrays
  for key, array in arrays.items():
    np.testing.assert_array_equal(npz[key], low[key].astype(np.float32))
    np.testing.assert_array_equal(read[key], array.astype(mixed[key][1]).astype(np.float32))
    assert npz[key].dtype == read[key].dtype == np.float32


PREFIXES = ("module.", "backbone.", "module.backbone.", "_orig_mod.", "model._orig_mod.module.")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.first(1)
def test_prefixes_of_training(peer, caplog, prefix):
  peer = peer("deit_resmlp")
  arrays = {k: v for k, v in torch_state(peer).items() if not k.startswith("head.")}
  named = {prefix + k: ("F32", v) for k, v in arrays.items()}
  if "backbone" in prefix:  # with DINO's projection head beside it
    rest = prefix.removesuffix("backbone.")
    named[f"{rest}head.mlp.0.weight"] = ("F32", np.ones((3, 16), np.float32))
  pathlib.Path(peer.path).write_bytes(safetensors(named))
  with caplog.at_level("INFO"):
    weights = pretrained.read(peer.path)
  assert all(part + "." in caplog.text for part in prefix.split(".")[:-1])
  model = peer.model(**weights.model_fields(image_size=32))
  logits, tokens = run(model, weights.fit(shapes(model)), peer.images)
  assert error(tokens, peer.tokens) < 1e-5
  # There is no classifier in it.
  assert weights.num_classes == 0
  np.testing.assert_array_equal(logits, 0.0)


def test_a_file_that_pytorch_wrote(peer):
  peer = peer("deit_resmlp_pth")
  logits, tokens = outputs(peer)
  assert error(logits, peer.logits) < 1e-5
  assert error(tokens, peer.tokens) < 1e-5


def test_wrappers_inside_a_network(peer):
  """Of FSDP, of checkpointed blocks, and of a block that is compiled."""
  peer = peer("deit_resmlp")
  inside = lambda k: k.replace("blocks.0.", "blocks.0._orig_mod._checkpoint_wrapped_module.")
  rewrite(peer, {f"_fsdp_wrapped_module.{inside(k)}": v for k, v in torch_state(peer).items()})
  assert error(outputs(peer)[0], peer.logits) < 1e-5


CONVNETS = {
  "timm_regnety": dict(
    name="regnety_002", stages=(1, 1, 3, 1), widths=(8, 16, 32, 64), group_width=4
  ),
  "timm_resnet_bottleneck": dict(name="resnet_50", stages=(1, 1, 1, 1)),
  "timm_resnet_basic": dict(name="resnet_18", stages=(1, 2, 1, 1)),
}


class Convnet:
  """A peer's convolutional network: its arrays, and the outputs of its model."""

  def __init__(self, name, directory):
    with np.load(FIXTURES / f"{name}.npz") as fixture:
      self.images, self.logits = fixture["images"], fixture["logits"]
      self.arrays = make_fixtures.convnet_state(json.loads(str(fixture["shapes"])))
    self.path = str(directory / name)
    fields = dict(CONVNETS[name])
    self.model = models.build(fields.pop("name"), 5, **fields)
    self.shapes = jax.eval_shape(self.model.init, jax.random.key(0), self.images)

  def write(self, arrays):
    kinds = {np.dtype("f4"): "F32", np.dtype("i8"): "I64"}
    named = {k: (kinds[v.dtype], np.ascontiguousarray(v)) for k, v in arrays.items()}
    pathlib.Path(self.path).write_bytes(safetensors(named))
    return pretrained.read(self.path)


@pytest.mark.parametrize("name", CONVNETS)
def test_convolutional_networks_answer_as_timms(name, tmp_path):
  peer = Convnet(name, tmp_path)
  weights = peer.write(peer.arrays)
  # Files of ResNets come with any statistics of pixels.
  expected = IMAGENET if name == "timm_regnety" else None
  assert (weights.num_classes, weights.normalization) == (5, expected)
  found = jax.jit(peer.model.apply)(weights.fit_variables(peer.shapes), peer.images)
  assert error(np.asarray(found), peer.logits) < 2e-5


def test_blocks_of_convolutional_networks_keep_their_order():
  """Also where there are more than nine of one shape."""
  numbers = [(stage, block) for stage in (1, 2) for block in range(1, 13)]
  theirs = {f"s{s}.b{b}.conv1.bn.weight": np.full(2, 100 * s + b) for s, b in reversed(numbers)}
  found = layouts.LAYOUTS["regnety"].rename(theirs)
  for i, (stage, block) in enumerate(numbers):
    assert found[f"RegNetYBlock_{i}/norm1/scale"][0] == 100 * stage + block
