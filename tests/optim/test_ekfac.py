"""EK-FAC's second moments of examples against gradients of examples; parts of a batch."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from mixer_jax.optim import algebra, trees
from tests.optim.two_layers import (
  EXAMPLES,
  SIZES,
  assert_steps,
  averages,
  matrix,
  predict,
  rows,
  sequence,
  updates_of,
)


class Block(nn.Module):
  """A layer as `nn.scan` wants it."""

  @nn.compact
  def __call__(self, x, _):
    return nn.tanh(nn.Dense(4)(x)), None


class Words(nn.Module):
  """An embedding, then blocks in a loop."""

  @nn.compact
  def __call__(self, ids):
    x = nn.Embed(9, 4, name="words")(ids)
    loop = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    x, _ = loop(name="blocks")(x, None)
    return nn.Dense(3, name="head")(x.reshape(len(x), -1))


class Images(nn.Module):
  """A convolution and a layer with two output axes."""

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(nn.Conv(4, (2, 2), name="conv")(x))
    x = nn.DenseGeneral((2, 2), axis=(1, 3), name="general")(x)
    return nn.Dense(3, name="head")(x.reshape(len(x), -1))


class TimeFirst(nn.Module):
  """A layer whose rows have the time first."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(3, name="turned")(x.reshape(*x.shape[:2], -1).swapaxes(0, 1))
    return nn.Dense(3, name="head")(nn.tanh(x).mean(axis=0))


@pytest.mark.parametrize("model", [TimeFirst(), Words(), Images()])
@pytest.mark.first(1)
def test_second_moments_of_examples_are_those_of_their_gradients(model):
  rng = np.random.default_rng(0)
  ids = np.stack([rng.permutation(9)[:3] for _ in range(5)])
  x = ids if isinstance(model, Words) else rng.normal(size=(5, 3, 3, 2)).astype(np.float32)
  weights = np.float32([1, 1, 1, 1, 0])  # the last example is padding
  batch = {"x": x, "y": rng.integers(0, 3, 5), "weights": weights}
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]

  def predict(params, batch):
    return model.apply({"params": params}, batch["x"]), batch["y"], batch["weights"]

  def loss(params, x, y):
    return -jax.nn.log_softmax(model.apply({"params": params}, x[None]))[0, y]

  options = dict(estimation="empirical", token_averaging="expand")
  curvature = optim.Curvature(predict, params, batch, **options)
  basis = {}
  for b in curvature.blocks:
    turns = [
      None if wide else np.linalg.qr(rng.normal(size=(*b.stacked, d, d)))[0].astype(np.float32)
      for d, wide in zip(b.factor_sizes, b.diagonal)
    ]
    sizes = [jnp.ones((*b.stacked, d)) for d in b.factor_sizes]
    basis[b.name] = tuple(map(algebra.Eigen, sizes, turns))
  found = jax.jit(curvature.second_moments)(params, batch, None, basis)
  each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, batch["x"][:4], batch["y"][:4])
  assert set(found) == set(basis)
  for b in curvature.blocks:
    squares = 0.0
    for n in range(4):
      one = trees.by_path(jax.tree.map(lambda x, n=n: x[n], each))
      matrix = b.matrix([one[path] for path in b.paths])
      squares = squares + np.asarray(algebra.rotated(matrix, basis[b.name])) ** 2 / 4
    np.testing.assert_allclose(found[b.name], squares, rtol=1e-4, atol=1e-7, err_msg=b.name)


class Tagger(nn.Module):
  """An output for every token."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(3, use_bias=False, name="head")(x)


@pytest.mark.thorough
def test_both_second_moments_have_the_scale_of_the_loss_s_rows():
  """The expected square of a batch's gradient, labels drawn for every token, in closed form."""
  x = np.random.default_rng(0).normal(size=(4, 5, 2)).astype(np.float32)
  params = jax.jit(Tagger().init)(jax.random.key(0), x)["params"]
  predict = lambda params, x: Tagger().apply({"params": params}, x)
  p = np.float64(jax.nn.softmax(predict(params, x))).reshape(-1, 3)
  squares = np.einsum("ry,ryo->ro", p, (p[:, None] - np.eye(3)) ** 2)  # E[d^2] of each row
  of_gradient = np.float64(x).reshape(-1, 2).T ** 2 @ squares / len(p) ** 2
  curvature = optim.Curvature(predict, params, x, estimation="exact", token_averaging="expand")
  same = tuple(algebra.Eigen(jnp.ones(d), jnp.eye(d)) for d in (2, 3))
  found = curvature.second_moments(params, x, None, {"head": same})
  scaled = curvature.moment_scales(params, x)["head"] * of_gradient
  np.testing.assert_allclose(found["head"], scaled, rtol=1e-5)


@pytest.mark.parametrize("weights", [None, [1.0, 0.01, 2.0], [1.0, 0.0, 1.0]])
@pytest.mark.parametrize("c", [1.0, 0.1])
def test_squares_of_the_batch_s_gradient_have_the_mean_of_the_fisher_matrix(weights, c):
  """The mean over all labels that three rows can have; exactly, of rows alike or weighted alike."""
  model, x = nn.Dense(3, use_bias=False), np.random.default_rng(0).normal(size=(3, 2))
  x = x[[0, 0, 0]] if weights and weights[1] else x
  params, w = {"kernel": jnp.float32([[1, -1, 0.5], [0, 2, -1]])}, weights and jnp.float32(weights)

  def predict(params, batch):
    logits = model.apply({"params": params}, batch["x"])
    return (logits, None, batch["w"]) if "w" in batch else logits

  batch = {"x": x} | ({} if w is None else {"w": w})
  options = dict(likelihood=(c, "categorical"), token_averaging="expand")
  curvature = optim.Curvature(predict, params, batch, **options)
  scale = curvature.moment_scales(params, batch)["kernel"]
  logits = x @ np.float64(params["kernel"])
  p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  share = np.ones(3) / 3 if w is None else np.float64(w) / np.sum(np.float64(w))
  squares = 0.0
  for labels in itertools.product(range(3), repeat=3):
    gradient = c * np.einsum("b,bi,bo->io", share, x, p - np.eye(3)[list(labels)])
    squares = squares + np.prod(p[range(3), labels]) * gradient**2
  fisher = c * np.einsum("b,bi,bo->io", share, x**2, p * (1 - p))
  np.testing.assert_allclose(scale * squares, fisher, rtol=1e-5)


@pytest.mark.parametrize("moments", ["batch", "examples"])
@pytest.mark.first(2)
def test_ekfac(moments):
  params, batch, _ = sequence()[0]
  options = dict(factor_decay=0.7, factor_period=3, inverse_period=6)
  options |= dict(moments=moments, moment_decay=0.6, damping=0.1)
  curvature = optim.Curvature(predict, params, batch, estimation="empirical")
  tx = optim.scale_by_ekfac(curvature, **options)
  wanted, state = [], {name: {} for name in SIZES}
  for t, factors in averages(0.7, 3):
    wanted.append({})
    for name, factor in factors.items():
      own, (a, d) = state[name], rows(*sequence()[t][:2])[name]
      tokens = a.shape[1]
      if t % 6 == 0:
        (la, qa), (lg, qg) = map(np.linalg.eigh, factor)
        own["basis"], own["moments"], own["estimates"] = (qa, qg), np.outer(la, lg), []
      qa, qg = own["basis"]
      if t % 3 == 0 and moments == "examples":
        each = np.einsum("nti,nto->nio", a @ qa, d @ qg)  # a gradient of every example
        own["estimates"].append(tokens * (each**2).mean(axis=0))
        weights = 0.6 ** np.arange(len(own["estimates"]))[::-1]
        own["moments"] = np.average(own["estimates"], axis=0, weights=weights)
      v = qa.T @ matrix(sequence()[t][2][name]) @ qg
      if moments == "batch":
        own["moments"] = 0.6 * own["moments"] + 0.4 * EXAMPLES * tokens * v**2
      wanted[-1][name] = qa @ (v / (own["moments"] + 0.1)) @ qg.T
  assert_steps(updates_of(tx)[0], wanted)


def test_ekfac_is_kfac_where_the_second_moments_of_a_batch_have_no_weight():
  params, batch, _ = sequence()[0]
  options = dict(damping=0.1, factor_decay=0.7, factor_period=3, inverse_period=6)
  curvature = optim.Curvature(predict, params, batch)
  kfac = updates_of(optim.scale_by_kfac(curvature, **options))[0]
  found = updates_of(optim.scale_by_ekfac(curvature, moment_decay=1.0, **options))[0]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, kfac)
