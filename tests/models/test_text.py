"""Encoders of text: padding, lengths, options, roles and published sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import models
from mixer_jax.errors import UserError
from mixer_jax.models import gmlp
from tests.models.common import count, layer_norm, randomised, tree_of
from tests.models.test_gmlp import numpy_block

TOKENS, VOCAB = 7, 11
SIZES = dict(vocab_size=VOCAB, max_length=TOKENS, segments=2)
SMALL = dict(hidden_dim=8, num_blocks=2)
_WIDTHS = {
  "gmlp": dict(ffn_dim=12),
  "mixer": dict(channels_mlp_dim=12, tokens_mlp_dim=5, num_heads=2),
  "resmlp": dict(channels_mlp_dim=12),
  "bert": dict(ffn_dim=12, num_heads=2),
}
_NAMES = {"bert": "bert_tiny"}
BACKBONES = {
  **{f"gmlp {g}": dict(gating=g) for g in gmlp.GATINGS},
  "gmlp toeplitz": dict(spatial="toeplitz"),
  "gmlp attention": dict(attention_dim=4),
  "mixer": {},
  "mixer galerkin": dict(token_mixer="galerkin"),
  "mixer fourier": dict(token_mixer="fourier"),
  "resmlp": {},
  "resmlp layer_norm": dict(normalization="layer_norm"),
  "resmlp mlp": dict(patch_communication="mlp"),
  "resmlp none": dict(patch_communication="none"),
  "bert": {},
}
# One of each, for slower tests.
FEW = ("gmlp split", "gmlp toeplitz", "gmlp attention", "mixer", "resmlp", "bert")


def small(backbone, **overrides):
  family = backbone.split()[0]
  fields = SIZES | SMALL | _WIDTHS[family] | BACKBONES[backbone] | overrides
  return models.encoder(_NAMES.get(family, f"{family}_text_small"), **fields)


def sequences(lengths=(5, 3, 4), tokens=TOKENS, seed=0):
  """Words, mask and segments of sequences of these lengths, padded to `tokens`."""
  rng = np.random.default_rng(seed)
  shape = (len(lengths), tokens)
  mask = np.arange(tokens) < np.array(lengths)[:, None]
  return rng.integers(0, VOCAB, shape), mask, rng.integers(0, 2, shape)


def with_params(backbone, **overrides):
  model = small(backbone, **overrides)
  return model, {"params": randomised(model, *sequences(), mean=0.1)}


def run(model, params, *inputs, **kw):
  """Outputs, from one compiled program."""
  return jax.jit(functools.partial(model.apply, **kw))(params, *inputs)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.first(1)
def test_padding_changes_neither_outputs_nor_gradients(backbone):
  model, params = with_params(backbone, scan_blocks=True)  # compiles faster
  ids, mask, segments = sequences()
  weights = np.random.default_rng(2).normal(size=(3, TOKENS, 8)).astype(np.float32)

  @jax.jit
  def gradient_of(params, ids, mask, segments):
    def loss(params):
      y = model.apply(params, ids, mask, segments)
      y = jnp.where(mask[..., None], y, 0)
      return (y * weights[:, : y.shape[1]]).sum(), y

    return jax.grad(loss, has_aux=True)(params)

  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  gradient, padded = gradient_of(params, ids, mask, segments)
  assert np.abs(padded[mask]).max() > 0.1
  # The first sequence then has no padding at all.
  short_gradient, short = gradient_of(params, *(x[:, :5] for x in (ids, mask, segments)))
  np.testing.assert_allclose(padded[:, :5], short, rtol=1e-6, atol=1e-6)
  jax.tree.map(close, gradient, short_gradient)
  other = (ids + ~mask * 3) % VOCAB, mask, np.where(mask, segments, 1 - segments)
  other_gradient, found = gradient_of(params, *other)
  np.testing.assert_allclose(found, padded, rtol=1e-6, atol=1e-6)
  jax.tree.map(close, other_gradient, gradient)


@pytest.mark.parametrize("backbone", [*FEW, "mixer galerkin", "resmlp mlp"])
@pytest.mark.first(1)
def test_tokens_reach_each_other(backbone):
  model, params = with_params(backbone, scan_blocks=True)
  ids, mask, segments = sequences()
  apply = jax.jit(model.apply)
  y = apply(params, ids, mask, segments)
  ids[0, 4] = (ids[0, 4] + 1) % VOCAB
  changed = np.abs(apply(params, ids, mask, segments) - y).max(axis=-1) > 1e-4
  assert changed[0, :5].all() and not changed[1:].any()


def test_gmlp_equals_numpy():
  model, params = with_params("gmlp attention", layer_norm_epsilon=0.05, gate_epsilon=0.2)
  ids, mask, segments = sequences()
  p = jax.tree.map(np.float64, params["params"])
  n = 5
  x = p["words"]["embedding"][ids[0, :n]] + p["segment_types"]["embedding"][segments[0, :n]]
  for i in range(2):
    x = numpy_block(p[f"GmlpBlock_{i}"], x, "split", 0.05, 0.2)
  x = layer_norm(x, p["norm"], 0.05)
  found = run(model, params, ids, mask, segments)[0, :n]
  np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backbone", [*FEW, "resmlp none", "mixer galerkin", "resmlp mlp"])
@pytest.mark.thorough
def test_shortened_parameters_are_the_same_function(backbone):
  model, params = with_params(backbone)
  short = small(backbone, max_length=5)
  ids, mask, segments = (x[:, :5] for x in sequences())
  if backbone in ("mixer galerkin", "resmlp mlp"):
    with pytest.raises(UserError, match="^.*/kernel: its layer changes with max_length; leave"):
      models.shortened(params["params"], 5)
    return
  cut = models.shortened(params["params"], 5)
  shapes = jax.eval_shape(short.init, jax.random.key(0), ids, mask, segments)["params"]
  assert jax.tree.map(np.shape, cut) == jax.tree.map(np.shape, shapes)
  scanned = models.shortened(models.stacked(params["params"]), 5)
  jax.tree.map(np.testing.assert_array_equal, scanned, models.stacked(cut))
  found = run(short.clone(scan_blocks=True), {"params": scanned}, ids, mask, segments)
  expected = run(model, params, ids, mask, segments)
  np.testing.assert_allclose(found[mask], expected[mask], rtol=1e-5, atol=1e-5)
  nested = models.shortened({"encoder": params["params"], "head": {"bias": np.ones(3)}}, 5)
  jax.tree.map(np.testing.assert_array_equal, nested["encoder"], cut)


@pytest.mark.parametrize("backbone", FEW)
@pytest.mark.first(1)
def test_scanned_and_rematerialised_blocks_are_the_same_function(backbone):
  model, params = with_params(backbone)
  expected = run(model, params, *sequences())
  scanned = small(backbone, scan_blocks=True, remat=True)
  found = run(scanned, {"params": models.stacked(params["params"])}, *sequences())
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backbone", FEW)
@pytest.mark.thorough
def test_bfloat16_computes_low_and_stores_high(backbone):
  model, params = with_params(backbone, num_blocks=1)
  low = small(backbone, num_blocks=1, dtype="bfloat16")
  y = run(low, params, *sequences())
  assert y.dtype == jnp.bfloat16
  own = jax.eval_shape(low.init, jax.random.key(0), *sequences())
  assert {x.dtype for x in jax.tree.leaves(own)} == {jnp.dtype("float32")}
  mask = sequences()[1]
  expected = run(model, params, *sequences())[mask]
  assert np.abs(y.astype(jnp.float32)[mask] - expected).mean() < 0.1 * np.abs(expected).mean()
  head = models.MaskedLm(low)
  positions = np.zeros((3, 1), int)
  logits = jax.eval_shape(head.init_with_output, jax.random.key(0), *sequences(), positions)[0]
  assert logits.dtype == jnp.float32


@pytest.mark.parametrize("backbone", ["mixer", "resmlp", "bert"])
@pytest.mark.thorough
def test_dropout_acts_in_training_alone(backbone):
  model, params = with_params(backbone, dropout_rate=0.5, num_blocks=1)
  drop = lambda seed: run(
    model, params, *sequences(), train=True, rngs={"dropout": jax.random.key(seed)}
  )
  assert np.abs(drop(0) - drop(1)).max() > 0.01
  without = small(backbone, dropout_rate=0.0, num_blocks=1)
  found = run(model, params, *sequences())
  np.testing.assert_array_equal(found, run(without, params, *sequences(), train=True))


@pytest.mark.thorough
def test_features_take_the_place_of_words():
  model = small("gmlp split", features_dim=3)
  ids, mask, segments = sequences()
  features = np.random.default_rng(0).normal(size=(3, TOKENS, 3)).astype(np.float32)
  params = {"params": randomised(model, None, mask, segments, features)}
  assert {"project", "segment_types", "norm"} < set(params["params"])
  assert "words" not in params["params"]
  y = run(model, params, None, mask, segments, features)
  assert y.shape == (3, TOKENS, 8)
  features[0, 5:] = 100  # padding
  found = run(model, params, None, mask, segments, features)
  np.testing.assert_allclose(found[mask], y[mask], rtol=1e-6)
  with pytest.raises(ValueError, match="there are no features, but features_dim is 3"):
    model.init(jax.random.key(0), ids, mask)
  with pytest.raises(ValueError, match="there are some features, but features_dim is 0"):
    small("bert").init(jax.random.key(0), ids, mask, segments, features)
  with pytest.raises(ValueError, match="no words to attend to"):
    models.MaskedLm(model).init(jax.random.key(0), ids, mask, segments, ids[:, :1], features)
  untied = models.MaskedLm(model, tied=False)
  assert set(randomised(untied, None, mask, segments, ids[:, :1], features)) == {"encoder", "head"}


def number(name, **fields):
  ids = jnp.zeros((1, 2), jnp.int32)
  return count(tree_of(models.encoder(name, **fields), ids, ids))


def test_published_sizes():
  """Millions of parameters in the paper's specifications; BERT's counts are transformers'."""
  paper = dict(gmlp_text_base=130, gmlp_text_large=365, amlp_text_base=109, amlp_text_large=316)
  sizes = dict(vocab_size=32000, max_length=512, scan_blocks=True)
  assert {name: round(number(name, **sizes) / 1e6) for name in paper} == paper
  # BertModel(BertConfig()) without its pooler, 768 * 769: 109,482,240 - 590,592.
  bert = dict(vocab_size=30522, max_length=512, segments=2, scan_blocks=True)
  assert number("bert_base", **bert) == 109_482_240 - 590_592


@pytest.mark.thorough
def test_every_encoder_is_built():
  for name in models.ENCODERS:
    if "large" not in name:
      number(name, **SIZES, scan_blocks=True)
