"""Gradients of single examples against a closed form and against the gradient of the mean."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim

CHUNKS = (1, 3, 7, 100)


@pytest.fixture
def regression():
  """Weights, and the inputs [10, 3] and targets [10] of a linear regression."""
  rng = np.random.default_rng(0)
  params = {"w": rng.normal(size=3).astype(np.float32), "b": np.float32(0.5)}
  batch = rng.normal(size=(10, 3)).astype(np.float32), rng.normal(size=10).astype(np.float32)
  return params, batch


def squared_error(params, batch):
  x, y = batch
  return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_linear_regression_in_closed_form(regression, chunk):
  params, (x, y) = regression
  chunks = list(optim.per_example_grads(squared_error, params, (x, y), chunk=chunk))
  lengths = [len(c["b"]) for c in chunks]
  assert sum(lengths) == 10 and set(lengths[:-1]) <= {chunk} and lengths[-1] <= chunk
  residuals = np.float64(x) @ params["w"] + params["b"] - y
  found = jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)
  np.testing.assert_allclose(found["w"], 2 * residuals[:, None] * x, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found["b"], 2 * residuals, rtol=1e-5, atol=1e-6)


class Pictures(nn.Module):
  """A convolution, a normalisation of each example and a head."""

  @nn.compact
  def __call__(self, x):
    x = nn.LayerNorm()(nn.tanh(nn.Conv(4, (2, 2))(x)))
    return nn.Dense(3)(x.mean(axis=(1, 2)))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.first(1)
def test_the_mean_is_the_gradient_of_the_mean_loss(chunk):
  rng = np.random.default_rng(0)
  batch = {"x": rng.normal(size=(10, 3, 3, 2)).astype(np.float32), "y": rng.integers(0, 3, 10)}
  batch = jax.tree.map(jnp.asarray, batch)
  params = jax.jit(Pictures().init)(jax.random.key(0), batch["x"])["params"]

  def loss(params, batch):
    logits = Pictures().apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

  chunks = optim.per_example_grads(loss, params, batch, chunk=chunk)
  sums = [jax.tree.map(lambda g: g.sum(axis=0), c) for c in chunks]
  mean = jax.tree.map(lambda *parts: sum(parts) / 10, *sums)
  expected = jax.jit(jax.grad(loss))(params, batch)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), mean, expected)


def test_the_loss_gets_batches_of_one_and_is_traced_once_for_each_size(regression):
  params, batch = regression
  shapes = []

  def loss(params, batch):
    shapes.append([x.shape for x in batch])
    return squared_error(params, batch)

  for _ in range(2):
    for _ in optim.per_example_grads(loss, params, batch, chunk=4):
      pass
  assert shapes == 2 * [[(1, 3), (1,)]]  # once for 4 examples, once for the last 2


def test_a_key_for_each_example(regression):
  params, (x, _y) = regression
  keys = jax.random.split(jax.random.key(0), 10)

  def loss(params, batch):
    return params["b"] * jax.random.normal(batch["key"][0])

  found = [g["b"] for g in optim.per_example_grads(loss, params, {"x": x, "key": keys}, chunk=4)]
  np.testing.assert_allclose(np.concatenate(found), jax.vmap(jax.random.normal)(keys), rtol=1e-6)


def test_it_holds_no_gradient_that_it_has_handed_out(regression):
  params, batch = regression
  before = {id(x) for x in jax.live_arrays()}
  for chunk in optim.per_example_grads(squared_error, params, batch, chunk=3):
    alive = [x for x in jax.live_arrays() if id(x) not in before and x.shape[1:] == (3,)]
    assert sum(len(x) for x in alive) <= 3
    del chunk, alive
