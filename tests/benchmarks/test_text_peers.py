"""The peer of `text_peers` beside our gMLP, and the command's table."""

import json
import types

import jax
import numpy as np
import pytest

from benchmarks import steps, text_peers
from mixer_jax import experiment, models

SIZES = dict(hidden_dim=8, ffn_dim=12, num_blocks=2, max_length=6, vocab_size=11)


def to_torch(params):
  """Our parameters by the peer's names; PyTorch has kernels transposed."""
  encoder, found = params["encoder"], {"bias": params["head"]["bias"]}
  found["words.weight"] = encoder["words"]["embedding"]

  def put(name, layer):
    found[f"{name}.weight"] = layer["kernel"].T if "kernel" in layer else layer["scale"]
    found[f"{name}.bias"] = layer["bias"]

  for i in range(SIZES["num_blocks"]):
    block, gate = encoder[f"GmlpBlock_{i}"], encoder[f"GmlpBlock_{i}"]["spatial_gating"]
    put(f"blocks.{i}.norm", block["norm"])
    put(f"blocks.{i}.inner", block["Dense_0"])
    put(f"blocks.{i}.gate_norm", gate["norm"])
    put(f"blocks.{i}.spatial", gate["Dense_0"])
    put(f"blocks.{i}.outer", block["Dense_1"])
  put("norm", encoder["norm"])
  return found


def test_pytorch_s_gmlp_computes_what_ours_does():
  torch = pytest.importorskip("torch")
  encoder = models.encoder("gmlp_text_small", **SIZES)
  ours, rng = models.MaskedLm(encoder), np.random.default_rng(0)
  ids, positions = rng.integers(11, size=(3, 6)), rng.integers(6, size=(3, 2))
  inputs = (ids, ids >= 0, None, positions)
  params = jax.jit(ours.init)(jax.random.key(0), *inputs)["params"]
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
  theirs = text_peers.torch_gmlp(SIZES)
  theirs.load_state_dict({k: torch.tensor(np.array(x)) for k, x in to_torch(params).items()})
  actual = theirs(torch.tensor(ids), torch.tensor(positions)).detach().numpy()
  expected = ours.apply({"params": params}, *inputs)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def options(**fields):
  given = dict(models=None, batch_size=4, dtype="float32", max_length=16, rounds=1)
  return types.SimpleNamespace(**given | dict(torch_python=None) | fields)


@pytest.fixture
def small(monkeypatch):
  """A block of 8 channels."""
  whole = text_peers.config_of

  def config_of(*args):
    config = whole(*args)
    config.model.update(num_blocks=1, hidden_dim=8, ffn_dim=12)
    return config

  monkeypatch.setattr(text_peers, "config_of", config_of)


@pytest.mark.thorough
def test_what_the_workers_are_told(small):
  told = json.loads(json.dumps(text_peers._shared("gmlp_text_small", options())))
  words = experiment.build(text_peers.config_of("gmlp_text_small", 4, "float32", 16)).task
  size = words.vocabulary.size
  assert told["sizes"] == dict(
    hidden_dim=8, ffn_dim=12, num_blocks=1, max_length=16, vocab_size=size
  )
  block = 2 * 8 + (8 + 1) * 12 + 2 * 6 + (16 + 1) * 16 + (6 + 1) * 8
  assert told["parameters"] == size * 8 + block + 2 * 8 + size
  assert told["masked"] == 2  # 15% of 16, rounded
  block = 16 * (8 * 12 + 16 * 6 + 6 * 8)
  assert told["operations"] == 6 * 4 * (block + 2 * 8 * size)


def test_the_table_is_that_of_the_seconds(answer, monkeypatch, capsys):
  """Of 4 sequences of 16 tokens; products run at 100 operations a second, a step has 5."""
  seconds = {"ours": 1.0, "pytorch": 2.0}
  answer(lambda name, _, call: {"rate": 100.0} if call == "product" else seconds[name])
  told = dict(model="gmlp", parameters=1, batch_size=4, max_length=16, masked=2, dtype="float32")
  monkeypatch.setattr(text_peers, "_shared", lambda *args: told | dict(operations=5))
  text_peers.main(options())
  lines = capsys.readouterr().out.splitlines()
  assert lines[-2] == "| ours | 0.1000 | 640 | 1.00 | 50% | 0.100 |"
  assert lines[-1] == "| pytorch | 0.2000 | 320 | 2.00 | 25% | 0.200 |"


@pytest.mark.thorough
def test_ours_are_steps_of_the_library_that_mask_anew(small, monkeypatch):
  monkeypatch.setattr(text_peers, "STEPS", 2)
  built = []
  build = experiment.build
  monkeypatch.setattr(experiment, "build", lambda config: built.append(build(config)) or built[-1])
  told = text_peers._shared("gmlp_text_small", options())
  call, taken = steps.Real.__call__, []
  monkeypatch.setattr(steps.Real, "__call__", lambda self, n=1: taken.append(n) or call(self, n))
  calls = text_peers.ours(types.SimpleNamespace(**told))
  taken.clear()
  assert built[-1].config.optimizer.name == "adamw"
  assert calls["product"]()["rate"] > 0.0
  calls["step"]()
  assert taken == [2]
