"""Curvature in float64, where parameters are: factors by hand, and states that keep their types."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from tests.optim.curvature.brute_force import with_ones


def net(params, x):
  hidden = jnp.tanh(x @ params["one"]["kernel"] + params["one"]["bias"])
  return hidden @ params["two"]["kernel"] + params["two"]["bias"]


def problem(dtype=np.float64, seed=0):
  """Parameters, and a batch of points with targets and weights."""
  rng = np.random.default_rng(seed)
  layer = lambda n, m: {"kernel": rng.normal(size=(n, m)), "bias": rng.normal(size=m)}
  params = {"one": layer(3, 5), "two": layer(5, 2)}
  batch = {"x": rng.normal(size=(7, 3)), "y": rng.normal(size=(7, 2)), "w": rng.uniform(1, 2, 7)}
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, batch))


def predict(params, batch):
  return net(params, batch["x"]), batch["y"], batch["w"]


def loss(params, batch):
  errors = jnp.sum((net(params, batch["x"]) - batch["y"]) ** 2, axis=1)
  return jnp.sum(batch["w"] * errors) / jnp.sum(batch["w"])


def test_factors_are_those_of_numpy():
  with jax.enable_x64(True):
    params, batch = problem()
    options = dict(likelihood="normal", estimation="exact", token_averaging="expand")
    curvature = optim.Curvature(predict, params, batch, **options)
    found = curvature.factors(params, batch)
  params, batch = jax.tree.map(np.asarray, (params, batch))
  hidden = np.tanh(batch["x"] @ params["one"]["kernel"] + params["one"]["bias"])
  share = 2 * batch["w"] / batch["w"].sum()
  slopes = np.einsum("nh,ho->nho", 1 - hidden**2, params["two"]["kernel"])
  expected = {
    "one": (with_ones(batch["x"]), np.einsum("n,nao,nbo->ab", share, slopes, slopes)),
    "two": (with_ones(hidden), share.sum() * np.eye(2)),
  }
  for name, (a, g) in expected.items():
    np.testing.assert_allclose(found[name].inputs, a.T @ a / 7, rtol=1e-13)
    np.testing.assert_allclose(found[name].outputs, g, rtol=1e-13, atol=1e-15)


def by_model(curvature):
  first = optim.scale_by_kfac(curvature)
  tx = optim.by_quadratic_model(first, curvature, damping=1e-14)
  return optim.levenberg_marquardt(
    tx, curvature, np.float64(1e-14), min_damping=1e-20, damping_period=1
  )


TXS = {
  "kfac": lambda c: optim.kfac(0.1, c, momentum=np.float64(0.9)),
  "factored": lambda c: optim.kfac(0.1, c, damping_type="factored"),
  "ekfac": lambda c: optim.ekfac(0.1, c, moment_decay=np.float64(0.9)),
  "kfac_adam": lambda c: optim.kfac_adam(0.1, c),
  "by_model": by_model,
  "soap": lambda c: optim.soap(0.1),
}


@pytest.mark.parametrize(
  "dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("name", TXS)
def test_states_keep_the_type_of_the_parameters(name, dtype):
  """Also if numbers are NumPy's, and where float64 is on with parameters in float32."""
  with jax.enable_x64(True):
    params, batch = problem(dtype)
    curvature = optim.Curvature(predict, params, batch, likelihood="normal", estimation="exact")
    tx = TXS[name](curvature)
    extra = dict(batch=batch, rng=jax.random.key(0), value_fn=lambda p: loss(p, batch))
    update = lambda g, state: optax.with_extra_args_support(tx).update(g, state, params, **extra)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(update, params, state)
    types = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    assert types(after) == types(state) and types(updates) == types(params)
    floats = {x for x in jax.tree.leaves(types(state)) if jnp.issubdtype(x, jnp.floating)}
    assert floats == {np.dtype(dtype)}


@pytest.mark.parametrize("damping_type", ["exact", "factored"])
@pytest.mark.first(1)
def test_a_step_is_that_of_numpy(damping_type):
  with jax.enable_x64(True):
    params, batch = problem()
    curvature = optim.Curvature(predict, params, batch, likelihood="normal", estimation="exact")
    options = dict(damping=1e-9, damping_type=damping_type, identity_start=False)
    tx = optim.scale_by_kfac(curvature, **options)
    grads = jax.grad(loss)(params, batch)
    update = jax.jit(lambda g, s: tx.update(g, s, params, batch=batch, rng=jax.random.key(0)))
    found, _ = update(grads, tx.init(params))
    factors = curvature.factors(params, batch, jax.random.key(0))
  for name, (a, g) in factors.items():
    a, g = np.asarray(a), np.asarray(g)
    if damping_type == "factored":
      pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g)))
      a, g = a + pi * 1e-9**0.5 * np.eye(len(a)), g + 1e-9**0.5 / pi * np.eye(len(g))
    v = np.concatenate([grads[name]["kernel"], grads[name]["bias"][None]])
    whole = np.kron(a, g) + (1e-9 if damping_type == "exact" else 0.0) * np.eye(v.size)
    expected = np.linalg.solve(whole, v.ravel()).reshape(v.shape)
    np.testing.assert_allclose(found[name]["kernel"], expected[:-1], rtol=1e-9)
    np.testing.assert_allclose(found[name]["bias"], expected[-1], rtol=1e-9)
