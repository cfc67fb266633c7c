"""Mistakes are named: the file, the field, the parameters by our names and those in the file."""

import pickle

import jax
import numpy as np
import pytest

from mixer_jax import models, pretrained
from mixer_jax.errors import UserError
from mixer_jax.pretrained import layouts
from tests.pretrained import pytorch_files
from tests.pretrained.conftest import FAMILIES, file_arrays, rewrite, shapes
from tests.pretrained.test_bert import Peer as Bert
from tests.pretrained.test_layouts import Convnet

PEERS = ("timm_mixer", "timm_resmlp", "deit_resmlp", "timm_gmlp")
IN_FILE = (
  r"MixerBlock_\{0-1\}/channel_mixing/Dense_0/kernel .blocks.\{0-1\}.mlp_channels.fc1.weight"
)


@pytest.mark.parametrize("name", PEERS)
def test_messages_have_the_names_in_the_file(peer, name):
  peer = peer(name)
  weights = pretrained.read(peer.path)
  theirs = layouts.LAYOUTS[weights.layout].theirs
  said = {theirs(path).removesuffix(", transposed") for path in weights.arrays}
  assert said == file_arrays(peer).keys()


def fit(peer, size=32, resize="", patch_size=8, **fields):
  """Fits timm's weights of a Mixer to another one."""
  model = FAMILIES["mixer"](patch_size=patch_size, **fields)
  return pretrained.read(peer("timm_mixer").path).fit(shapes(model, size), resize)


def without(peer, part):
  peer = peer("timm_mixer")
  rewrite(peer, {k: v for k, v in file_arrays(peer).items() if part not in k})
  return pretrained.read(peer.path).fit(shapes(peer.model()))


def oblong(peer):
  template = jax.eval_shape(FAMILIES["mixer"]().init, jax.random.key(0), np.zeros((1, 16, 48, 3)))
  return pretrained.read(peer("timm_mixer").path).fit(template["params"], "interpolate_bilinear")


def load(peer, **options):
  return pretrained.load(peer("google_mixer").path, "mixer_small", **options)


def file_of(peer, arrays):
  peer = peer("google_mixer")
  rewrite(peer, arrays)
  return pretrained.read(peer.path)


def torch(directory, value):
  (directory / "w.pth").write_bytes(pytorch_files.content(value))
  return pretrained.read(directory / "w.pth")


def pickled(directory):
  (directory / "w.pth").write_bytes(pickle.dumps({"a": 1}, protocol=2))
  return pretrained.read(directory / "w.pth")


def convnet(directory, name, ending="", **more):
  peer = Convnet(name, directory)
  peer.path += ending
  arrays = {k: v for k, v in (peer.arrays | more).items() if v is not None}
  return peer.write(arrays).fit_variables(peer.shapes)


def stem(directory):
  make = lambda stem: models.build("resnet_18", 5, width=4, stages=(1, 1, 1, 1), stem=stem)
  of = lambda model: jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 32, 3)))
  ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), of(make("large")))
  pretrained.save(directory / "large.npz", pretrained.beside(ones), make("large"))
  return pretrained.read(directory / "large.npz").fit_variables(of(make("small")))


def bert(directory, arrays=(), **config):
  peer = Bert(directory)
  arrays = {k: v for k, v in (peer.arrays | dict(arrays)).items() if v is not None}
  peer.write(arrays)
  peer.write_config(**config)
  return peer.load()


POSITIONS = "bert.embeddings.position_embeddings.weight"
PADDED = np.ones((12, 16), "f4") * (np.arange(12) != 1)[:, None].astype("f4")
LAYER = "bert.encoder.layer.1.intermediate.dense.weight"
MISTAKES = {
  "grid": (lambda p, d: fit(p, 48), "a 4x4 grid .* 6x6.*block_diagonal"),
  "no_multiple": (lambda p, d: fit(p, 48, "block_diagonal"), "interpolate_bilinear"),
  "resize": (lambda p, d: fit(p, 48, "nearest"), "resize_tokens is 'nearest'"),
  "not_square": (lambda p, d: oblong(p), "12 tokens are no square grid"),
  "patches": (lambda p, d: fit(p, patch_size=4), "patches of 8x8 pixels, the model of 4x4"),
  "hidden": (lambda p, d: fit(p, 64, "block_diagonal"), r"\[64, 32\] instead of \[64, 8\]"),
  "width": (lambda p, d: fit(p, channels_mlp_dim=60), IN_FILE),
  "missing": (lambda p, d: without(p, "norm2"), r"missing are [^;]*blocks.\{0-1\}.norm2.bias"),
  "of_another": (
    lambda p, d: pretrained.load(p("timm_resmlp").path, "mixer_small"),
    "missing are MixerBlock_.*left over are ResMlpBlock_",
  ),
  "field": (lambda p, d: load(p, image_size=36, patch_size=8), "36x36"),
  "name": (lambda p, d: pretrained.load(p("timm_gmlp").path, "gmlp_smal"), "gmlp_small"),
  "vit": (
    lambda p, d: file_of(p, {"Transformer/encoderblock_0/LayerNorm_0/scale": np.ones(3)}),
    "Transformer/encoderblock_0",
  ),
  "no_state": (lambda p, d: torch(d, {"epoch": 3}), "w.pth: .* no state dict"),
  "no_pytorch": (lambda p, d: pickled(d), "w.pth: .* none of PyTorch's"),
  "convnet_missing": (
    lambda p, d: convnet(d, "timm_regnety", **{"s2.b1.se.fc1.bias": None}),
    "missing are RegNetYBlock_1/squeeze/bias",
  ),
  "convnet_more": (
    lambda p, d: convnet(d, "timm_regnety", **{"s2.b1.conv4.weight": np.ones(3, "f4")}),
    "left over are s2.b1.conv4.weight",
  ),
  "blurred": (lambda p, d: convnet(d, "timm_resnet_basic", "_resnetblur50"), "resnetblur"),
  "stem": (lambda p, d: stem(d), r"stem/kernel of shape \[7, 7, 3, 4\] instead of \[3, 3"),
  "bert_gelu": (lambda p, d: bert(d, hidden_act="relu"), "hidden_act is 'relu'"),
  "bert_positions": (lambda p, d: bert(d, position_embedding_type="relative_key"), "absolute"),
  "bert_type": (lambda p, d: bert(d, model_type="roberta"), "config.json: model_type is 'roberta'"),
  "bert_decoder": (lambda p, d: bert(d, is_decoder=True), "config.json: is_decoder is True"),
  "bert_heads": (lambda p, d: bert(d, num_attention_heads=3), "num_attention_heads is 3, .* 16"),
  "bert_padding": (lambda p, d: bert(d, {POSITIONS: PADDED}), "RoBERTa"),
  **{
    f"bert_{name}": (lambda p, d, n=name: bert(d, **{n: 100}), f"{name} is 100, but .* has")
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
  },
  "bert_missing": (lambda p, d: bert(d, {LAYER: None}), LAYER[5:]),
  "bert_more": (lambda p, d: bert(d, {"bert.adapter.weight": np.ones(2, "f4")}), "adapter.weight"),
  "bert_shape": (
    lambda p, d: bert(d, {LAYER: np.ones((40, 15), "f4")}), r"\[15, 40\] instead of \[16, 40\]"
  ),
  "no_bert": (
    lambda p, d: pretrained.load_bert(p("timm_mixer").path), "there is no embeddings.word_emb"
  ),
  "absent": (lambda p, d: pretrained.read(d / "absent.npz"), "absent.npz: no such file"),
  "folder": (lambda p, d: pretrained.read(d), "irectory"),
  "near": (lambda p, d: pretrained.read("google/imagenet21k/Mixer-B16"), "imagenet21k/Mixer-B_16"),
  "ending": (lambda p, d: pretrained.save(d / "w.pth", {}), "w.pth"),
  "no_folder": (lambda p, d: pretrained.save(d / "a" / "w.npz", {"a": np.ones(1)}), "w.npz"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(peer, tmp_path, case):
  mistake, message = MISTAKES[case]
  with pytest.raises(UserError, match=message) as caught:
    mistake(peer, tmp_path)
  assert "\n" not in str(caught.value)
