"""BERT's encoder out of Hugging Face's files, against transformers layer by layer."""

import functools
import json
import re

import jax
import numpy as np
import pytest

from mixer_jax import models, pretrained
from tests.pretrained import pytorch_files
from tests.pretrained.conftest import FIXTURES, safetensors
from tests.pretrained.pytorch_files import Tensor


class Peer:
  """A file of weights with its config beside it, and the outputs of transformers."""

  def __init__(self, directory, name="hf_bert"):
    with np.load(FIXTURES / f"{name}.npz") as fixture:
      self.inputs = [fixture[name] for name in ("ids", "mask", "segments")]
      self.hidden, self.logits = fixture.get("hidden"), fixture.get("logits")
      content = fixture["weights"].tobytes()
      self.config = json.loads(str(fixture["config"]))
    self.path = directory / "model.safetensors"
    self.path.write_bytes(content)
    self.config_path = directory / "config.json"
    self.write_config()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    self.arrays = {}
    for name, spec in header.items():
      begin, end = spec["data_offsets"]
      array = np.frombuffer(content[start + begin : start + end], np.float32)
      self.arrays[name] = array.reshape(spec["shape"])

  def write_config(self, **changes):
    self.config_path.write_text(json.dumps(self.config | changes))

  def write(self, arrays):
    kinds = {np.dtype("float32"): "F32", np.dtype("int64"): "I64"}
    content = {k: (kinds[v.dtype], np.ascontiguousarray(v)) for k, v in arrays.items()}
    self.path.write_bytes(safetensors(content))

  def load(self):
    return pretrained.load_bert(str(self.path))


@pytest.fixture
def peer(tmp_path):
  return Peer(tmp_path)


def hidden_states(loaded, inputs):
  """Outputs of the embeddings and of each block."""
  module, variables = loaded.model(), {"params": loaded.params}

  known = re.compile("embeddings_norm|TransformerBlock_.").fullmatch
  kept = lambda module, method: method == "__call__" and bool(known(module.name or ""))
  run = functools.partial(module.apply, capture_intermediates=kept)
  y, state = jax.jit(run)(variables, *inputs)
  seen = [v["__call__"][0] for k, v in sorted(state["intermediates"].items()) if known(k)]
  seen = [seen[-1], *seen[:-1]]  # "embeddings_norm" is sorted after the blocks
  np.testing.assert_array_equal(y, seen[-1])
  return np.stack(seen)


def check(peer, loaded):
  mask = peer.inputs[1]
  found = hidden_states(loaded, peer.inputs)
  assert found.shape == peer.hidden.shape
  np.testing.assert_allclose(found[:, mask], peer.hidden[:, mask], rtol=1e-5, atol=1e-5)


def test_every_layer_equals_that_of_transformers(peer):
  loaded = peer.load()
  sizes = dict(vocab_size=50, hidden_dim=16, max_length=12, segments=2, num_blocks=2, ffn_dim=40)
  assert loaded.fields == sizes | dict(num_heads=2, gelu="exact", layer_norm_epsilon=0.01)
  check(peer, loaded)


@pytest.mark.thorough
def test_scanned_and_shortened(peer):
  loaded = peer.load()
  model = loaded.model(scan_blocks=True, max_length=9)
  params = models.stacked(models.shortened(loaded.params, 9))
  mask = peer.inputs[1]
  found = jax.jit(model.apply)({"params": params}, *peer.inputs)[mask]
  np.testing.assert_allclose(found, peer.hidden[-1][mask], rtol=1e-5, atol=1e-5)


def test_names_of_other_classes_and_times(peer):
  """BertModel's names, norms as TensorFlow calls them, and indices beside the weights."""
  old = {"weight": "gamma", "bias": "beta"}
  rename = lambda k: re.sub(r"(?<=LayerNorm\.)(\w+)$", lambda m: old[m[1]], k.removeprefix("bert."))
  arrays = {rename(k): v for k, v in peer.arrays.items() if k.startswith("bert.")}
  assert "embeddings.LayerNorm.gamma" in arrays
  peer.write(arrays | {"embeddings.position_ids": np.arange(12)[None]})
  check(peer, peer.load())


def test_without_a_config_the_rest_is_that_of_bert(peer):
  peer.config_path.unlink()
  loaded = peer.load()
  assert loaded.fields["num_heads"] == 1  # of up to 64 channels
  assert (loaded.fields["gelu"], loaded.fields["layer_norm_epsilon"]) == ("exact", 1e-12)


def test_files_of_pytorch(peer):
  before, content = peer.load(), {k: Tensor(v) for k, v in peer.arrays.items()}
  peer.path = peer.path.with_name("pytorch_model.bin")
  peer.path.write_bytes(pytorch_files.content(content))
  jax.tree.map(np.testing.assert_array_equal, peer.load().params, before.params)


WRAPPED = {
  "lightning": lambda name: f"model.{name}",
  "compiled": lambda name: f"_orig_mod.{name}",
  "nested": lambda name: f"module.net._orig_mod.{name}",
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrappers_are_taken_off(peer, caplog, wrapper):
  before = peer.load()
  peer.write({WRAPPED[wrapper](k): v for k, v in peer.arrays.items()})
  with caplog.at_level("INFO"):
    jax.tree.map(np.testing.assert_array_equal, peer.load().params, before.params)
  assert WRAPPED[wrapper]("")[:5] in caplog.text


@pytest.mark.parametrize("name", ["classifier", "qa_outputs", "cls.predictions.decoder"])
def test_heads_without_a_pooler_are_left_out_by_name(peer, caplog, name):
  arrays = {k: v for k, v in peer.arrays.items() if "pooler" not in k and "cls" not in k}
  peer.write(arrays | {f"{name}.weight": np.ones((2, 16), "f4"), f"{name}.bias": np.ones(2, "f4")})
  with caplog.at_level("INFO"):
    loaded = peer.load()
  assert f"left out {name}.weight, {name}.bias" in caplog.text and not loaded.heads
  check(peer, loaded)


def test_the_head_of_a_fine_tuned_model(tmp_path):
  peer = Peer(tmp_path, "hf_bert_classifier")
  loaded = peer.load()
  assert loaded.class_names == ("yes", "no", "maybe")  # as numbered in the config
  np.testing.assert_array_equal(
    loaded.heads["classifier"]["kernel"], peer.arrays["classifier.weight"].T
  )
  model = models.TextClassifier(loaded.model(), 3, "pooler")
  params = {
    "encoder": loaded.params,
    "pooler": loaded.heads["pooler"],
    "head": loaded.heads["classifier"],
  }
  found = jax.jit(model.apply)({"params": params}, *peer.inputs)
  np.testing.assert_allclose(found, peer.logits, rtol=1e-5, atol=1e-5)
