"""Encoder-decoder models: causality, padding, NumPy's forward pass, cached steps, K-FAC."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import models, optim
from tests.models import common
from tests.models.common import flat, tree_of

VOCAB, LENGTH = 11, 6
NAMES = {"linear": "resmlp_translate_small", "attention": "transformer_translate_small"}
SIZES = dict(vocab_size=VOCAB, max_length=LENGTH)
SMALL = dict(hidden_dim=8, num_blocks=1, channels_mlp_dim=12, num_heads=2)
MIXINGS = tuple(NAMES)


def small(mixing, **overrides):
  return models.translator(NAMES[mixing], **SIZES | SMALL | overrides)


def pairs(source=(5, 3, 4), target=(4, 5, 2), n=LENGTH, m=LENGTH, seed=0):
  """Ids and masks of sources and targets of these lengths, padded to n and m."""
  rng = np.random.default_rng(seed)
  mask = lambda lengths, size: np.arange(size) < np.array(lengths)[:, None]
  ids = lambda size: rng.integers(1, VOCAB, (len(source), LENGTH))[:, :size]
  return ids(n), mask(source, n), ids(m), mask(target, m)


def shapes(model):
  return tree_of(model, *pairs())


def randomised(model):
  return {"params": common.randomised(model, *pairs(), mean=0.1)}


def count(name, **sizes):
  ids = jnp.zeros((1, 2), jnp.int32)
  return common.count(tree_of(models.translator(name, **sizes), ids, ids, ids, ids))


def by_hand(name, vocab, length):
  """The number of parameters, layer by layer."""
  blocks = {"6": 6, "12": 12, "small": 3}[name.rpartition("_")[2]]
  d, f = (256, 1024) if name.endswith("small") else (512, 2048)
  attention, mlp, norm = 4 * (d * d + d), d * f + f + f * d + d, 2 * d
  if name.startswith("resmlp"):
    mix, branch = length * length + length, norm + d
  else:
    mix, branch = attention, norm
  encoder, decoder = mix + mlp + 2 * branch, mix + attention + mlp + 3 * branch
  return vocab * d + blocks * (encoder + decoder) + 2 * norm


@pytest.mark.parametrize("name", models.TRANSLATORS)
@pytest.mark.first(2)
def test_sizes(name):
  found = count(name, vocab_size=1000, max_length=64)
  assert found == by_hand(name, 1000, 64)
  if name == "transformer_translate_6":
    # Vaswani et al.: 65 million for the base model with a vocabulary of 37,000.
    assert round((found + 36_000 * 512) / 1e6) in (63, 64)
  if name.endswith("small"):
    assert count(name, vocab_size=1000, max_length=64, tied=False) == found + 2 * 1000 * 256


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.first(1)
def test_no_token_sees_the_future(mixing):
  """Over all places and lengths; and earlier words reach every later logit."""
  model = small(mixing)
  variables = randomised(model)
  source, source_mask, target, _ = pairs(target=(LENGTH,) * 3)

  @jax.jit
  def every_change(target):
    """Logits [t, batch, m, vocab], with word t of the targets changed."""
    apply = lambda ids: model.apply(variables, source, source_mask, ids, jnp.ones_like(ids))
    m = target.shape[1]
    change = lambda t: apply(jnp.where(jnp.arange(m) == t, 1 + target % (VOCAB - 1), target))
    return apply(target), jax.vmap(change)(jnp.arange(m))

  for m in (4, LENGTH):
    logits, changed = every_change(target[:, :m])
    moved = np.abs(changed - logits).max(axis=(1, 3))  # [t, place]
    early = np.tri(m, k=-1, dtype=bool)
    assert moved[early].max(initial=0) <= 1e-6 and moved[~early].min() > 1e-4


@pytest.mark.thorough
def test_a_matrix_is_triangular_in_the_decoder_alone():
  model = small("linear", num_blocks=2)
  variables, batch = randomised(model), pairs()
  loss = lambda v: (model.apply(v, *batch) ** 2).sum()
  gradient = jax.jit(jax.grad(loss))(variables)["params"]
  below = np.tri(LENGTH, k=-1, dtype=bool)  # kernel[s, t] takes token s to output t
  for i in range(2):
    kernel = gradient[f"DecoderBlock_{i}"]["cross_patch"]["kernel"]
    np.testing.assert_array_equal(kernel[below], 0.0)
    assert np.abs(kernel[~below][:10]).min() > 0
    kernel = gradient[f"EncoderBlock_{i}"]["cross_patch"]["kernel"][:5, :5]
    assert np.abs(kernel).min() > 0


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.first(1)
def test_padding_gives_and_takes_nothing(mixing):
  model = small(mixing)
  variables = randomised(model)

  @jax.jit
  def run(source, source_mask, target, target_mask):
    def loss(variables):
      logits = model.apply(variables, source, source_mask, target, target_mask)
      words = optax.softmax_cross_entropy_with_integer_labels(logits, target)
      return jnp.where(target_mask, words, 0).sum() / target_mask.sum(), logits

    return jax.grad(loss, has_aux=True)(variables)

  gradient, logits = run(*(cut := pairs(n=5, m=5)))
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  mask = cut[3]
  assert np.abs(logits[mask]).max() > 0.1
  source, source_mask, target, target_mask = pairs()
  source = np.where(source_mask, source, 7)
  other, found = run(source, source_mask, np.where(target_mask, target, 3), target_mask)
  close(found[:, :5][mask], logits[mask])
  jax.tree.map(close, other, gradient)
  # An example alone, without any padding.
  alone = jax.jit(model.apply)(variables, *(x[1:2, :k] for x, k in zip(pairs(), (3, 3, 5, 5))))
  close(alone[0], logits[1])
  assert alone.dtype == jnp.float32


def numpy_translator(p, mixing, source, target):
  """Logits of one pair without padding, one block a side, float64."""
  heads, d = SMALL["num_heads"], SMALL["hidden_dim"]
  dense = lambda q, x: x @ q["kernel"] + q["bias"]
  erf = np.vectorize(math.erf)

  def norm(q, x):
    return common.layer_norm(x, q, 1e-6) if mixing == "attention" else x * q["scale"] + q["bias"]

  def attention(q, x, y, causal):
    q_, k, v = dense(q["query"], x), dense(q["key"], y), dense(q["value"], y)
    out = np.zeros_like(q_)
    for part in np.split(np.arange(d), heads):
      scores = q_[:, part] @ k[:, part].T / np.sqrt(d / heads)
      weights = np.exp(scores) * (np.tri(len(x)) if causal else 1)
      out[:, part] = weights / weights.sum(-1, keepdims=True) @ v[:, part]
    return dense(q["out"], out)

  def mix(q, x, causal):
    if mixing == "attention":
      return attention(q["attention"], x, x, causal)
    w, n = q["cross_patch"]["kernel"], len(x)
    rows = [sum(w[s, t] * x[s] for s in range(t + 1 if causal else n)) for t in range(n)]
    return np.array(rows) + q["cross_patch"]["bias"][:n, None]

  def mlp(q, x):
    h = dense(q["Dense_0"], x)
    return dense(q["Dense_1"], h * (1 + erf(h / np.sqrt(2))) / 2)

  def branch(q, x, layer):
    y = layer(norm(q["norm"], x))
    return x + (y * q["layer_scale"]["scale"] if mixing == "linear" else y)

  def embedded(ids):
    x = p["words"]["embedding"][ids] * np.sqrt(d)
    if mixing == "attention":
      for t in range(len(ids)):
        for i in range(d // 2):
          x[t, 2 * i] += np.sin(t / 10000 ** (2 * i / d))
          x[t, 2 * i + 1] += np.cos(t / 10000 ** (2 * i / d))
    return x

  q, x = p["EncoderBlock_0"], embedded(source)
  x = branch(q["mix_branch"], x, lambda y: mix(q, y, causal=False))
  x = branch(q["mlp_branch"], x, lambda y: mlp(q["cross_channel"], y))
  encoded = norm(p["encoder_norm"], x)
  q, x = p["DecoderBlock_0"], embedded(target)
  x = branch(q["mix_branch"], x, lambda y: mix(q, y, causal=True))
  x = branch(q["cross_branch"], x, lambda y: attention(q["cross_attention"], y, encoded, False))
  x = branch(q["mlp_branch"], x, lambda y: mlp(q["cross_channel"], y))
  return norm(p["decoder_norm"], x) @ p["words"]["embedding"].T


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.first(1)
def test_logits_equal_numpy(mixing):
  model = small(mixing)
  variables, batch = randomised(model), pairs()
  logits = jax.jit(model.apply)(variables, *batch)
  p = jax.tree.map(np.float64, variables["params"])
  for i in range(3):
    source, target = (ids[i][mask[i]] for ids, mask in (batch[:2], batch[2:]))
    expected = numpy_translator(p, mixing, source, target)
    np.testing.assert_allclose(logits[i, : len(target)], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.thorough
def test_steps_equal_the_whole_at_all_places_and_lengths(mixing):
  """Beams of other words share a source; each equals a target of its own."""
  model = small(mixing, num_blocks=2)
  variables = randomised(model)
  source, source_mask, _, _ = pairs()
  targets = np.random.default_rng(3).integers(0, VOCAB, (3, 2, LENGTH))

  @jax.jit
  def both(targets):
    memory, cache = model.apply(
      variables, source, source_mask, beams=2, length=targets.shape[2], method="start"
    )

    def step(cache, t):
      logits, cache = model.apply(variables, targets[:, :, t], t, memory, cache, method="step")
      return cache, logits

    stepped = jax.lax.scan(step, cache, jnp.arange(targets.shape[2]))[1]
    whole = lambda ids: model.apply(variables, source, source_mask, ids, jnp.ones_like(ids))
    return jnp.moveaxis(stepped, 0, 2), jax.vmap(whole, 1, 1)(targets)

  for m in (2, LENGTH):
    stepped, whole = both(targets[:, :, :m])
    assert np.abs(whole[:, 0] - whole[:, 1]).max() > 0.1
    np.testing.assert_allclose(stepped, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_dropout_acts_in_training_alone():
  for mixing in MIXINGS:
    model = small(mixing, dropout_rate=0.5)
    variables, batch = randomised(model), pairs()
    run = jax.jit(lambda key: model.apply(variables, *batch, train=True, rngs={"dropout": key}))
    assert np.abs(run(jax.random.key(0)) - run(jax.random.key(1))).max() > 0.01
  without = model.clone(dropout_rate=0.0)
  found = jax.jit(lambda v: without.apply(v, *batch, train=True))(variables)
  expected = jax.jit(lambda v: model.apply(v, *batch))(variables)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.thorough
def test_bfloat16_computes_low_and_stores_high():
  model = small("linear")
  variables, batch = randomised(model), pairs()
  low = model.clone(dtype="bfloat16")
  found, expected = (jax.jit(m.apply)(variables, *batch) for m in (low, model))
  assert found.dtype == jnp.float32
  assert {x.dtype for x in jax.tree.leaves(shapes(low))} == {jnp.dtype("float32")}
  assert 0 < np.abs(found - expected).mean() < 0.1 * np.abs(expected).mean()


def problem(mixing):
  """A function for K-FAC of all but the padding, and parameters."""
  model = small(mixing)
  predict = lambda p, b: (model.apply({"params": p}, *b), b[2], b[3].astype(jnp.float32))
  return predict, randomised(model)["params"]


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.first(1)
def test_every_parameter_has_a_block(mixing):
  predict, params = problem(mixing)
  curvature = optim.Curvature(predict, params, pairs(), norms="diagonal")
  kinds = {path: b.kind for b in curvature.blocks for path in b.paths}
  names = flat(params)
  assert set(kinds) == set(names)
  kernels = {name for name in names if name.endswith(("kernel", "embedding"))}
  assert {name for name, kind in kinds.items() if kind == "kronecker"} >= kernels


@pytest.mark.thorough
def test_padding_counts_in_no_factor():
  """Neither in those of the embedding that sources, targets and outputs share."""
  predict, params = problem("linear")
  curvature = optim.Curvature(predict, params, pairs(), estimation="empirical")
  factors = [curvature.factors(params, batch) for batch in (pairs(), pairs(n=5, m=5))]
  assert factors[0]["DecoderBlock_0/cross_patch"].inputs.shape == (LENGTH + 1, LENGTH + 1)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  jax.tree.map(close, *factors)


@pytest.mark.thorough
def test_a_step_of_kfac_lowers_the_loss():
  """Also that of the triangular matrix alone."""
  (predict, params), batch = problem("linear"), pairs()

  def loss(params):
    logits, words, weights = predict(params, batch)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, words)
    return (each * weights).sum() / weights.sum()

  tx = optim.kfac(1e-3, optim.Curvature(predict, params, batch, norms="diagonal"))

  @jax.jit
  def step(params):
    before, grads = jax.value_and_grad(loss)(params)
    update, _ = tx.update(grads, tx.init(params), params, batch=batch, rng=jax.random.key(0))
    kernel = lambda tree: tree["DecoderBlock_0"]["cross_patch"]["kernel"]
    slope = (jnp.triu(kernel(update)) * kernel(grads)).sum()
    return before, loss(optax.apply_updates(params, update)), slope

  before, after, slope = step(params)
  assert after < before and slope < 0
