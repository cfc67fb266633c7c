"""Layers that a batch does not reach, or reaches with zeros alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.small_net import close

_KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


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
  """The optimizer, its first state and a function from (state, first) to the state after a step."""
  params = Experts().init(jax.random.key(0), X, True)["params"]
  batch = {"x": X, "first": jnp.array(True)}
  predict = lambda params, batch: Experts().apply({"params": params}, batch["x"], batch["first"])
  tx = make(predict, params, batch, estimation="exact", factor_period=1, **options)
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


@pytest.mark.parametrize("identity_start", [True, False])
def test_an_expert_that_is_not_reached_keeps_its_factors(identity_start):
  start, step = experts(optim.scale_by_kfac, norms="diagonal", identity_start=identity_start)
  state = start
  for _ in range(3):
    state = step(state, jnp.array(True))
  for name in ("two/dense", "two/norm"):
    close(state.factors[name], start.factors[name], rtol=0, atol=0)
  reached = step(state, jnp.array(False))
  close(reached.factors["one/norm"], state.factors["one/norm"], rtol=0, atol=0)
  if not identity_start:  # its estimates alone, with the weights of another run's first steps
    alone = start
    for _ in range(3):
      alone = step(alone, jnp.array(False))
      close(reached.factors["two/norm"], alone.factors["two/norm"], rtol=1e-6)
      reached = step(reached, jnp.array(False))


def test_an_expert_that_is_not_reached_keeps_its_second_moments():
  start, step = experts(optim.scale_by_kfac, eigenvalues="batch", inverse_period=10)
  state = step(start, jnp.array(True))
  after = step(state, jnp.array(True))
  np.testing.assert_array_equal(
    after.second_moments["two/dense"], state.second_moments["two/dense"]
  )
  assert (after.second_moments["one/dense"] != state.second_moments["one/dense"]).any()


def test_inputs_of_zeros_count_in_the_factors():
  """Equation 4 of docs/kfac.md with A = 0: the average falls by `factor_decay`; no bias."""

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      hidden = nn.Dense(4, use_bias=False, kernel_init=nn.initializers.zeros, name="zeros")(x)
      return nn.Dense(3, use_bias=False, name="after")(hidden) + nn.Dense(3, name="beside")(x)

  params = Net().init(jax.random.key(0), X)["params"]
  predict = lambda params, x: Net().apply({"params": params}, x)
  tx = optim.scale_by_kfac(predict, params, X, estimation="exact", factor_period=1)
  step = jax.jit(lambda s: tx.update(params, s, params, batch=X, rng=jax.random.key(0))[1])
  state = step(step(tx.init(params)))
  close(state.factors["after"].inputs, 0.8**2 * np.eye(4), rtol=1e-6)
  close(state.factors["after"].outputs, state.factors["beside"].outputs, rtol=1e-6)


@pytest.mark.parametrize("beside", ["a_gain", "z_gain"])
def test_a_stack_keeps_the_factor_of_a_layer_that_is_not_reached(beside):
  """Whatever the name of a parameter without curvature in the same layer is."""

  class Scale(nn.Module):
    curvature = "scale_and_shift"

    @nn.compact
    def __call__(self, x):
      gain = jnp.exp(self.param(beside, nn.initializers.zeros, (5,)))
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

  batch = {"x": X, "gates": jnp.ones(3)}
  params = Net().init(jax.random.key(0), **batch)["params"]
  predict = lambda params, batch: Net().apply({"params": params}, **batch)
  tx = optim.scale_by_kfac(
    predict, params, batch, norms="diagonal", factor_period=1, estimation="exact"
  )
  step = jax.jit(lambda s, b: tx.update(params, s, params, batch=b, rng=jax.random.key(0))[1])
  before = step(tx.init(params), batch)
  after = step(before, batch | {"gates": jnp.array([1.0, 0.0, 1.0])})
  (old,), (new,) = (s.factors["blocks/scale"].values for s in (before, after))
  assert np.isclose(new, old, rtol=1e-6).all(axis=-1).tolist() == [False, True, False]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e25])
@pytest.mark.parametrize("eigenvalues", ["factors", "examples"])
def test_a_batch_that_is_not_finite_leaves_the_averages_as_they_are(eigenvalues, value):
  """Its gradient is left out by the caller; 1e25 has no square in float32."""
  model = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.Dense(3)])
  params = model.init(jax.random.key(0), X)["params"]
  predict = lambda params, x: model.apply({"params": params}, x)
  tx = optim.scale_by_kfac(
    *(predict, params, X),
    **dict(factor_period=1, inverse_period=1, norms="diagonal", eigenvalues=eigenvalues),
  )
  step = jax.jit(lambda state, x, grads: tx.update(grads, state, params, batch=x, rng=_KEY)[1])
  before = step(tx.init(params), X, jax.tree.map(jnp.ones_like, params))
  after = step(
    before,
    X.copy() * np.where(np.arange(6) == 1, value, 1)[:, None],
    jax.tree.map(jnp.zeros_like, params),
  )
  jax.tree.map(np.testing.assert_array_equal, after.factors, before.factors)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


@pytest.mark.parametrize(
  "layer, unused", [(nn.Dense, False), (nn.Dense, None), (nn.DenseGeneral, False)]
)
def test_a_bias_that_its_layer_does_not_use_has_no_influence(layer, unused):
  """Flax ignores entries of a tree that no module asks for."""
  model = nn.Sequential([layer(4, use_bias=unused), nn.Dense(3)])
  without = model.init(jax.random.key(0), X)["params"]
  held = without | {"layers_0": without["layers_0"] | {"bias": jnp.ones(4)}}
  predict = lambda params, x: model.apply({"params": params}, x)
  loss = lambda params: jnp.sum(jnp.sin(predict(params, X)))
  updates = []
  for params in (without, held):
    tx = optim.scale_by_kfac(predict, params, X, estimation="exact")
    grads, key = jax.grad(loss)(params), jax.random.key(0)
    updates.append(jax.jit(tx.update)(grads, tx.init(params), params, batch=X, rng=key)[0])
  assert not updates[1]["layers_0"].pop("bias").any()
  jax.tree.map(np.testing.assert_array_equal, *updates)
