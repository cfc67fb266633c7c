"""Attention of operator transformers against the paper's formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.models import attention
from tests.models.common import layer_norm, randomised

CASES = [(kind, p) for kind in attention.KINDS for p in (0, 2)]


def build(kind, **overrides):
  return attention.OperatorAttention(**dict(kind=kind, num_heads=3) | overrides)


def inputs(tokens=7, p=2, seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(2, tokens, 12)), rng.uniform(size=(2, tokens, p)) if p else None


def softmax(x, axis):
  return np.exp(x) / np.exp(x).sum(axis, keepdims=True)


def numpy_attention(params, kind, x, positions, heads=3, epsilon=1e-5):
  """One sequence x [n, d] in float64, head by head, as (Q K^T) V / n but for softmax.

  Fourier and softmax scores are divided by the root of a head's width, its positions included.
  """
  p = jax.tree.map(np.float64, params)
  n, width = len(x), x.shape[1] // heads

  def head(name, i):
    y = (x @ p[name]["kernel"] + p[name]["bias"])[:, i * width : (i + 1) * width]
    if name in {"galerkin": "kv", "fourier": "qk", "softmax": "qk", "linear": "kv"}[kind]:
      y = layer_norm(y, {k: v[i] for k, v in p[f"{name}_norm"].items()}, epsilon)
    return y if positions is None else np.concatenate([positions, y], axis=1)

  whole = width + (0 if positions is None else positions.shape[1])

  def attended(q, k, v):
    if kind == "softmax":
      return softmax(q @ k.T / whole**0.5, 1) @ v
    if kind == "linear":
      q, k = softmax(q, 1), softmax(k, 0)
    return (q @ k.T) @ v / (n * whole**0.5 if kind == "fourier" else n)

  out = [attended(*(head(name, i) for name in "qkv")) for i in range(heads)]
  return np.concatenate(out, axis=1) @ p["out"]["kernel"] + p["out"]["bias"]


@pytest.mark.parametrize("kind, p", CASES)
@pytest.mark.first(2)
def test_equals_numpy(kind, p):
  x, positions = inputs(p=p)
  model = build(kind)
  params = randomised(model, x, positions)
  expected = [
    numpy_attention(params, kind, x[i], None if positions is None else positions[i])
    for i in range(2)
  ]
  out = jax.jit(model.apply)({"params": params}, x, positions)
  np.testing.assert_allclose(out, np.stack(expected), rtol=2e-5, atol=2e-5)


def test_epsilon_is_that_of_the_layer_norms():
  x, positions = inputs()
  model = build("galerkin", norm_epsilon=0.5)
  params = randomised(model, x, positions)
  expected = numpy_attention(params, "galerkin", x[0], positions[0], epsilon=0.5)
  out = jax.jit(model.apply)({"params": params}, x, positions)
  np.testing.assert_allclose(out[0], expected, rtol=2e-5, atol=2e-5)


def largest_array(kind, n):
  """Most numbers in one intermediate result for one sequence of n tokens."""
  model = build(kind)
  x = jax.ShapeDtypeStruct((1, n, 12), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), x)
  jaxpr = jax.make_jaxpr(model.apply)(params, x)
  return max(v.aval.size for equation in jaxpr.eqns for v in equation.outvars)


def test_galerkin_and_linear_are_linear_in_the_tokens_the_others_quadratic():
  assert largest_array("galerkin", 1000) == largest_array("linear", 1000) == 12 * 1000
  assert largest_array("fourier", 1000) == largest_array("softmax", 1000) == 3 * 1000 * 1000


@pytest.mark.parametrize("kind, p", CASES)
@pytest.mark.thorough
def test_masked_tokens_do_not_matter(kind, p):
  x, positions = inputs(9, p)
  mask = np.array([[1, 1, 0, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0]], bool)
  model = build(kind)
  params = {"params": randomised(model, x, positions)}
  apply = jax.jit(model.apply)
  out = apply(params, x, positions, mask)
  for i, real in enumerate(mask):
    short = None if positions is None else positions[i : i + 1, real]
    alone = apply(params, x[i : i + 1, real], short)
    np.testing.assert_allclose(out[i, real], alone[0], rtol=1e-5, atol=1e-5)
  assert np.abs(apply(params, x, positions) - out).max() > 0.01  # the mask did it
  assert np.isfinite(apply(params, x, positions, np.zeros_like(mask))).all()


@pytest.mark.parametrize("kind", attention.KINDS)
@pytest.mark.first(1)
def test_only_positions_tell_tokens_apart(kind):
  x, positions = inputs()
  order = np.array([3, 0, 6, 1, 5, 2, 4])
  model = build(kind)
  apply = jax.jit(model.apply)
  params = {"params": randomised(model, x)}
  out = apply(params, x)
  np.testing.assert_allclose(apply(params, x[:, order]), out[:, order], rtol=1e-4, atol=1e-5)
  params = {"params": randomised(model, x, positions)}
  out = apply(params, x, positions)
  assert np.abs(apply(params, x[:, order], positions) - out[:, order]).max() > 0.01


@pytest.mark.parametrize("kind", attention.KINDS)
@pytest.mark.first(1)
def test_two_norms_of_each_head_and_start_near_a_small_identity(kind):
  x, positions = inputs()
  params = jax.jit(build(kind).init)(jax.random.key(0), x, positions)["params"]
  assert set(params) == {"q", "k", "v", "out"} | (
    {"k_norm", "v_norm"} if kind in ("galerkin", "linear") else {"q_norm", "k_norm"}
  )
  assert params["k_norm"]["scale"].shape == params["k_norm"]["bias"].shape == (3, 4)
  assert params["out"]["kernel"].shape == (3 * (4 + 2), 12)
  for name in "qkv":
    # Xavier uniform: at most sqrt(6 / (12 + 12)), times the published gain.
    gain = 1e-3 if kind == "fourier" else 1e-2
    rest = np.abs(params[name]["kernel"] - 0.01 * np.eye(12))
    assert 0.4 * gain < rest.max() <= 0.501 * gain
    np.testing.assert_array_equal(params[name]["bias"], 0.0)


@pytest.mark.parametrize("kind", attention.KINDS)
@pytest.mark.thorough
def test_bfloat16_computes_low_and_stores_high(kind):
  x, positions = inputs()
  params = randomised(build(kind), x, positions)
  low = build(kind, dtype="bfloat16")
  out = low.apply({"params": params}, x, positions)
  assert out.dtype == jnp.bfloat16
  own = jax.jit(low.init)(jax.random.key(0), x, positions)["params"]
  assert {x.dtype for x in jax.tree.leaves(own)} == {jnp.dtype("float32")}
  expected = build(kind).apply({"params": params}, x, positions)
  np.testing.assert_allclose(np.float32(out), expected, rtol=0.05, atol=0.3)


def test_the_last_layer_starts_as_pytorchs_where_asked():
  x, positions = inputs()
  out = build("galerkin", uniform_out=True).init(jax.random.key(0), x, positions)["params"]["out"]
  limit = (3 * (4 + 2)) ** -0.5
  for values in out.values():
    assert 0.8 * limit < np.abs(values).max() <= limit
