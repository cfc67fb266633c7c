"""K-FAC as a stranger would use it: batches of other sizes, traced options, padding, averages."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from mixer_jax import optim
from tests.optim.small_net import close, first, predict, problem


@pytest.mark.thorough
def test_an_example_batch_of_any_size_will_do():
  params, batch = problem()
  updates = [
    first(
      optim.kfac(
        0.1, predict, params, jax.tree.map(lambda x, n=n: x[:n], batch), estimation="exact"
      ),
      params,
      batch,
    )
    for n in (1, 2, 8)
  ]
  close(updates[0], updates[2], rtol=0)
  close(updates[1], updates[2], rtol=0)


@pytest.mark.thorough
def test_a_ragged_last_batch_is_a_batch():
  params, batch = problem()
  last = jax.tree.map(lambda x: x[:3], batch)
  tx, own = (optim.kfac(0.1, predict, params, b, estimation="exact") for b in (batch, last))
  close(first(tx, params, last), first(own, params, last), rtol=0)


def test_hyperparameters_may_be_traced_and_injected():
  params, batch = problem()
  plain = first(optim.kfac(0.1, predict, params, batch, estimation="exact"), params, batch)
  fixed = ("predict", "params", "batch")
  injected = optax.inject_hyperparams(optim.kfac, static_args=fixed)
  tx = injected(0.1, predict, params, batch, estimation="exact")
  close(first(tx, params, batch), plain, rtol=1e-4)
  assert {"damping", "factor_decay", "momentum"} <= set(tx.init(params).hyperparams)


def test_plain_is_one_pattern_or_several():
  params, batch = problem()
  listed = lambda plain: set(
    optim.scale_by_kfac(predict, params, batch, plain=plain).init(params).factors
  )
  assert listed("^one/") == listed(["^one/"]) == {"two"}
  assert listed(("^one/", "^two/")) == set()


@pytest.mark.thorough
def test_without_identity_the_average_is_of_the_estimates_alone():
  """Weights of age k are decay^k, in sum 1: NumPy in float64, at a decay of 0.9999."""
  params, batch = problem()
  decay, small = 0.9999, jax.tree.map(lambda x: 1e-3 * x, params)
  tx = optim.scale_by_kfac(
    predict,
    small,
    batch,
    factor_decay=decay,
    factor_period=1,
    identity_start=False,
    estimation="exact",
  )
  state, estimates = tx.init(small), []
  update = jax.jit(tx.update)
  for t in range(4):
    now = jax.tree.map(lambda x, t=t: (1 + t) * x, small)
    estimates.append(optim.kfac_factors(predict, now, batch, None, estimation="exact"))
    _, state = update(params, state, now, batch=batch)
  weights = decay ** np.arange(3, -1, -1)
  for name in ("one", "two"):
    for side in ("inputs", "outputs"):
      values = [np.float64(getattr(e[name], side)) for e in estimates]
      mean = np.tensordot(weights / weights.sum(), values, 1)
      found = getattr(state.factors[name], side)
      np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-9)


def test_without_identity_an_estimate_that_is_the_identity_counts():
  """The diagonal of A, of inputs +1 and -1, is 1 in every estimate; G is averaged all the same."""
  rng = np.random.default_rng(0)
  params, _ = problem()
  batches = [
    {"x": rng.choice([-1.0, 1.0], (4, 5)).astype(np.float32), "y": rng.integers(0, 4, 4)}
    for _ in range(4)
  ]
  options = dict(factor_period=1, inverse_period=1, identity_start=False, max_factor=4)
  tx = optim.scale_by_kfac(predict, params, batches[0], **options, estimation="exact")
  state, estimates = tx.init(params), []
  for batch in batches:
    given = dict(estimation="exact", max_factor=4)
    fresh = optim.kfac_factors(predict, params, batch, None, **given)["one"]
    assert (fresh.inputs.values == 1).all()
    estimates.append(np.float64(fresh.outputs.values))
    _, state = tx.update(params, state, params, batch=batch)
  weights = 0.8 ** np.arange(3, -1, -1)
  mean = np.tensordot(weights / weights.sum(), estimates, 1)
  np.testing.assert_allclose(state.factors["one"].outputs.values, mean, rtol=1e-5)


@pytest.mark.parametrize("max_factor", [8192, 2], ids=["whole", "diagonal"])
def test_without_identity_padding_at_first_leaves_none(max_factor):
  net = nn.Dense(3)
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) / 10
  params = jax.jit(net.init)(jax.random.key(0), x)["params"]
  weighted = lambda params, batch: (net.apply({"params": params}, batch[0]), None, batch[1])
  options = dict(factor_period=1, inverse_period=4, identity_start=False, max_factor=max_factor)
  tx = optim.scale_by_kfac(weighted, params, (x, np.ones(8)), estimation="exact", **options)
  update = jax.jit(lambda state, weight: tx.update(params, state, params, batch=(x, weight))[1])
  seen = update(tx.init(params), np.ones(8))
  state = tx.init(params)
  for weight in (0.0, 0.0, 1.0):
    state = update(state, np.full(8, weight))
  close(state.factors, seen.factors, rtol=0, atol=0)
  close(update(state, np.ones(8)).factors, seen.factors)


@pytest.mark.parametrize(
  "kind, span, cosine", [("exact", 1, 0.9999), ("exact", 2, 0.99), ("factored", 4, 0.9999)]
)
@pytest.mark.thorough
def test_damping_of_badly_scaled_inputs(kind, span, cosine):
  """Inputs of scales 10^-span to 10^span: docs/tables.md says where float32 ends."""
  rng = np.random.default_rng(0)
  x = (rng.normal(size=(200, 8)) * np.logspace(-span, span, 8)).astype(np.float32)
  model = nn.Dense(4)
  params = jax.jit(model.init)(jax.random.key(0), 1e-3 * x)["params"]
  params = {**params, "kernel": params["kernel"] / np.logspace(-span, span, 8)[:, None]}
  apply = lambda p, x: model.apply({"params": p}, x)
  options = dict(estimation="exact", damping=1e-3, damping_type=kind, identity_start=False)
  factor = next(iter(optim.kfac_factors(apply, params, x, None, estimation="exact").values()))
  labels = rng.integers(0, 4, 200)
  losses = optax.softmax_cross_entropy_with_integer_labels
  grads = jax.grad(lambda p: losses(apply(p, x), labels).mean())(params)
  tx = optim.scale_by_kfac(apply, params, x, **options)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, batch=x)
  v = np.concatenate([grads["kernel"], grads["bias"][None]]).ravel()
  a, g = (np.asarray(side, np.float64) for side in (factor.inputs, factor.outputs))
  pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g)))
  if kind == "factored":  # Martens and Grosse, Section 6.3
    shifted = a + pi * 1e-3**0.5 * np.eye(len(a)), g + 1e-3**0.5 / pi * np.eye(len(g))
    dense = np.kron(*shifted)
  else:
    dense = np.kron(a, g) + 1e-3 * np.eye(len(a) * len(g))
  expected = np.linalg.solve(dense, v)
  found = np.concatenate([updates["kernel"], updates["bias"][None]]).ravel()
  assert found @ expected > cosine * np.linalg.norm(found) * np.linalg.norm(expected)


def test_no_array_of_a_trace_is_kept():
  """JAX itself looks for them: such a mode blames the model of a user who has it on."""

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.GroupNorm(2)(nn.Conv(4, (2, 2))(x))
      x = nn.ConvTranspose(4, (2, 2))(x).reshape(len(x), -1, 4)
      return nn.Dense(3)(nn.LayerNorm()(nn.MultiHeadDotProductAttention(2)(x)).mean(axis=1))

  x = np.ones((4, 3, 3, 2), np.float32)
  params = Net().init(jax.random.key(0), x)["params"]
  predict = lambda params, x: Net().apply({"params": params}, x)
  with jax.checking_leaks():
    tx = optim.scale_by_kfac(predict, params, x, norms="diagonal")
    jax.eval_shape(tx.update, params, tx.init(params), params, batch=x, rng=jax.random.key(0))
