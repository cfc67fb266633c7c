"""The candidates of `peers`: the plain Mixer is the same function as ours."""

import io
import json
import sys
import types

import flax.traverse_util as tree
import jax
import numpy as np
import pytest

from benchmarks import peers, train
from mixer_jax import models


def to_plain(path):
  """The plain Mixer numbers its layers in the order of their calls."""
  *names, leaf = path
  if names == ["stem"]:
    return ("Conv_0", leaf)
  if names == ["head"]:
    return ("Dense_8", leaf)
  if names == ["pre_head_layer_norm"]:
    return ("LayerNorm_4", leaf)
  block, layer, *dense = names
  first = 2 * int(block[-1])
  if layer.startswith("LayerNorm"):
    return (f"LayerNorm_{first + int(layer[-1])}", leaf)
  first = 2 * (first + ["token_mixing", "channel_mixing"].index(layer))
  return (f"Dense_{first + int(dense[0][-1])}", leaf)


@pytest.mark.thorough
def test_the_plain_mixer_computes_what_ours_does():
  sizes = dict(hidden_dim=16, num_blocks=2, tokens_mlp_dim=8, channels_mlp_dim=32)
  ours = models.build("mixer_s16", 5, patch_size=4, **sizes)
  plain = peers.plain_mixer(dict(patch_size=4, **sizes), 5, "float32")
  rng = np.random.default_rng(0)
  images = rng.normal(size=(3, 8, 8, 3)).astype(np.float32)
  params = jax.jit(ours.init)(jax.random.key(0), images)["params"]
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
  moved = {to_plain(path): x for path, x in tree.flatten_dict(params).items()}
  expected = ours.apply({"params": params}, images)
  actual = plain.apply({"params": tree.unflatten_dict(moved)}, images)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_candidate_answers_with_its_seconds_or_with_those_of_its_parts(monkeypatch, capsys):
  parts = {"dot": 0.5, "add": 0.25}
  calls = {"forward": lambda: np.ones(2), "profile": lambda: parts}
  monkeypatch.setattr(sys, "stdin", io.StringIO("forward\nprofile\n"))
  peers.work({"ours": lambda options: calls}, "ours", types.SimpleNamespace())
  seconds, answered = map(json.loads, capsys.readouterr().out.splitlines())
  assert 0.0 < seconds < 60.0 and answered == parts


def test_a_candidate_that_has_ended_is_a_line():
  worker = peers.Worker("ours", "false", {}, "benchmarks.peers")
  worker._process.wait()
  with pytest.raises(SystemExit, match="process of ours"):
    worker("step")
  assert peers.has(sys.executable, "json") and not peers.has(sys.executable, "no_such_module")


@pytest.mark.thorough
def test_ours_is_the_step_of_the_library(tiny_config, monkeypatch):
  tiny_config.model.num_blocks = 1
  monkeypatch.setattr(train, "config_of", lambda *args: tiny_config)
  options = types.SimpleNamespace(model="mixer_small", batch_size=32, dtype="float32")
  calls = peers.ours(options)
  before = calls["forward"]()
  calls["step"]()
  assert before.shape == (32, 4) and not np.array_equal(before, calls["forward"]())
