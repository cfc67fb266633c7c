"""Rows that do not tell by their number of which examples they are: graphs, coincidences, sorted."""

import logging
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim

GRAPHS, NODES = 4, 3


class Graphs(nn.Module):
  """A dense layer over nodes, and the mean of the nodes of a graph; packed, or in a regular array."""

  @nn.compact
  def __call__(self, nodes, number=None):
    y = nn.tanh(nn.Dense(5, name="node")(nodes))
    if number is None:
      return nn.Dense(3, name="head")(y.mean(1))
    graph = jnp.repeat(jnp.arange(len(number)), number, total_repeat_length=len(nodes))
    sums = jax.ops.segment_sum(y, graph, len(number))
    return nn.Dense(3, name="head")(sums / number[:, None])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimation", ["sampled", "empirical"])
def test_nodes_of_packed_graphs_are_rows_of_their_examples(weighted, estimation):
  rng, model = np.random.default_rng(0), Graphs()
  nodes = rng.normal(size=(GRAPHS, NODES, 2)).astype(np.float32)
  labels, weights = np.arange(GRAPHS) % 3, np.float32([1, 1, 1, 0])
  params = jax.jit(model.init)(jax.random.key(0), nodes)["params"]
  rest = lambda b: (b["labels"], b["weights"]) if weighted else (b["labels"],)
  apply = lambda p, *args: model.apply({"params": p}, *args)
  regular = lambda p, b: (apply(p, b["nodes"]), *rest(b))
  packed = lambda p, b: (apply(p, b["nodes"], b["number"]), *rest(b))
  batch = {"nodes": nodes, "labels": labels, "weights": weights}
  graphs = batch | {"nodes": nodes.reshape(-1, 2), "number": np.full(GRAPHS, NODES)}
  found, expected = (
    optim.kfac_factors(predict, params, b, jax.random.key(1), estimation=estimation)
    for predict, b in ((packed, graphs), (regular, batch))
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, found, expected)
  tokens = {b.name: b.tokens for b in optim.kfac_blocks(packed, params, graphs)}
  assert tokens == {"node": NODES, "head": 1}


class Places(nn.Module):
  """Words and their places, with a mask over pairs of places that the batch holds."""

  @nn.compact
  def __call__(self, ids, mask):
    x = nn.Embed(7, 4, name="words")(ids)
    x = x + nn.Embed(ids.shape[1], 4, name="places")(jnp.arange(ids.shape[1]))
    return nn.Dense(3, name="head")((nn.softmax(x @ x.mT + mask) @ x).mean(1))


@pytest.mark.parametrize("examples", [3, 4])
def test_another_array_may_be_as_long_as_the_batch(examples):
  """The mask has four rows: so have the words of four examples."""
  batch = {"ids": np.random.default_rng(0).integers(0, 7, (examples, 4)), "mask": np.eye(4)}
  call = lambda p, b: Places().apply({"params": p}, b["ids"], b["mask"])
  params = jax.jit(Places().init)(jax.random.key(0), batch["ids"], batch["mask"])["params"]
  with pytest.raises(ValueError, match="places has rows without the batch axis"):
    optim.kfac_blocks(call, params, batch, estimation="exact")


class Memory(nn.Module):
  """Examples that attend to a memory that they share."""

  @nn.compact
  def __call__(self, queries, memory):
    memory = nn.Dense(4, name="memory")(memory)
    scores = nn.softmax(nn.Dense(4, name="query")(queries) @ memory.T)
    return nn.Dense(3, name="head")(scores @ memory)


def test_a_memory_of_the_batch_is_shared():
  rng, model = np.random.default_rng(0), Memory()
  batch = tuple(rng.normal(size=(n, 5)).astype(np.float32) for n in (4, 6))
  params = jax.jit(model.init)(jax.random.key(0), *batch)["params"]
  inside = lambda p, b: model.apply({"params": p}, *b)
  outside = lambda p, queries: inside(p, (queries, batch[1]))
  found, expected = (
    optim.kfac_factors(predict, params, b, jax.random.key(1))
    for predict, b in ((inside, batch), (outside, batch[0]))
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, found, expected)
  with pytest.raises(ValueError, match="memory has rows without the batch axis"):
    optim.kfac_blocks(inside, params, batch, estimation="exact")


class Assigned(Memory):
  """Also sets a column, by an index or by a concatenation."""

  by_index: bool = True

  @nn.compact
  def __call__(self, queries, memory):
    keys = nn.Dense(4, name="memory")(memory)
    h = nn.softmax(nn.Dense(4, name="query")(queries) @ keys.T) @ memory
    if self.by_index:
      h = h.at[:, 0].set(1.0)
    else:
      h = jnp.concatenate([jnp.ones_like(h[:, :1]), h[:, 1:]], axis=1)
    return nn.Dense(3, name="head")(h)


def test_an_assignment_by_an_index_leaves_a_memory_shared():
  rng = np.random.default_rng(0)
  batch = tuple(rng.normal(size=(n, 5)).astype(np.float32) for n in (12, 6))
  params = jax.jit(Assigned().init)(jax.random.key(0), *batch)["params"]
  found, expected = (
    optim.kfac_factors(
      lambda p, b, model=Assigned(by_index): model.apply({"params": p}, *b),
      *(params, batch, jax.random.key(1)),
    )
    for by_index in (True, False)
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, found, expected)


@pytest.mark.parametrize("number", [4, 6])
def test_a_memory_as_long_as_the_batch_is_told(number, caplog):
  rng, model = np.random.default_rng(0), Memory()
  batch = {n: rng.normal(size=(k, 5)).astype(np.float32) for n, k in (("x", 6), ("m", number))}
  params = jax.jit(model.init)(jax.random.key(0), batch["x"], batch["m"])["params"]
  predict = lambda p, b: model.apply({"params": p}, b["x"], b["m"])
  with caplog.at_level(logging.WARNING):
    tokens = {b.name: b.tokens for b in optim.kfac_blocks(predict, params, batch)}
  assert tokens["memory"] == (4 if number == 4 else 1)
  assert ("batch['m'] is as long as the batch" in caplog.text) == (number == 6)


class Towers(nn.Module):
  """Logits [batch, batch] of pictures by texts."""

  @nn.compact
  def __call__(self, pictures, texts):
    return nn.Dense(4, name="pictures")(pictures) @ nn.Dense(4, name="texts")(texts).T


def test_both_sides_of_a_comparison_are_examples(caplog):
  rng = np.random.default_rng(0)
  batch = tuple(rng.normal(size=(6, n)).astype(np.float32) for n in (3, 5))
  params = jax.jit(Towers().init)(jax.random.key(0), *batch)["params"]
  predict = lambda p, b: Towers().apply({"params": p}, *b)
  blocks = optim.kfac_blocks(predict, params, batch, estimation="exact")
  assert {b.name: b.tokens for b in blocks} == {"pictures": 1, "texts": 1} and not caplog.text


def test_a_second_view_of_the_examples_is_no_memory(caplog):
  model, rng = nn.Dense(3), np.random.default_rng(0)
  batch = {name: rng.normal(size=(6, 4)).astype(np.float32) for name in ("one", "two")}
  params = model.init(jax.random.key(0), batch["one"])["params"]
  net = lambda p, x: model.apply({"params": p}, x)
  predict = lambda p, b: net(p, b["one"]) + 0 * net(p, b["two"]).mean()
  assert [b.name for b in optim.kfac_blocks(predict, params, batch)] and not caplog.text


class DeepONet(nn.Module):
  """Values [functions, points] of functions at points that they share."""

  @nn.compact
  def __call__(self, functions, points):
    branch, trunk = nn.Dense(4, name="branch")(functions), nn.Dense(4, name="trunk")(points)
    return jnp.einsum("bk,gk->bg", branch, trunk)[..., None]


@pytest.mark.parametrize("functions", [5, 6])
def test_as_many_points_as_functions_are_shared_all_the_same(functions, caplog):
  rng = np.random.default_rng(0)
  batch = tuple(rng.normal(size=s).astype(np.float32) for s in ((functions, 3), (6, 2)))
  params = jax.jit(DeepONet().init)(jax.random.key(0), *batch)["params"]
  predict = lambda p, b: DeepONet().apply({"params": p}, *b)
  blocks = optim.kfac_blocks(predict, params, batch, likelihood="normal")
  assert {b.name: b.tokens for b in blocks} == {"branch": 1, "trunk": 6} and not caplog.text


class Grid(nn.Module):
  """Functions by 4 numbers each, at points (DeepONet); made for so many functions."""

  @nn.compact
  def __call__(self, numbers, points):
    branch = nn.Dense(8, name="branch")(numbers.reshape(4, -1)).reshape(4, 1, 8)
    return nn.Dense(1, name="head")(branch * nn.tanh(nn.Dense(8, name="trunk")(points)))


def test_a_grid_may_make_an_axis_longer():
  batch = np.ones((4, 5), np.float32), np.ones((6, 2), np.float32)
  params = jax.jit(Grid().init)(jax.random.key(0), *batch)["params"]
  predict = lambda p, b: Grid().apply({"params": p}, *b)
  blocks = optim.kfac_blocks(predict, params, batch, likelihood="normal")
  assert {b.name for b in blocks} == {"branch", "trunk", "head"}


def test_a_predict_of_one_size_is_told(caplog):
  x = np.ones((6, 4), np.float32)
  model = nn.Dense(3)
  params = model.init(jax.random.key(0), x)["params"]
  fixed = lambda p, x: model.apply({"params": p}, x.reshape(6, 4))
  with caplog.at_level(logging.WARNING):
    assert [b.tokens for b in optim.kfac_blocks(fixed, params, x)] == [1]
  assert "predict takes no batch of another size" in caplog.text


def test_examples_on_another_axis_of_the_outputs_are_refused():
  model, x = nn.Dense(3), np.ones((8, 5, 4), np.float32)
  params = model.init(jax.random.key(0), x)["params"]
  turned = lambda p, x: model.apply({"params": p}, x).swapaxes(0, 1)
  with pytest.raises(ValueError, match=r"shape \(5, 8, 3\), whose axis 1 grows with the batch; al"):
    optim.kfac_blocks(turned, params, x)


class Sorted(nn.Module):
  """A layer that sees the examples in the order of their first numbers."""

  @nn.compact
  def __call__(self, x, order):
    y = nn.tanh(nn.Dense(4, name="in")(x[order]))
    return nn.Dense(3, name="head")(jnp.zeros_like(y).at[order].set(y))


@pytest.mark.parametrize("tokens", [(), (2,)])
def test_padding_counts_nowhere_in_whatever_order(tokens):
  rng, model = np.random.default_rng(0), Sorted()
  x = rng.normal(size=(6, *tokens, 3)).astype(np.float32)
  weights = np.float32([1, 0, 1, 1, 0, 1])
  orders = np.argsort(x.reshape(6, -1)[:, 0]), np.arange(6)
  params = jax.jit(model.init)(jax.random.key(0), x, orders[0])["params"]
  found, expected = (
    optim.kfac_factors(
      lambda p, b, order=order: (model.apply({"params": p}, b[0], order), None, b[1]),
      *(params, (x, weights), jax.random.key(1)),
    )
    for order in orders
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, found, expected)


class Normalised(nn.Module):
  first: Any

  @nn.compact
  def __call__(self, x):
    y = nn.BatchNorm(use_running_average=False)(self.first(nn.Dense(8, name="in")(x)))
    return nn.Dense(3, name="head")(nn.relu(y))


@pytest.mark.parametrize("first", [nn.tanh, lambda y: nn.relu(y).at[0].set(0)])
def test_padding_that_batch_statistics_reach_does_not_count(first):
  """Also beside a row that is cut off."""
  rng, model = np.random.default_rng(0), Normalised(first)
  x, weights = rng.normal(size=(6, 3)).astype(np.float32), np.float32([1, 0, 1, 1, 0, 1])
  variables = jax.jit(model.init)(jax.random.key(0), x)
  stats = {"batch_stats": variables["batch_stats"]}
  predict = lambda p, b: (
    model.apply({"params": p, **stats}, b[0], mutable=["batch_stats"])[0],
    None,
    b[1],
  )
  a = optim.kfac_factors(predict, variables["params"], (x, weights), jax.random.key(1))["in"].inputs
  rows = np.concatenate([x, np.ones((6, 1))], axis=1)[weights > 0]
  np.testing.assert_allclose(a, rows.T @ rows / 4, rtol=1e-5, atol=1e-6)


class Pair(NamedTuple):
  mean: jax.Array
  variance: jax.Array


@pytest.mark.parametrize("kind", [Pair, lambda *two: list(two)])
def test_means_and_variances_may_have_names(kind):
  model, x = nn.Dense(4), np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
  params = model.init(jax.random.key(0), x)["params"]

  def predict(make):
    def call(params, x):
      mean, raw = jnp.split(model.apply({"params": params}, x), 2, axis=1)
      return make(mean, nn.softplus(raw))

    return call

  found, expected = (
    optim.kfac_factors(predict(m), params, x, jax.random.key(1), likelihood="normal_variance")
    for m in (kind, lambda *two: two)
  )
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  inner = lambda params, x: {"y": predict(kind)(params, x)}
  options = dict(likelihood={"y": "normal_variance"}, estimation="exact")
  assert optim.kfac_factors(inner, params, x, jax.random.key(1), **options).keys() == found.keys()
