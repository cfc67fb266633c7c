"""Preconditioning with operands of fewer bits: the formula, and training that stays the same."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from mixer_jax.optim import algebra
from mixer_jax.optim.curvature import views
from mixer_jax.optim.curvature.blocks import Block


def rounded(x):
  return np.asarray(x, jnp.bfloat16).astype(np.float32)


@pytest.mark.parametrize("damping_type", ["exact", "factored"])
def test_operands_are_rounded_and_sums_are_not(damping_type):
  rng = np.random.default_rng(0)
  whole = views.whole(0, (48, 32))
  block = Block("one", "kronecker", ("one/kernel",), ((48, 32),), (48, 32), views=(whole,))
  v, a, g = (rng.normal(size=s).astype(np.float32) for s in ((48, 32), (48, 48), (32, 32)))
  s, t = (rng.uniform(1, 2, n).astype(np.float32) for n in (48, 32))
  exact = damping_type == "exact"
  inverses = (algebra.Eigen(s, a), algebra.Eigen(t, g)) if exact else (a, g)
  found = algebra.precondition(block, {"one/kernel": v}, inverses, 0.5, "bfloat16")
  product = lambda x, y: rounded(x) @ rounded(y)
  if exact:
    v = product(product(a.T, v), g) / (np.outer(s, t) + 0.5)
    a, g = a, g.T
  expected = product(product(a, v), g)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-3)
  error = np.abs(expected - np.float64(a) @ v @ g).max()
  assert error > 0.05  # the rounding is there to be seen


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.first(1)
def test_weights_of_any_type_are_summed_in_float32(dtype):
  """The sum of 90,000 ones is none of float16."""
  x = np.random.default_rng(0).normal(size=(300, 300, 2)).astype(np.float32)
  params = {"kernel": jnp.ones((2, 3)).at[0, 0].set(2.0)}

  def factors(dtype):
    weights = jnp.ones((300, 300), dtype)
    y = lambda p, b: (nn.Dense(3, use_bias=False).apply({"params": p}, b[0]), None, b[1])
    batch = x, weights
    rng = jax.random.key(0)
    return optim.Curvature(y, params, batch).factors(params, batch, rng)["kernel"]

  with jax.enable_x64(dtype == np.float64):
    found = factors(dtype)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, factors(np.float32))
