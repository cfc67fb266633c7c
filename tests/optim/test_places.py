"""Layers whose rows do not begin with the examples: shared, turned, flattened, mapped."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from mixer_jax import optim
from mixer_jax.optim.factors import curvature_of


class Queries(nn.Module):
  """Two learned queries that read each example; their layer has no batch axis unless `spread`."""

  spread: bool

  @nn.compact
  def __call__(self, x):
    queries = self.param("start", nn.initializers.normal(1.0), (1, 2, 4))
    whole = (len(x), 2, 4)
    queries = jnp.broadcast_to(queries, whole) if self.spread else queries
    queries = jnp.broadcast_to(nn.Dense(4, name="query")(queries), whole)
    scores = nn.softmax(jnp.einsum("bqd,btd->bqt", queries, nn.Dense(4, name="key")(x)))
    return nn.Dense(3, name="head")(jnp.einsum("bqt,btd->bqd", scores, x).reshape(len(x), -1))


@functools.cache
def queries(examples):
  x = np.random.default_rng(0).normal(size=(examples, 5, 4)).astype(np.float32)
  params = jax.jit(Queries(True).init)(jax.random.key(0), x)["params"]
  return x, params | {"query": {**params["query"], "kernel": 3 * params["query"]["kernel"]}}


def apply(module):
  return lambda params, batch: module.apply({"params": params}, batch)


def of_queries(spread, key, axis_name=None, **options):
  x, params = queries(16)
  predict, options = apply(Queries(spread)), dict(plain="^start$", **options)
  estimate = lambda x: optim.kfac_factors(predict, params, x, key, axis_name=axis_name, **options)[
    "query"
  ]
  if axis_name is None:
    return estimate(x)
  mesh = jax.make_mesh((4,), (axis_name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  P = PartitionSpec
  return jax.shard_map(estimate, mesh=mesh, in_specs=P(axis_name), out_specs=P(), check_vma=False)(
    x
  )


@pytest.mark.parametrize("axis_name", [None, "data"])
@pytest.mark.parametrize("averaging", ["published", "expand"])
@pytest.mark.thorough
def test_learned_queries_have_the_factors_of_spread_ones(averaging, axis_name):
  """In the mean over labels, on one device and on four."""
  queries(16)
  keys = jax.random.split(jax.random.key(0), 600)
  factors = lambda spread, name: jax.lax.map(
    lambda k: of_queries(spread, k, name, token_averaging=averaging), keys
  )
  shared, spread = (
    jax.tree.map(lambda x: x.mean(0), jax.jit(factors, static_argnums=(0, 1))(*of))
    for of in ((False, axis_name), (True, None))
  )
  np.testing.assert_allclose(shared.inputs, spread.inputs, rtol=1e-5)
  error = np.linalg.norm(shared.outputs - spread.outputs)
  assert error < 0.15 * np.linalg.norm(spread.outputs)


@pytest.mark.parametrize("estimation", ["exact", "empirical"])
def test_shared_rows_need_sampled_labels(estimation):
  x, params = queries(16)
  predict = lambda p, x: (Queries(False).apply({"params": p}, x), np.zeros(len(x), int))
  with pytest.raises(ValueError, match="query has rows without the batch axis"):
    optim.kfac_blocks(predict, params, x, plain="^start$", estimation=estimation)


class Places(nn.Module):
  """Words and their places; `how` they are looked up: at once, flattened."""

  how: str = "at once"

  @nn.compact
  def __call__(self, ids):
    flat = ids.reshape(-1) if self.how == "flat" else ids
    x = nn.Embed(7, 4, name="words")(flat).reshape(*ids.shape, 4)
    x = x + nn.Embed(6, 4, name="places")(jnp.arange(ids.shape[1]))
    return nn.Dense(3, name="head")(nn.tanh(x).mean(1))


@pytest.mark.parametrize("examples", [5, 6, 7])
def test_as_many_places_as_examples_are_shared_all_the_same(examples):
  ids = np.random.default_rng(0).integers(0, 7, (examples, 6))
  params = jax.jit(Places().init)(jax.random.key(0), ids)["params"]
  blocks = {b.name: b.tokens for b in optim.kfac_blocks(apply(Places()), params, ids)}
  assert blocks == {"words": 6, "places": 6, "head": 1}
  with pytest.raises(ValueError, match="places has rows without the batch axis"):
    optim.kfac_blocks(apply(Places()), params, ids, estimation="exact")


@pytest.mark.parametrize("how", ["flat", "looped"])
def test_words_are_words_flattened_or_one_example_at_a_time(how):
  ids = np.random.default_rng(0).integers(0, 7, (5, 6))
  params = jax.jit(Places().init)(jax.random.key(0), ids)["params"]
  predict = apply(Places("flat" if how == "flat" else "at once"))
  looped = lambda p, x: jax.lax.map(lambda ids: predict(p, ids[None])[0], x)
  found, expected = (
    optim.kfac_factors(of, params, ids, jax.random.key(1))["words"]
    for of in (looped if how == "looped" else predict, apply(Places()))
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


@pytest.mark.parametrize("over", [jax.vmap, lambda f: lambda x: jax.lax.map(f, x)])
def test_a_map_over_rows_that_all_examples_use_is_none_over_examples(over):
  class Net(nn.Module):
    mapped: bool

    @nn.compact
    def __call__(self, x):
      around = over if self.mapped else lambda f: f
      places = around(nn.Dense(5, name="places"))(jnp.sin(jnp.arange(12.0).reshape(4, 3)))
      return nn.Dense(3, name="head")(jnp.tanh(x[:, None] + places).mean(1))

  x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
  dense = {"kernel": jnp.ones((3, 5)) / 3, "bias": jnp.zeros(5)}
  params = {"places": dense, "head": {"kernel": jnp.eye(5, 3), "bias": jnp.zeros(3)}}
  factors = lambda net: optim.kfac_factors(apply(net), params, x, jax.random.key(0))["places"]
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
  jax.tree.map(close, factors(Net(True)), factors(Net(False)))
  with pytest.raises(ValueError, match="places has rows without the batch axis"):
    optim.kfac_blocks(apply(Net(True)), params, x, estimation="exact")


@pytest.mark.parametrize("options", [dict(norms="diagonal"), dict(eigenvalues="examples")], ids=str)
def test_a_loop_over_several_examples_at_once_is_refused(options):
  x, params = pairs(4)
  with pytest.raises(ValueError, match="needs the examples first in"):
    tx = optim.scale_by_kfac(turned("in twos"), params, x, estimation="exact", **options)
    tx.update(params, tx.init(params), params, batch=x, rng=None)


class Turned(nn.Module):
  """A layer over tokens; its rows are [batch, tokens], or [tokens, batch], or pairs stacked."""

  how: str = "first"

  @nn.compact
  def __call__(self, x):
    dense = lambda x: nn.tanh(nn.Dense(5, name="dense")(nn.LayerNorm(name="norm")(x)))
    if self.how == "turned":
      h = dense(x.swapaxes(0, 1)).swapaxes(0, 1)
    elif self.how == "stacked":
      h = jnp.stack(jnp.split(dense(jnp.concatenate([x[:, 0], x[:, 1]])), 2), axis=1)
    elif self.how == "flat":
      h = dense(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:2], 5)
    else:
      h = dense(x)
    return nn.Dense(3, name="head")(h.reshape(*h.shape[:-2], -1))


def turned(how):
  if how == "mapped":
    one = apply(Turned())
    return lambda params, x: jax.vmap(lambda x: one(params, x))(x)
  if how == "looped":
    one = apply(Turned())
    return lambda params, x: jax.lax.map(lambda x: one(params, x), x)
  if how == "in twos":
    two = apply(Turned())
    return lambda params, x: jax.lax.map(
      lambda x: two(params, x), x.reshape(-1, 2, *x.shape[1:])
    ).reshape(-1, 3)
  if how == "chosen":
    one = apply(Turned())
    same = lambda params, x: jax.lax.cond(x.sum() > 0, one, lambda p, x: one(p, x) + 0, params, x)
    return lambda params, x: jax.vmap(lambda x: same(params, x))(x)
  return apply(Turned(how))


@functools.cache
def pairs(examples):
  x = np.random.default_rng(1).normal(size=(examples, 2, 4)) + np.arange(4)
  return x.astype(np.float32), jax.jit(Turned().init)(jax.random.key(0), x)["params"]


ALL = ("first", "turned", "stacked", "flat", "mapped", "looped", "in twos", "chosen")


@pytest.mark.parametrize("examples", [2, 4])  # 2: as many tokens as examples
@pytest.mark.parametrize("how", ALL)
def test_padded_examples_count_nowhere(how, examples):
  """A batch with examples of weight 0 has the factors of the one without them."""
  x, params = pairs(examples)
  padded = np.concatenate([x, 100 + x])
  weights = np.repeat(np.float32([1, 0]), examples)
  predict = turned(how)
  weighted = lambda p, x: (predict(p, x), None, jnp.asarray(weights))
  found = optim.kfac_factors(weighted, params, padded, None, estimation="exact")
  expected = optim.kfac_factors(turned("first"), params, x, None, estimation="exact")
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  jax.tree.map(close, found["dense"], expected["dense"])


@pytest.mark.parametrize("how", ["mapped", "looped"])
def test_a_diagonal_of_normalisations_of_one_example_at_a_time(how):
  x, params = pairs(4)
  options = dict(norms="diagonal", estimation="exact")
  found, expected = (
    optim.kfac_factors(turned(how), params, x, None, **options)["norm"] for how in (how, "first")
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found, expected)


@pytest.mark.parametrize("how, shape", [("turned", r"\(2, 4, 4\)"), ("flat", r"\(8, 4\)")])
def test_a_diagonal_of_normalisations_needs_the_examples_first(how, shape):
  x, params = pairs(4)
  with pytest.raises(ValueError, match=f"examples first in the input of norm, .* {shape}; allowed"):
    optim.kfac_blocks(turned(how), params, x, norms="diagonal")


@pytest.mark.parametrize("key", [np.zeros(2, np.uint32), np.zeros((), np.uint32)], ids=["2", "1"])
def test_views_of_an_example_may_be_examples(key):
  """Two rows of outputs for each entry of the batch, and an array without a batch axis."""
  x, params = pairs(4)
  views = lambda p, b: turned("first")(p, b["views"].reshape(-1, 2, 4))
  batch = {"key": key, "views": np.stack([x, -x], axis=1)}
  found = optim.kfac_factors(views, params, batch, None, estimation="exact")
  flat = batch["views"].reshape(-1, 2, 4)
  expected = optim.kfac_factors(turned("first"), params, flat, None, estimation="exact")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_views_beside_an_array_as_long_as_the_batch(caplog):
  """As a teacher whose width is the size of the batch, which its model takes in no other size."""
  x, params = pairs(4)

  def views(params, batch):
    turn = jnp.eye(4) @ batch["teacher"]["turn"]
    return turned("first")(params, (batch["views"] @ turn).reshape(-1, 2, 4))

  turn = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0].astype(np.float32)
  batch = {"teacher": {"turn": turn}, "views": np.stack([x, -x], axis=1)}
  found = optim.kfac_factors(views, params, batch, None, estimation="exact")
  flat = (batch["views"] @ turn).reshape(-1, 2, 4)
  expected = optim.kfac_factors(turned("first"), params, flat, None, estimation="exact")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
  assert "another size" not in caplog.text


def test_a_model_for_one_size_of_batch():
  x, params = pairs(4)
  constant = np.arange(8, dtype=np.float32).reshape(4, 2, 1)
  predict = lambda p, x: Turned().apply({"params": p}, x + constant)
  moved = lambda p, x: Turned().apply({"params": p}, x)
  found = optim.kfac_factors(predict, params, x, None, estimation="exact")
  expected = optim.kfac_factors(moved, params, x + constant, None, estimation="exact")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize(
  "options", [{}, {"norms": "diagonal"}, {"eigenvalues": "examples"}], ids=str
)
@pytest.mark.thorough
def test_factors_are_those_of_float32_where_64_bits_are_on(options, dtype):
  x, params = pairs(4)
  expected = optim.kfac_factors(apply(Turned()), params, x, None, estimation="exact")
  with jax.enable_x64(True):
    params, x = jax.tree.map(lambda a: jnp.asarray(a, dtype), (params, x))
    found = optim.kfac_factors(apply(Turned()), params, x, None, estimation="exact")
    tx = optim.kfac(1e-3, apply(Turned()), params, x, **options)
    update = jax.jit(lambda g, s, p: tx.update(g, s, p, batch=x, rng=jax.random.key(0)))
    state = tx.init(params)
    for _ in range(2):
      updates, state = update(params, state, params)
  assert {u.dtype for u in jax.tree.leaves(updates)} == {np.dtype(dtype)}
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), found, expected)


def test_a_diagonal_of_a_normalisation_seen_in_two_ways_is_refused():
  x, params = pairs(4)
  both = lambda p, x: turned("first")(p, x) + turned("mapped")(p, x)
  with pytest.raises(ValueError, match="needs the examples first in the input of norm"):
    optim.kfac_blocks(both, params, x, norms="diagonal")


@pytest.mark.parametrize("shape", [(6, 5), (6, 4, 5)], ids=["no multiple", "a multiple"])
def test_a_layer_of_a_part_of_the_batch(shape):
  """Half of six examples: 3 rows, or 12 of tokens."""

  class Half(nn.Module):
    @nn.compact
    def __call__(self, x):
      half = len(x) // 2
      return nn.Dense(3, name="head")(x.at[:half].add(nn.Dense(5, name="half")(x[:half])))

  x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
  predict, params = apply(Half()), jax.jit(Half().init)(jax.random.key(0), x)["params"]
  factors = lambda predict: optim.kfac_factors(predict, params, x, None, estimation="exact")["half"]
  rows = np.concatenate([x[:3].reshape(-1, 5), np.ones((x[:3].size // 5, 1))], axis=1)
  for weights in (None, np.float32([1, 1, 1, 0, 0, 0])):
    answer = lambda p, x, w=weights: predict(p, x) if w is None else (predict(p, x), None, w)
    np.testing.assert_allclose(factors(answer).inputs, rows.T @ rows / len(rows), rtol=1e-5)
  published, expand = (
    curvature_of(predict, params, x, estimation="exact", token_averaging=averaging)
    for averaging in ("published", "expand")
  )
  scales = [c.moment_scales(params, x)["half"] for c in (published, expand)]
  traces = [np.trace(c.estimate(params, x)["half"].outputs) for c in (published, expand)]
  np.testing.assert_allclose(scales[0] / scales[1], traces[0] / traces[1], rtol=1e-5)
  tx = optim.scale_by_kfac(predict, params, x, eigenvalues="examples")
  with pytest.raises(ValueError, match="needs the examples first in the rows of half; allowed"):
    tx.update(params, tx.init(params), params, batch=x, rng=jax.random.key(0))
