"""Averages of factors: their weights, damping, and layers that a batch does not reach."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from tests.optim.curvature.brute_force import factors
from tests.optim.small_net import close, curvature, predict, problem

_KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def test_without_identity_the_average_is_of_the_estimates_alone():
  """Weights of age k are decay^k, in sum 1: NumPy in float64, at a decay of 0.9999."""
  params, batch = problem()
  decay, small = 0.9999, jax.tree.map(lambda x: 1e-3 * x, params)
  options = dict(factor_decay=decay, factor_period=1, identity_start=False)
  tx = optim.scale_by_kfac(curvature(small, batch, estimation="exact"), **options)
  state, estimates = tx.init(small), []
  update = jax.jit(tx.update)
  for t in range(4):
    now = jax.tree.map(lambda x, t=t: (1 + t) * x, small)
    estimates.append(factors(predict, now, batch))
    _, state = update(params, state, now, batch=batch)
  weights = decay ** np.arange(3, -1, -1)
  for name in ("one", "two"):
    for side in ("inputs", "outputs"):
      values = [np.float64(getattr(e[name], side)) for e in estimates]
      mean = np.tensordot(weights / weights.sum(), values, 1)
      found = getattr(state.factors[name], side)
      np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("max_factor", [8192, 2], ids=["whole", "diagonal"])
def test_without_identity_padding_at_first_leaves_none(max_factor):
  net = nn.Dense(3)
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) / 10
  params = jax.jit(net.init)(jax.random.key(0), x)["params"]
  weighted = lambda params, batch: (net.apply({"params": params}, batch[0]), None, batch[1])
  options = dict(estimation="exact", max_factor=max_factor)
  own = optim.Curvature(weighted, params, (x, np.ones(8)), **options)
  tx = optim.scale_by_kfac(own, factor_period=1, inverse_period=4, identity_start=False)
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
  own = optim.Curvature(apply, params, x, estimation="exact")
  [factor] = own.factors(params, x).values()
  labels = rng.integers(0, 4, 200)
  losses = optax.softmax_cross_entropy_with_integer_labels
  grads = jax.grad(lambda p: losses(apply(p, x), labels).mean())(params)
  tx = optim.scale_by_kfac(own, damping=1e-3, damping_type=kind, identity_start=False)
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


class Expert(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.LayerNorm(name="norm")(nn.Dense(4, name="dense")(x))


class Experts(nn.Module):
  """One of two experts answers for the whole batch."""

  @nn.compact
  def __call__(self, x, first):
    one, two = Expert(name="one"), Expert(name="two")
    if self.is_initializing():
      one(x), two(x)
    chosen = nn.cond(first, lambda _, x: one(x), lambda _, x: two(x), self, x)
    return nn.Dense(3, name="head")(nn.tanh(chosen))


def experts(make, **options):
  """The first state and a function from (state, first) to the state after a step."""
  params = Experts().init(jax.random.key(0), X, True)["params"]
  batch = {"x": X, "first": jnp.array(True)}
  predict = lambda params, batch: Experts().apply({"params": params}, batch["x"], batch["first"])
  norms = {"norms": options.pop("norms")} if "norms" in options else {}
  own = optim.Curvature(predict, params, batch, estimation="exact", **norms)
  tx = make(own, factor_period=1, **options)
  # The gradient of the expert that is not reached is zero, as it is in training.
  used = lambda first, path: jnp.where(path[0].key == "head", 1.0, (path[0].key == "one") == first)
  grads = lambda first: jax.tree_util.tree_map_with_path(
    lambda path, p: used(first, path) * jnp.cos(jnp.arange(1.0, p.size + 1)).reshape(p.shape),
    params,
  )
  step = lambda state, first: tx.update(
    grads(first), state, params, batch=batch | {"first": first}, rng=jax.random.key(0)
  )[1]
  return tx.init(params), jax.jit(step)


@pytest.mark.parametrize("identity_start", [False, True])
@pytest.mark.first(1)
def test_an_expert_that_is_not_reached_keeps_its_factors(identity_start):
  start, step = experts(optim.scale_by_kfac, norms="diagonal", identity_start=identity_start)
  state = start
  for _ in range(3):
    state = step(state, jnp.array(True))
  for name in ("two/dense", "two/norm/scale", "two/norm/bias"):
    close(state.factors[name], start.factors[name], rtol=0, atol=0)
  reached = step(state, jnp.array(False))
  close(reached.factors["one/norm/scale"], state.factors["one/norm/scale"], rtol=0, atol=0)
  if not identity_start:  # its estimates alone, with the weights of another run's first steps
    alone = start
    for _ in range(3):
      alone = step(alone, jnp.array(False))
      close(reached.factors["two/norm/scale"], alone.factors["two/norm/scale"], rtol=1e-6)
      reached = step(reached, jnp.array(False))


def test_an_expert_that_is_not_reached_keeps_its_second_moments():
  start, step = experts(optim.scale_by_ekfac, moments="batch", inverse_period=10)
  state = step(start, jnp.array(True))
  after = step(state, jnp.array(True))
  np.testing.assert_array_equal(
    after.second_moments["two/dense"], state.second_moments["two/dense"]
  )
  assert (after.second_moments["one/dense"] != state.second_moments["one/dense"]).any()


def test_inputs_of_zeros_count_in_the_factors():
  """Equation 3 of docs/theory.md with A = 0: the average falls by `factor_decay`; no bias."""

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      hidden = nn.Dense(4, use_bias=False, kernel_init=nn.initializers.zeros, name="zeros")(x)
      return nn.Dense(3, use_bias=False, name="after")(hidden) + nn.Dense(3, name="beside")(x)

  params = Net().init(jax.random.key(0), X)["params"]
  predict = lambda params, x: Net().apply({"params": params}, x)
  tx = optim.scale_by_kfac(optim.Curvature(predict, params, X, estimation="exact"), factor_period=1)
  step = jax.jit(lambda s: tx.update(params, s, params, batch=X, rng=jax.random.key(0))[1])
  state = step(step(tx.init(params)))
  close(state.factors["after"].inputs, 0.8**2 * np.eye(4), rtol=1e-6)
  close(state.factors["after"].outputs, state.factors["beside"].outputs, rtol=1e-6)


def test_a_stack_keeps_the_factor_of_a_layer_that_is_not_reached():
  """The layer also has a parameter without curvature."""

  class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
      gain = jnp.exp(self.param("a_gain", nn.initializers.zeros, (5,)))
      return gain * x * self.param("scale", nn.initializers.ones, (5,))

  class Gated(nn.Module):
    @nn.compact
    def __call__(self, x, gate):
      return x + gate * Scale(name="scale")(nn.Dense(5, name="dense")(x)), None

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x, gates):
      axes = dict(variable_axes={"params": 0}, split_rngs={"params": True})
      x, _ = nn.scan(Gated, length=3, **axes)(name="blocks")(x, gates)
      return nn.Dense(3, name="head")(x)

  batch, in_axes = {"x": X, "gates": jnp.ones(3)}, {"x": 0, "gates": None}
  params = Net().init(jax.random.key(0), **batch)["params"]
  predict = lambda params, batch: Net().apply({"params": params}, **batch)
  options = dict(norms="diagonal", estimation="exact", in_axes=in_axes)
  tx = optim.scale_by_kfac(optim.Curvature(predict, params, batch, **options), factor_period=1)
  step = jax.jit(lambda s, b: tx.update(params, s, params, batch=b, rng=jax.random.key(0))[1])
  before = step(tx.init(params), batch)
  after = step(before, batch | {"gates": jnp.array([1.0, 0.0, 1.0])})
  (old,), (new,) = (s.factors["blocks/scale/scale"].values for s in (before, after))
  assert np.isclose(new, old, rtol=1e-6).all(axis=-1).tolist() == [False, True, False]


@pytest.mark.parametrize(
  "make, value", [(optim.scale_by_ekfac, np.nan), (optim.scale_by_kfac, 1e25)]
)
def test_a_batch_that_is_not_finite_leaves_the_averages_as_they_are(make, value):
  """Its gradient is left out by the caller; 1e25 has no square in float32."""
  model = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.Dense(3)])
  params = model.init(jax.random.key(0), X)["params"]
  predict = lambda params, x: model.apply({"params": params}, x)
  options = dict(factor_period=1, inverse_period=1)
  options |= dict(moments="examples") if make is optim.scale_by_ekfac else {}
  tx = make(optim.Curvature(predict, params, X, norms="diagonal"), **options)
  step = jax.jit(lambda state, x, grads: tx.update(grads, state, params, batch=x, rng=_KEY)[1])
  before = step(tx.init(params), X, jax.tree.map(jnp.ones_like, params))
  after = step(
    before,
    X.copy() * np.where(np.arange(6) == 1, value, 1)[:, None],
    jax.tree.map(jnp.zeros_like, params),
  )
  jax.tree.map(np.testing.assert_array_equal, after.factors, before.factors)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))
