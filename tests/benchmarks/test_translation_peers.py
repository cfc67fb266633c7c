"""The peer of `translation_peers` beside our Transformer, and the command's table."""

import json
import types

import jax
import numpy as np
import pytest

from benchmarks import translation_peers
from mixer_jax.models.translation import Translator

SIZES = dict(
  hidden_dim=16, channels_mlp_dim=32, num_heads=4, num_blocks=2, dropout_rate=0.1, vocab_size=11
)
NORMS = {
  "encoder": {"mix": "norm1", "mlp": "norm2"},
  "decoder": {"mix": "norm1", "cross": "norm2", "mlp": "norm3"},
}


def to_torch(params):
  """Our parameters by the peer's names; PyTorch has kernels transposed, and three in one."""
  found = {"words.weight": params["words"]["embedding"]}

  def put(name, layer):
    found[f"{name}.weight"] = layer["kernel"].T if "kernel" in layer else layer["scale"]
    found[f"{name}.bias"] = layer["bias"]

  def attention(name, layer):
    three = [layer[k] for k in ("query", "key", "value")]
    found[f"{name}.in_proj_weight"] = np.concatenate([x["kernel"].T for x in three])
    found[f"{name}.in_proj_bias"] = np.concatenate([x["bias"] for x in three])
    put(f"{name}.out_proj", layer["out"])

  for side, norms in NORMS.items():
    put(f"inner.{side}.norm", params[f"{side}_norm"])
    for i in range(SIZES["num_blocks"]):
      block, name = params[f"{side.title()}Block_{i}"], f"inner.{side}.layers.{i}"
      attention(f"{name}.self_attn", block["attention"])
      if side == "decoder":
        attention(f"{name}.multihead_attn", block["cross_attention"])
      for branch, norm in norms.items():
        put(f"{name}.{norm}", block[f"{branch}_branch"]["norm"])
      for j in (0, 1):
        put(f"{name}.linear{j + 1}", block["cross_channel"][f"Dense_{j}"])
  return found


def test_pytorch_s_transformer_computes_what_ours_does():
  torch = pytest.importorskip("torch")
  ours, rng = Translator(max_length=7, mixing="attention", **SIZES), np.random.default_rng(0)
  source, target = rng.integers(11, size=(2, 3, 7))
  inputs = source, source >= 0, target[:, :5], target[:, :5] >= 0
  params = jax.jit(ours.init)(jax.random.key(0), *inputs)["params"]
  params = jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32), params)
  theirs = translation_peers.torch_transformer(SIZES, 7).eval()
  theirs.load_state_dict({k: torch.tensor(np.array(x)) for k, x in to_torch(params).items()})
  actual = theirs(torch.tensor(source), torch.tensor(target[:, :5])).detach().numpy()
  expected = ours.apply({"params": params}, *inputs)
  np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


def test_pytorch_s_transformer_drops_what_ours_drops():
  """Embeddings and the ends of branches, two in a block of the encoder, three in the decoder's."""
  nn = pytest.importorskip("torch").nn
  theirs = list(translation_peers.torch_transformer(SIZES, 7).modules())
  rates = [module.p for module in theirs if isinstance(module, nn.Dropout) and module.p]
  assert rates == [SIZES["dropout_rate"]] * (1 + SIZES["num_blocks"] * (2 + 3))
  assert not any(m.dropout for m in theirs if isinstance(m, nn.MultiheadAttention))


def options(**fields):
  given = dict(models=None, batch_size=4, dtype="float32", max_length=8, rounds=1)
  return types.SimpleNamespace(**given | dict(torch_python=None) | fields)


@pytest.mark.thorough
@pytest.mark.parametrize("candidate", ["transformer", "resmlp"])
def test_ours_are_steps_and_translations_of_the_library(candidate, monkeypatch):
  whole = translation_peers.config_of

  def config_of(*args):
    config = whole(*args)
    config.model.update(num_blocks=1, hidden_dim=8, channels_mlp_dim=12, num_heads=2)
    return config

  monkeypatch.setattr(translation_peers, "config_of", config_of)
  told = json.loads(json.dumps(translation_peers._shared("small", options())))
  assert told["sizes"]["hidden_dim"] == 8 and told["parameters"] > 8 * told["sizes"]["vocab_size"]
  calls = translation_peers.CANDIDATES[candidate](types.SimpleNamespace(**told))
  assert calls.keys() == {"step", "decode"}
  for call in calls.values():
    call()


def test_the_table_is_that_of_the_seconds(answer, monkeypatch, capsys):
  """Of 4 sentences of 8 tokens."""
  seconds, times = {"transformer": 0.5, "resmlp": 0.25, "pytorch": 1.0}, {"step": 1, "decode": 2}
  answer(lambda name, _, call: seconds[name] * times[call])
  told = dict(parameters=1, batch_size=4, max_length=8, dtype="float32")
  monkeypatch.setattr(translation_peers, "_shared", lambda *args: told)
  translation_peers.main(options())
  lines = capsys.readouterr().out.splitlines()
  assert "| step | resmlp | 0.2500 | 16.0 | 128 | 0.50 |" in lines
  assert lines[-1] == "| decode | pytorch | 2.0000 | 2.0 | 16 | 2.00 |"
