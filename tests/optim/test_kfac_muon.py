"""Muon in K-FAC's metric against NumPy in float64, over 25 steps of changing gradients."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import polar
from tests.optim.two_layers import (
  SIZES,
  assert_steps,
  averages,
  empirical_factors,
  matrix,
  power_iteration,
  predict,
  sequence,
  updates_of,
)


def quintic(x, steps):
  """Muon's polynomial of the singular values, in float64."""
  u, s, vt = np.linalg.svd(x, full_matrices=False)
  s = s / np.linalg.norm(s)
  for _ in range(steps):
    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
  return u * s @ vt


def root_of(factor, ridge, power):
  values, vectors = np.linalg.eigh(factor / np.trace(factor) * len(factor))
  return vectors * (values + ridge) ** power @ vectors.T


def empirical(params, batch):
  return optim.Curvature(predict, params, batch, estimation="empirical")


def test_muon_in_the_metric_of_kfac():
  options = dict(factor_decay=0.7, factor_period=3, basis_period=6)
  options |= dict(momentum=0.8, ridge=0.1, rms=0.5, newton_schulz=4)
  tx = optim.scale_by_kfac_muon(empirical(*sequence()[0][:2]), **options)
  wanted, mean, roots = [], dict.fromkeys(SIZES, 0.0), {}
  for t, factors in averages(0.7, 3):
    wanted.append({})
    for name, factor in factors.items():
      v = matrix(sequence()[t][2][name])
      mean[name] = 0.8 * mean[name] + v  # outside of the basis
      if t % 6 == 0:
        past = 0.7 ** (t // 3 + 1)  # the share of the identity, which has no part in ours
        roots[name] = [root_of(f - past * np.eye(len(f)), 0.1, -0.5) for f in factor]
      left, right = roots[name]
      step = left @ quintic(left @ (0.8 * mean[name] + v) @ right, 4)
      wanted[-1][name] = (step := step @ right) * 0.5 / np.sqrt(np.mean(step**2))
  assert_steps(updates_of(tx)[0], wanted)


def balanced(step, squares):
  """NorMuon's division of the columns by their running root mean squares; the length stays."""
  unit = step / np.sqrt(np.mean(step**2))
  squares = 0.95 * squares + 0.05 * np.mean(unit**2, axis=0)
  unit = unit / (np.sqrt(squares) + 1e-3)
  return unit * np.linalg.norm(step) / np.linalg.norm(unit), squares


@pytest.mark.parametrize("refresh", ["eigh", "qr"])
def test_normuon_in_the_eigenbasis_of_kfac(refresh):
  """Of each output direction; its mean square turns, or goes where a warm-started vector goes."""
  how = optim.Decomposition(refresh)
  options = dict(factor_decay=0.7, factor_period=3, basis_period=6, decomposition=how)
  tx = optim.scale_by_kfac_muon(
    empirical(*sequence()[0][:2]), momentum=0.8, ridge=0.1, normuon=True, **options
  )
  wanted, kept, mean, squares, bases = [], [], dict.fromkeys(SIZES, 0.0), {}, {}
  for t, factors in averages(0.7, 3):
    wanted.append({})
    kept.append({})
    for name, factor in factors.items():
      v = matrix(sequence()[t][2][name])
      mean[name] = 0.8 * mean[name] + v
      if t % 6 == 0:
        past = 0.7 ** (t // 3 + 1)  # the share of the identity, which has no part in ours
        own = [f - past * np.eye(len(f)) for f in factor]
        if t == 0:
          new, squares[name] = [np.linalg.eigh(f)[1] for f in own], np.zeros(SIZES[name][1])
        elif refresh == "eigh":
          new = [np.linalg.eigh(f)[1] for f in own]
          squares[name] = (new[1].T @ bases[name][0][1]) ** 2 @ squares[name]
        else:
          turned = [power_iteration(f, q) for f, q in zip(own, bases[name][0])]
          new, squares[name] = [q for q, _ in turned], squares[name][turned[1][1]]
        values = [np.diag(q.T @ f @ q) for f, q in zip(own, new)]
        bases[name] = new, [(s / s.mean() + 0.1) ** -0.5 for s in values]
      (qa, qg), (left, right) = bases[name]
      inside = left[:, None] * (qa.T @ (0.8 * mean[name] + v) @ qg) * right
      step = left[:, None] * quintic(inside, 3) * right
      step, squares[name] = balanced(step, squares[name])
      kept[-1][name] = squares[name]
      wanted[-1][name] = qa @ step @ qg.T * 0.2 / np.sqrt(np.mean(step**2))
  found, states = updates_of(tx)
  assert_steps(found, wanted)
  for state, squares in zip(states, kept):
    for name, own in squares.items():
      np.testing.assert_allclose(state.inner.outputs[name], own, rtol=1e-3)


def test_a_direction_of_rounding_errors_makes_no_full_step():
  """Outputs whose mean is taken off, as a normalisation does: along it there is no gradient."""

  def predict(params, x):
    y = x @ params["hidden"]
    return (y - y.mean(axis=-1, keepdims=True)) @ params["out"]

  keys = jax.random.split(jax.random.key(0), 3)
  params = {"hidden": jax.random.normal(keys[0], (6, 8)), "out": jnp.eye(8)}
  x, grads = jax.random.normal(keys[1], (32, 6)), {"out": jnp.zeros((8, 8))}
  given = jax.random.normal(keys[2], (6, 8))
  grads["hidden"] = given - given.mean(axis=1, keepdims=True)
  tx = optim.scale_by_kfac_muon(optim.Curvature(predict, params, x), normuon=True)
  step = jax.jit(lambda state: tx.update(grads, state, params, batch=x, rng=keys[0]))
  state = tx.init(params)
  for _ in range(5):
    update, state = step(state)
  along, length = jnp.linalg.norm(update["hidden"].mean(axis=1)), jnp.linalg.norm(update["hidden"])
  assert np.sqrt(8) * along < 0.05 * length / np.sqrt(8)


def test_in_a_metric_that_is_the_identity_it_is_muon(ridge=1e30):
  """Two kernels without biases: such a ridge leaves nothing of the factors."""

  class Kernels(nn.Module):
    @nn.compact
    def __call__(self, x):
      dense = functools.partial(nn.Dense, use_bias=False)
      return dense(3, name="two")(nn.tanh(dense(9, name="one")(x)))

  x = jax.random.normal(jax.random.key(0), (8, 4))
  params = Kernels().init(jax.random.key(1), x)["params"]
  apply = lambda params, batch: Kernels().apply({"params": params}, batch)
  # optax corrects Nesterov's momentum for its start: none here
  muon = optim.muon(0.1, momentum=0.0, nesterov=False, weight_decay=0.0)
  muon = optax.with_extra_args_support(muon)
  options = dict(momentum=0.0, ridge=ridge, newton_schulz=5)
  ours = optim.scale_by_kfac_muon(optim.Curvature(apply, params, x), **options)
  ours = optax.chain(ours, optax.scale(-0.1))
  states = [tx.init(params) for tx in (muon, ours)]
  steps = [jax.jit(tx.update) for tx in (muon, ours)]
  for t in range(5):
    grads = jax.tree.map(
      lambda p, t=t: jnp.cos(t + 3.0 * jnp.arange(p.size)).reshape(p.shape), params
    )
    (wanted, states[0]), (found, states[1]) = (
      step(grads, state, params, batch=x, rng=jax.random.key(t))
      for step, state in zip(steps, states)
    )
    # Muon's size is that of an orthogonal matrix; ours is scaled to the root mean square.
    unit = lambda u: u / jnp.sqrt(jnp.mean(u**2))
    same = lambda a, b: np.testing.assert_allclose(unit(a), unit(b), rtol=1e-3, atol=1e-3)
    jax.tree.map(same, found, wanted)
    for update in jax.tree.leaves(found):
      np.testing.assert_allclose(np.sqrt(np.mean(update**2)), 0.1 * 0.2, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 4), (4, 9), (9, 4), (2, 3, 12, 3)], ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_the_polar_factor(shape, steps):
  """Both iterations, on matrices and on their Gram matrices, are the polynomial of the values."""
  x = np.random.default_rng(0).normal(size=shape)
  found = polar.polar(jnp.asarray(x, jnp.float32), steps)
  wanted = [quintic(part, steps) for part in x.reshape(-1, *shape[-2:])]
  np.testing.assert_allclose(found.reshape(-1, *shape[-2:]), wanted, atol=2e-5)
  values = np.linalg.svd(polar.polar(jnp.asarray(x, jnp.float32), 5), compute_uv=False)
  assert 0.6 < values.min() and values.max() < 1.25
  assert not np.any(polar.polar(jnp.zeros(shape), steps))
  for scale in (1e-30, 1e-20, 1e-19, 1e20):  # squares of these leave float32
    np.testing.assert_allclose(
      polar.polar(jnp.asarray(x * scale, jnp.float32), steps), found, atol=2e-5
    )


@pytest.mark.parametrize("steps", [3, 5, 12, 100])
def test_the_polar_factor_without_full_rank(steps):
  """As of a batch smaller than the layer: no step lets rounding errors grow."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(32, 8)) @ rng.normal(size=(8, 128))
  values = np.linalg.svd(polar.polar(jnp.asarray(x, jnp.float32), steps), compute_uv=False)
  assert 0.6 < values[:8].min() and values.max() < 1.25
  assert values[8:].max() < (1e-2 if steps < 10 else 1.25)  # zeros up to rounding, which grow to 1


def test_head_and_embeddings_take_adam():
  class Words(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(3, name="head")(nn.tanh(nn.Dense(6, name="hidden")(nn.Embed(7, 5)(x))))

  x = jnp.arange(8) % 7
  params = Words().init(jax.random.key(0), x)["params"]
  apply = lambda params, batch: Words().apply({"params": params}, batch)
  grads = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), params)

  def first(tx):
    state = tx.init(params)
    update = jax.jit(lambda state: tx.update(grads, state, params, batch=x, rng=jax.random.key(0)))
    return update(state)[0], state.basis

  make = lambda plain=(), **options: optim.scale_by_kfac_muon(
    optim.Curvature(apply, params, x, unpreconditioned=plain), **options
  )
  found, basis = first(make(others=optax.scale_by_adam()))
  assert set(basis) == {"hidden"}
  adam = optax.scale_by_adam()
  wanted = adam.update(grads, adam.init(params))[0]
  for name in ("head", "Embed_0"):
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(same, found[name], wanted[name])
  assert not np.allclose(found["hidden"]["kernel"], wanted["hidden"]["kernel"], rtol=0.1)
  first = lambda tx: (None, tx.init(params).basis)
  assert set(first(make(adam_paths=""))[1]) == {"hidden", "head", "Embed_0"}
  assert set(first(make(plain="^head/"))[1]) == {"hidden"}
  assert set(first(make(adam_paths="head/kernel"))[1]) == {"hidden", "Embed_0"}  # and its bias
  assert set(first(make(plain="^hidden/", adam_paths="^head"))[1]) == {"Embed_0"}


def test_steps_end_where_gradients_do(scale=1e-3):
  """As those of Muon: momentum decays until float32 has no digits for it."""
  params, batch, grads = sequence()[0]
  options = dict(momentum=0.9, nesterov=False, weight_decay=0.0)
  ours = optax.chain(
    optim.scale_by_kfac_muon(empirical(params, batch), momentum=0.9),
    optax.scale(-1.0),
  )
  muon = optax.with_extra_args_support(optim.muon(1.0, **options))
  lengths = {}
  for name, tx in (("ours", ours), ("muon", muon)):

    def step(state, t, tx=tx):
      given = jax.tree.map(lambda g: scale * g * (t < 5), grads)
      updates, state = tx.update(given, state, params, batch=batch, rng=jax.random.key(0))
      return state, optax.global_norm({k: v["kernel"] for k, v in updates.items()})

    lengths[name] = jax.lax.scan(step, tx.init(params), jnp.arange(1200))[1]
  assert np.isfinite(lengths["ours"]).all()
  np.testing.assert_allclose(lengths["ours"][50], lengths["ours"][4], rtol=1e-3)
  for length in lengths.values():
    assert length[300] < 1e-2 * length[4] and length[-1] < 1e-12


def test_a_factor_of_zeros_counts_as_the_identity():
  """Behind a head of zeros no gradient arrives: the first step is that of the inputs' metric."""
  params, batch, grads = sequence()[0]
  params = params | {"two": jax.tree.map(np.zeros_like, params["two"])}
  tx = optim.scale_by_kfac_muon(empirical(params, batch), ridge=0.1)
  update = jax.jit(tx.update)
  found, state = update(grads, tx.init(params), params, batch=batch, rng=jax.random.key(0))
  assert not state.basis["one"][1].values.any()
  a, _ = empirical_factors(params, batch)["one"]
  left = root_of(a, 0.1, -0.5)
  step = left @ quintic(left @ matrix(grads["one"]), 3)
  step *= 0.2 / np.sqrt(np.mean(step**2))
  np.testing.assert_allclose(matrix(found["one"]), step, rtol=1e-3, atol=1e-4)
