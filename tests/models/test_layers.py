"""The dense layer against the product that Linen's own makes."""

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
