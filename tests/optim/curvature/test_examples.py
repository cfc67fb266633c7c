"""Which rows belong to which example: shared arrays, memories, mixed examples, views, own batches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.curvature.brute_force import close, factors, with_ones
from tests.optim.curvature.test_padding import Turned, pairs, turned
from tests.optim.small_net import predict, problem

P = PartitionSpec


class Queries(nn.Module):
  """Two queries that read each example; their layer has no axis of examples unless `spread`."""

  spread: bool

  @nn.compact
  def __call__(self, x):
    queries = jnp.cos(jnp.arange(8.0)).reshape(1, 2, 4)
    whole = (len(x), 2, 4)
    queries = jnp.broadcast_to(queries, whole) if self.spread else queries
    queries = jnp.broadcast_to(nn.Dense(4, name="query")(queries), whole)
    scores = nn.softmax(jnp.einsum("bqd,btd->bqt", queries, nn.Dense(4, name="key")(x)))
    return nn.Dense(3, name="head")(jnp.einsum("bqt,btd->bqd", scores, x).reshape(len(x), -1))


class Places(nn.Module):
  """Words and their places, with a mask over pairs of places that the batch holds."""

  spread: bool = False

  @nn.compact
  def __call__(self, ids, mask=0.0):
    x = nn.Embed(7, 4, name="words")(ids)
    places = jnp.arange(ids.shape[1])
    places = jnp.broadcast_to(places, ids.shape) if self.spread else places
    x = x + nn.Embed(6, 4, name="places")(places)
    return nn.Dense(3, name="head")((nn.softmax(x @ x.mT + mask) @ x).mean(1))


def apply(module):
  return lambda params, batch: module.apply({"params": params}, batch)


@pytest.mark.parametrize("make", [Queries, Places])
@pytest.mark.parametrize("estimation", ["exact", "sampled", "empirical"])
@pytest.mark.first(2)
def test_rows_that_all_examples_share_have_the_factors_of_spread_ones(make, estimation):
  """Also where there are as many of them as examples, and on four devices."""
  rng, key = np.random.default_rng(0), jax.random.key(0)
  x = rng.normal(size=(8, 5, 4)).astype(np.float32)
  x = x if make is Queries else rng.integers(0, 7, (8, 6))
  params = jax.jit(make(True).init)(jax.random.key(0), x)["params"]
  labelled = lambda spread: lambda p, x: (apply(make(spread))(p, x), jnp.ones(len(x), int))
  options = dict(estimation=estimation, rng=key)
  for examples in (8, 6):
    batch = x[:examples]
    shared, spread = (factors(labelled(s), params, batch, **options) for s in (False, True))
    close(shared, spread)
  if estimation == "empirical":
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    told = dict(estimation=estimation, axis_name="d")
    curvature = optim.Curvature(labelled(False), params, x[:2], **told)
    of = lambda p, x: curvature.estimate(p, x, key)
    several = jax.shard_map(of, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    close(jax.jit(several)(params, x), factors(labelled(True), params, x, **options))


@pytest.mark.parametrize("over", [jax.vmap, lambda f: lambda x: jax.lax.map(f, x)])
@pytest.mark.first(1)
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
  close(*(factors(apply(Net(mapped)), params, x) for mapped in (True, False)))


class DeepONet(nn.Module):
  """Values [functions, points] of functions at points that they share."""

  @nn.compact
  def __call__(self, functions, points):
    branch, trunk = nn.Dense(4, name="branch")(functions), nn.Dense(4, name="trunk")(points)
    return jnp.einsum("bk,gk->bg", branch, trunk)[..., None]


@pytest.mark.parametrize("functions", [5, 6])
def test_points_that_functions_share(functions):
  """By hand: the Fisher matrix of a normal output is 2, and each function has all points."""
  rng = np.random.default_rng(0)
  batch = tuple(rng.normal(size=s).astype(np.float32) for s in ((functions, 3), (6, 2)))
  params = jax.jit(DeepONet().init)(jax.random.key(0), *batch)["params"]
  of = lambda p, b: DeepONet().apply({"params": p}, *b)
  options = dict(likelihood="normal", token_averaging="expand", in_axes=(0, None))
  found = factors(of, params, batch, **options)
  branch, trunk = (np.asarray(x @ params[n]["kernel"]) for x, n in zip(batch, ("branch", "trunk")))
  close(found["branch"].outputs, 2 * trunk.T @ trunk / 6)
  close(found["trunk"].outputs, 2 * branch.T @ branch / functions)
  for name, x in zip(("branch", "trunk"), batch):
    rows = with_ones(x)
    close(found[name].inputs, rows.T @ rows / len(rows))
  blocks = optim.Curvature(of, params, batch, likelihood="normal", in_axes=(0, None)).blocks
  assert {b.name: b.tokens for b in blocks} == {"branch": 1, "trunk": 6}


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


@pytest.mark.parametrize("weighted, estimation", [(False, "sampled"), (True, "empirical")])
def test_nodes_of_packed_graphs_are_rows_of_their_examples(weighted, estimation):
  rng, model = np.random.default_rng(0), Graphs()
  nodes = rng.normal(size=(4, 3, 2)).astype(np.float32)
  labels, weights = np.arange(4) % 3, np.float32([1, 1, 1, 0])
  params = jax.jit(model.init)(jax.random.key(0), nodes)["params"]
  rest = lambda b: (b["labels"], b["weights"]) if weighted else (b["labels"],)
  of = lambda p, *args: model.apply({"params": p}, *args)
  regular = lambda p, b: (of(p, b["nodes"]), *rest(b))
  packed = lambda p, b: (of(p, b["nodes"], b["number"]), *rest(b))
  batch = {"nodes": nodes, "labels": labels, "weights": weights}
  graphs = batch | {"nodes": nodes.reshape(-1, 2), "number": np.full(4, 3)}
  options = dict(rng=jax.random.key(1), estimation=estimation)
  close(
    factors(packed, params, graphs, in_axes=None, **options),
    factors(regular, params, batch, **options),
  )
  blocks = optim.Curvature(packed, params, graphs, in_axes=None).blocks
  assert {b.name: b.tokens for b in blocks} == {"node": 3, "head": 1}


class Towers(nn.Module):
  """Logits [batch, batch] of pictures by texts."""

  @nn.compact
  def __call__(self, pictures, texts):
    dense = lambda name: nn.Dense(2, name=name)
    return dense("pictures")(pictures) @ dense("texts")(texts).T


@pytest.mark.parametrize("likelihood", ["normal", "categorical"])
def test_both_sides_of_a_contrastive_loss_are_examples(likelihood):
  """Each logit is of two examples: factors by an explicit Jacobian, and Gauss-Newton's step."""
  rng, n = np.random.default_rng(0), 5
  batch = tuple(np.float32(rng.normal(size=(n, d))) for d in (3, 4))
  params = jax.jit(Towers().init)(jax.random.key(0), *batch)["params"]
  labels = np.eye(n, dtype=np.float32) if likelihood == "normal" else np.arange(n)
  of = lambda p, b: (Towers().apply({"params": p}, *b), labels)
  options = dict(likelihood=likelihood, in_axes=None)
  curvature = optim.Curvature(of, params, batch, estimation="exact", **options)
  assert {b.name: (b.kind, b.tokens) for b in curvature.blocks} == dict.fromkeys(
    ("pictures", "texts"), ("kronecker", 1)
  )
  keys = jax.random.split(jax.random.key(0), 1000)
  estimates = jax.lax.map(lambda k: curvature.estimate(params, batch, k), keys)
  wide, sides = jax.tree.map(np.float64, params), ("pictures", "texts")
  y = [x @ wide[k]["kernel"] + wide[k]["bias"] for k, x in zip(sides, batch)]
  logits = y[0] @ y[1].T
  p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  row = lambda q: 2 * np.eye(n) if likelihood == "normal" else np.diag(q) - np.outer(q, q)
  fisher = np.stack([row(q) for q in p])  # of the logits of a picture
  a_row = np.einsum("bij,jo->bio", np.broadcast_to(np.eye(n), (n, n, n)), y[1])
  wanted = {
    "pictures": np.einsum("bio,bij,bjp->op", a_row, fisher, a_row) / n,
    "texts": np.einsum("bo,bii,bp->op", y[0], fisher, y[0]) / n,
  }
  for name, x in zip(sides, batch):
    mean = estimates[name].outputs.mean(0)
    assert np.linalg.norm(mean - wanted[name]) < 0.1 * np.linalg.norm(wanted[name]), name
    close(estimates[name].inputs[0], with_ones(x).T @ with_ones(x) / n)
  loss = lambda p: _mean_loss(likelihood, Towers().apply({"params": p}, *batch), labels)
  gradient, flat = jax.grad(loss)(params), lambda t: jax.flatten_util.ravel_pytree(t)[0]
  tx = optim.gauss_newton(curvature, damping=0.1)
  step, _ = tx.update(gradient, tx.init(params), params, batch=batch)
  j = jax.jacobian(lambda p: Towers().apply({"params": p}, *batch))(params)
  j = np.concatenate([np.reshape(x, (n, n, -1)) for x in jax.tree.leaves(j)], axis=-1)
  matrix = np.einsum("bip,bij,bjq->pq", j, fisher, j) / n + 0.1 * np.eye(j.shape[-1])
  close(flat(step), -np.linalg.solve(matrix, flat(gradient)), rtol=1e-3, atol=1e-5)


def _mean_loss(likelihood, outputs, targets):
  """The loss of a batch."""
  if likelihood == "normal":
    return ((outputs - targets) ** 2).sum() / len(outputs)
  return -jnp.take_along_axis(jax.nn.log_softmax(outputs), targets[:, None], 1).mean()


class Batched(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(4, name="one")(x))
    return nn.Dense(3, name="two")(nn.tanh(x))


def test_examples_that_mix_are_found_or_said(caplog):
  """Batch statistics: with each other's rows, factors are those of all rows of the batch."""
  x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
  variables = jax.jit(Batched().init)(jax.random.key(0), x)
  params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}
  of = lambda p, x: Batched().apply({"params": p, **rest}, x, mutable=["batch_stats"])[0]
  said = optim.Curvature(of, params, x, in_axes=None)
  found = optim.Curvature(of, params, x)
  assert found.blocks == said.blocks
  key = jax.random.key(0)
  close(found.factors(params, x, key), said.factors(params, x, key))
  rows = with_ones(x)
  close(found.factors(params, x, key)["one"].inputs, rows.T @ rows / 6)
  y = x @ params["one"]["kernel"] + params["one"]["bias"]
  hidden = with_ones(np.tanh((y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5)))
  close(found.factors(params, x, key)["two"].inputs, hidden.T @ hidden / 6, atol=1e-5)


def test_exact_factors_of_examples_that_mix_are_right_in_the_mean():
  """Outputs of one node of a graph depend on its neighbours' rows."""
  params, batch = problem(4)
  adjacent = np.random.default_rng(1).uniform(size=(4, 4)).astype(np.float32)
  mixed = lambda p, b: adjacent @ predict(p, b)[0]
  curvature = optim.Curvature(
    mixed, params, batch, likelihood="normal", estimation="exact", in_axes=None
  )
  keys = jax.random.split(jax.random.key(0), 400)
  one = lambda key: curvature.estimate(params, batch, key)["two"]
  found = jax.jit(lambda keys: jax.tree.map(lambda x: x.mean(0), jax.lax.map(one, keys)))(keys)
  # An output of example r has the gradient adjacent[r, i] at row i, and the Fisher matrix 2 I.
  expected = 2 * np.square(adjacent, dtype=np.float64).sum() / 4 * np.eye(4)
  assert np.linalg.norm(found.outputs - expected) < 0.1 * np.linalg.norm(expected)
  rows = with_ones(np.tanh(batch["x"] @ params["one"]["kernel"] + params["one"]["bias"]))
  close(found.inputs, rows.T @ rows / 4)


@pytest.mark.parametrize("beside", [{}, {"key": np.zeros((), np.uint32)}], ids=["alone", "key"])
def test_views_of_an_example_may_be_examples(beside):
  """Two rows of outputs for each entry of the batch."""
  x, params = pairs(4)
  views = lambda p, b: turned("first")(p, b["views"].reshape(-1, 2, 4))
  batch = {"views": np.stack([x, -x], axis=1)} | beside
  flat = batch["views"].reshape(-1, 2, 4)
  options = dict(token_averaging="expand")
  found, expected = (
    factors(views, params, batch, **options),
    factors(turned("first"), params, flat, **options),
  )
  close({n: f.inputs for n, f in found.items()}, {n: f.inputs for n, f in expected.items()})


def test_a_model_that_holds_an_array_for_each_example_takes_the_batch_as_a_whole():
  x, params = pairs(4)
  constant = np.arange(8, dtype=np.float32).reshape(4, 2, 1)
  fixed = lambda p, x: Turned().apply({"params": p}, x + constant)
  moved = lambda p, b: Turned().apply({"params": p}, b[0] + b[1])
  key = jax.random.key(0)
  close(factors(fixed, params, x, key, in_axes=None), factors(moved, params, (x, constant), key))


def test_outputs_that_know_their_number_of_examples_are_those_of_the_whole_batch():
  """A reshape to [4, -1] would cut one example in four."""
  x, params = pairs(4)
  options = dict(likelihood="normal", rng=jax.random.key(0), estimation="sampled")
  of = lambda shape: lambda p, x: nn.tanh(x @ p["dense"]["kernel"])[..., :4].reshape(shape(x))
  found = factors(of(lambda x: (4, -1)), params, x, **options)
  close(found, factors(of(lambda x: (len(x), -1)), params, x, **options))


@pytest.mark.parametrize("shape", [(6, 5), (6, 4, 5)], ids=["rows", "tokens"])
def test_a_layer_of_a_part_of_the_batch(shape):
  """Half of six examples: 3 rows, or 12 of tokens."""

  class Half(nn.Module):
    @nn.compact
    def __call__(self, x):
      half = len(x) // 2
      return nn.Dense(3, name="head")(x.at[:half].add(nn.Dense(5, name="half")(x[:half])))

  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  params = jax.jit(Half().init)(jax.random.key(0), x)["params"]
  rows = with_ones(x[:3].reshape(-1, 5))
  for weights in (None, np.float32([1, 1, 1, 0, 0, 0])):
    of = lambda p, x, w=weights: (apply(Half())(p, x), None, w)
    found = factors(of, params, x, jax.random.key(0), in_axes=None)["half"]
    close(found.inputs, rows.T @ rows / len(rows))


def points(kind):
  """Points inside and on the boundary: outputs with batches of their own, of a net with a derivative."""
  rng = np.random.default_rng(0)
  u = lambda p, x: (jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])[..., 0]
  params = {"w": rng.normal(size=(2, 4)), "b": rng.normal(size=4), "v": rng.normal(size=(4, 1))}
  batch = {"inside": rng.normal(size=(7, 2)), "boundary": rng.normal(size=(3, 2))}

  def of(p, b):
    inner = {"value": u, "slope": lambda p, x: jax.vmap(jax.grad(u, 1), (None, 0))(p, x)}[kind]
    inner = inner(p, b["inside"])
    inner = inner[:, None] if inner.ndim == 1 else inner
    return {"inside": inner, "boundary": u(p, b["boundary"])[:, None]}

  return of, jax.tree.map(np.float32, params), jax.tree.map(np.float32, batch)


def test_outputs_may_have_batches_of_their_own():
  """A: all rows of an example of each term; G: the sum of the terms' own means."""
  of, params, batch = points("value")
  likelihood = {"inside": "normal", "boundary": (10.0, "normal")}
  options = dict(likelihood=likelihood, token_averaging="expand")
  found = factors(of, params, batch, **options)
  h = {k: np.tanh(x @ params["w"] + params["b"]) for k, x in batch.items()}
  mean = lambda f: {k: f(k).T @ f(k) / len(batch[k]) for k in batch}
  a = mean(lambda k: with_ones(batch[k]))
  close(found["w"].inputs, (a["inside"] + a["boundary"]) / 2)
  g = mean(lambda k: (1 - h[k] ** 2) * params["v"][:, 0])
  close(found["w"].outputs, 2 * g["inside"] + 20 * g["boundary"])
  a = mean(lambda k: h[k])
  close(found["v"].inputs, (a["inside"] + a["boundary"]) / 2)
  close(found["v"].outputs, np.full((1, 1), 22.0))
  both = {k: x[:3] for k, x in batch.items()}  # as many of each: one program
  alone = factors(of, params, both, **options)
  cut = optim.Curvature(of, params, batch, estimation="exact", **options).factors(params, both)
  close(np.kron(*cut["w"]), np.kron(*alone["w"]), rtol=1e-3)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_batches_of_any_size_have_their_own_factors(size):
  params, example = problem()
  _, batch = problem(size, seed=1)
  curvature = optim.Curvature(predict, params, example, estimation="exact")
  close(curvature.factors(params, batch), factors(predict, params, batch))
  _, first = problem(size)
  small = optim.Curvature(predict, params, first, estimation="exact")
  close(small.factors(params, example), curvature.factors(params, example), rtol=1e-6)
