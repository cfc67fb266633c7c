"""Peers' files out of the fixtures, and small models that they fit."""

import functools
import io
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.models import gmlp, mixer, resmlp
from mixer_jax.options import pair

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"

# The sizes in tests/make_fixtures.py.
_SIZES = dict(num_classes=5, patch_size=8, hidden_dim=16, num_blocks=2)
FAMILIES = {
  "mixer": functools.partial(mixer.Mixer, **_SIZES, tokens_mlp_dim=8, channels_mlp_dim=64),
  "resmlp": functools.partial(resmlp.ResMlp, **_SIZES, channels_mlp_dim=64, layer_scale_init=0.1),
  "gmlp": functools.partial(gmlp.Gmlp, **_SIZES, ffn_dim=96),
}


class Peer:
  """A peer's file of weights, and the outputs of its model for some images."""

  def __init__(self, name, directory):
    with np.load(FIXTURES / f"{name}.npz") as fixture:
      self.images = fixture["images"]
      self.logits = fixture["logits"]
      self.tokens = fixture["tokens"]
      content = fixture["weights"].tobytes()
    self.family = name.split("_")[1]
    # No ending: the contents tell the kind of the file.
    self.path = str(directory / name)
    pathlib.Path(self.path).write_bytes(content)

  def model(self, **fields):
    return FAMILIES[self.family](**fields)


@pytest.fixture
def peer(tmp_path):
  return lambda name: Peer(name, tmp_path)


def shapes(model, size=32):
  images = jnp.zeros((1, *pair(size), 3))
  return jax.eval_shape(model.init, jax.random.key(0), images)["params"]


@functools.cache
def _compiled(model):
  return jax.jit(functools.partial(model.apply, mutable=["intermediates"]))


def run(model, params, images):
  """Logits and tokens."""
  logits, state = _compiled(model)({"params": params}, images)
  return np.asarray(logits), np.asarray(state["intermediates"]["tokens"][0])


def random_params(model, size=32, seed=0):
  rng = np.random.default_rng(seed)
  tree = shapes(model, size)
  return jax.tree.map(lambda x: rng.normal(0.1, 0.3, x.shape).astype(np.float32), tree)


def safetensors(arrays):
  """The bytes of a .safetensors file, of name -> (the format's type, array)."""
  header, data = {}, b""
  for name, (kind, array) in arrays.items():
    begin = len(data)
    data += array.tobytes()
    header[name] = dict(dtype=kind, shape=array.shape, data_offsets=[begin, len(data)])
  text = json.dumps(header).encode()
  return len(text).to_bytes(8, "little") + text + data


def error(found, expected):
  return np.abs(found - expected).max() / np.abs(expected).max()


def google_arrays(peer):
  with np.load(peer.path) as file:
    return dict(file)


def file_arrays(peer):
  return google_arrays(peer) if "google" in peer.path else torch_state(peer)


def rewrite(peer, arrays):
  """Writes arrays in the kind of the peer's file."""
  if any("/" in name for name in arrays):
    return write(peer.path, arrays)
  content = safetensors({k: ("F32", np.ascontiguousarray(v)) for k, v in arrays.items()})
  pathlib.Path(peer.path).write_bytes(content)


def write(path, arrays, savez=np.savez):
  buffer = io.BytesIO()
  savez(buffer, **arrays)
  pathlib.Path(path).write_bytes(buffer.getvalue())


def torch_state(peer):
  """The state dict in PyTorch's names, parsed by the format's definition."""
  content = pathlib.Path(peer.path).read_bytes()
  start = 8 + int.from_bytes(content[:8], "little")
  state = {}
  for name, spec in json.loads(content[8:start]).items():
    if name != "__metadata__":
      begin, end = spec["data_offsets"]
      array = np.frombuffer(content[start + begin : start + end], np.float32)
      state[name] = array.reshape(spec["shape"])
  return state
