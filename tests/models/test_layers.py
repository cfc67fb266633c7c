"""Layers: the dense one against Linen's own, dropout by its shares, a matrix along an axis."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.models import layers


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 4, 5), (0, 3, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.first(1)
def test_dense_is_linens(shape, dtype):
  x = jax.random.normal(jax.random.key(0), shape)
  ours, plain = layers.Dense(7, dtype=dtype), nn.Dense(7, dtype=dtype)
  params = jax.jit(ours.init)(jax.random.key(1), x)
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(
    jnp.shape, jax.jit(plain.init)(jax.random.key(1), x)
  )

  def outputs_and_gradients(layer):
    loss = lambda params, x: (layer.apply(params, x).astype(jnp.float32) ** 2).sum()
    return layer.apply(params, x), jax.grad(loss, (0, 1))(params, x)

  found, expected = outputs_and_gradients(ours), outputs_and_gradients(plain)
  assert found[0].dtype == expected[0].dtype
  tolerance = dict(float32=1e-5, bfloat16=2e-2)[dtype]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance
    ),
    found,
    expected,
  )


def dropped(x, rate, seed=0):
  drop = lambda key: layers.Dropout(rate, deterministic=False).apply({}, x, rngs={"dropout": key})
  return jax.jit(drop)(jax.random.key(seed))


@pytest.mark.parametrize("rate", [1 / 1024, 0.05, 0.3, 0.5, 0.99, 0.998])
def test_dropout_drops_each_value_with_exactly_its_rate_and_alone(rate):
  rows, width = 20_000, 33
  y = np.asarray(dropped(jnp.ones((rows, width)), rate))
  zero = y == 0
  np.testing.assert_allclose(y[~zero], 1 / (1 - rate), rtol=1e-6)
  error = (rate * (1 - rate) / zero.size) ** 0.5
  assert abs(zero.mean() - rate) < 5 * error
  assert abs(zero.mean(axis=0) - rate).max() < 5 * error * width**0.5
  together = np.cov(zero.T.astype(float)) - np.diag(zero.var(axis=0))  # bytes of a word, too
  assert abs(together).max() < 6 * rate * (1 - rate) / rows**0.5 + 1e-4


@pytest.mark.parametrize("shape", [(5,), (3, 1), (2, 3, 7), (0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_keeps_shape_and_dtype(shape, dtype):
  y = dropped(jnp.ones(shape, dtype), 0.5)
  assert y.shape == shape and y.dtype == dtype
  assert set(np.unique(np.float32(y))) <= {0, 2}


def test_dropout_differs_by_key_and_is_the_identity_without_one():
  x = jnp.arange(1.0, 1001)
  assert not np.array_equal(dropped(x, 0.5, seed=0), dropped(x, 0.5, seed=1))
  np.testing.assert_array_equal(dropped(x, 0.5), dropped(x, 0.5))
  for drop in (layers.Dropout(0.5, deterministic=True), layers.Dropout(0.0, deterministic=False)):
    np.testing.assert_array_equal(drop.apply({}, x), x)


@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_a_matrix_acts_along_an_axis(axis):
  rng = np.random.default_rng(0)
  x, matrix = rng.normal(size=(3, 4, 5)), rng.normal(size=(2, (3, 4, 5)[axis]))
  y = jax.jit(lambda x: layers.along(axis, matrix, x))(np.float32(x))
  expected = np.moveaxis(np.tensordot(matrix, x, (1, axis)), 0, axis)
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
