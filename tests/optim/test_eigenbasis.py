"""Optimizers in an eigenbasis against NumPy in float64, over 25 steps of changing gradients."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import algebra, eigenbasis, polar
from mixer_jax.optim.curvature_blocks import Kronecker
from tests.optim import small_net

STEPS, EXAMPLES, TOKENS = 25, 6, 3
SIZES = {"one": (5, 4), "two": (5, 3)}  # of [inputs + 1, outputs]


class Net(nn.Module):
  """Two dense layers over tokens, the second after the mean over them."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(3, name="two")(nn.tanh(nn.Dense(4, name="one")(x)).mean(axis=1))


def predict(params, batch):
  return Net().apply({"params": params}, batch["x"]), batch["y"]


@functools.cache
def sequence():
  """Parameters, batches and gradients of every step, independent of all updates."""
  rng = np.random.default_rng(0)
  layers = lambda scale: {
    name: {
      "kernel": scale * rng.normal(size=(d_in - 1, d_out)).astype(np.float32),
      "bias": scale * rng.normal(size=d_out).astype(np.float32),
    }
    for name, (d_in, d_out) in SIZES.items()
  }
  drift = layers(1.0)
  steps = []
  for _ in range(STEPS):
    batch = {
      "x": rng.normal(size=(EXAMPLES, TOKENS, 4)).astype(np.float32),
      "y": rng.integers(0, 3, EXAMPLES).astype(np.int32),
    }
    grads = jax.tree.map(np.add, drift, layers(0.5))
    steps.append((layers(0.7), batch, grads))
  return steps


def updates_of(tx):
  """The update of every step, and the state after each."""
  params, batch, _ = sequence()[0]
  state, found, states = tx.init(params), [], []
  step = jax.jit(lambda g, s, p, b: tx.update(g, s, p, batch=b, rng=jax.random.key(0)))
  for params, batch, grads in sequence():
    update, state = step(grads, state, params, batch)
    found.append(jax.tree.map(np.asarray, update))
    states.append(state)
  return found, states


def matrix(layer):
  return np.concatenate([layer["kernel"], layer["bias"][None]]).astype(np.float64)


def rows(params, batch):
  """Inputs and output gradients [examples, rows, width] of both layers, given labels, float64."""
  w = {name: matrix(layer) for name, layer in params.items()}
  extended = lambda x: np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)
  x = extended(batch["x"].astype(np.float64))
  h = np.tanh(x @ w["one"])
  mean = extended(h.mean(axis=1))
  logits = mean @ w["two"]
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  d_two = p - np.eye(3)[batch["y"]]  # of the loss of an example
  d_one = (d_two @ w["two"][:-1].T)[:, None] / TOKENS * (1 - h**2)
  return {"one": (x, d_one), "two": (mean[:, None], d_two[:, None])}


def empirical_factors(params, batch):
  """A and G as "published": rows of tokens stacked, G times the number of tokens."""
  factors = {}
  for name, (a, d) in rows(params, batch).items():
    tokens = a.shape[1]
    a, d = a.reshape(-1, a.shape[-1]), d.reshape(-1, d.shape[-1])
    factors[name] = (a.T @ a / len(a), d.T @ d * tokens / EXAMPLES)
  return factors


def averages(decay, period):
  """The factors from the identity on, of every step."""
  now = {name: tuple(np.eye(d) for d in sizes) for name, sizes in SIZES.items()}
  for t, (params, batch, _) in enumerate(sequence()):
    if t % period == 0:
      fresh = empirical_factors(params, batch)
      mix = lambda old, new: decay * old + (1 - decay) * new
      now = {name: tuple(map(mix, now[name], fresh[name])) for name in now}
    yield t, now


def assert_steps(found, wanted, rtol=2e-3):
  for t, (update, step) in enumerate(zip(found, wanted, strict=True)):
    for name in SIZES:
      scale = np.abs(step[name]).max()
      error = np.abs(matrix(update[name]) - step[name]).max()
      assert error <= rtol * scale, (t, name, error, scale)


@pytest.mark.parametrize(
  "given", [{}, {"max_factor": 4}, {"precondition_dtype": "bfloat16"}], ids=str
)
def test_adam_in_the_basis_of_kfac(given):
  """With max_factor=4 the sides of 5 inputs have no basis."""
  options = dict(estimation="empirical", factor_decay=0.7, factor_period=3, basis_period=6, **given)
  params, batch, _ = sequence()[0]
  turned = lambda factor: len(factor) <= given.get("max_factor", 5)
  tx = optim.scale_by_kfac_adam(predict, params, batch, b1=0.8, b2=0.9, eps=1e-3, **options)
  wanted, state = [], {}
  for t, factors in averages(0.7, 3):
    wanted.append({})
    for name, factor in factors.items():
      v = matrix(sequence()[t][2][name])
      own = state.setdefault(name, {"mean": np.zeros_like(v), "squares": np.zeros_like(v)})
      if t % 6 == 0:
        new = [np.linalg.eigh(f)[1] if turned(f) else np.eye(len(f)) for f in factor]
        if t:
          turns = [n.T @ o for n, o in zip(new, own["basis"])]
          own["squares"] = turns[0] ** 2 @ own["squares"] @ turns[1].T ** 2
        own["basis"] = new
      qa, qg = own["basis"]
      own["mean"] = 0.8 * own["mean"] + 0.2 * v  # outside of the basis
      own["squares"] = 0.9 * own["squares"] + 0.1 * (qa.T @ v @ qg) ** 2
      mean = qa.T @ own["mean"] @ qg / (1 - 0.8 ** (t + 1))
      root = np.sqrt(own["squares"] / (1 - 0.9 ** (t + 1)))
      wanted[-1][name] = qa @ (mean / (root + 1e-3)) @ qg.T
  found = updates_of(tx)[0]
  if "precondition_dtype" not in given:
    return assert_steps(found, wanted)
  assert_steps(found, wanted, rtol=0.05)  # products keep eight bits
  with pytest.raises(AssertionError):
    assert_steps(found, wanted)


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


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_in_the_metric_of_kfac(nesterov):
  options = dict(estimation="empirical", factor_decay=0.7, factor_period=3, basis_period=6)
  options |= dict(momentum=0.8, nesterov=nesterov, ridge=0.1, rms=0.5, newton_schulz=4)
  tx = optim.scale_by_kfac_muon(predict, *sequence()[0][:2], **options)
  wanted, mean, roots = [], {name: 0.0 for name in SIZES}, {}
  for t, factors in averages(0.7, 3):
    wanted.append({})
    for name, factor in factors.items():
      v = matrix(sequence()[t][2][name])
      mean[name] = 0.8 * mean[name] + v  # outside of the basis
      if t % 6 == 0:
        past = 0.7 ** (t // 3 + 1)  # the share of the identity, which has no part in ours
        roots[name] = [root_of(f - past * np.eye(len(f)), 0.1, -0.5) for f in factor]
      left, right = roots[name]
      step = left @ quintic(left @ (0.8 * mean[name] + v if nesterov else mean[name]) @ right, 4)
      wanted[-1][name] = (step := step @ right) * 0.5 / np.sqrt(np.mean(step**2))
  assert_steps(updates_of(tx)[0], wanted)


@pytest.mark.parametrize("ridge", [1e6, 1e30])
def test_in_a_metric_that_is_the_identity_it_is_muon(ridge):
  """Two kernels without biases: such a ridge leaves nothing of the factors."""

  class Kernels(nn.Module):
    @nn.compact
    def __call__(self, x):
      dense = functools.partial(nn.Dense, use_bias=False)
      return dense(3, name="two")(nn.tanh(dense(9, name="one")(x)))

  x = jax.random.normal(jax.random.key(0), (8, 4))
  params = Kernels().init(jax.random.key(1), x)["params"]
  apply = lambda params, batch: Kernels().apply({"params": params}, batch)
  options = dict(nesterov=False, weight_decay=0.0)  # optax corrects Nesterov's for its start
  muon = optax.with_extra_args_support(optim.muon(0.1, momentum=0.9, **options))
  ours = optim.kfac_muon(0.1, apply, params, x, ridge=ridge, newton_schulz=5, **options)
  states = [tx.init(params) for tx in (muon, ours)]
  for t in range(5):
    grads = jax.tree.map(
      lambda p, t=t: jnp.cos(t + 3.0 * jnp.arange(p.size)).reshape(p.shape), params
    )
    (wanted, states[0]), (found, states[1]) = (
      tx.update(grads, state, params, batch=x, rng=jax.random.key(t))
      for tx, state in zip((muon, ours), states)
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
    return tx.update(grads, state, params, batch=x, rng=jax.random.key(0))[0], state.basis

  found, basis = first(optim.scale_by_kfac_muon(apply, params, x, nesterov=False))
  assert set(basis) == {"hidden"}
  adam = optax.scale_by_adam()
  wanted = adam.update(grads, adam.init(params))[0]
  for name in ("head", "Embed_0"):
    jax.tree.map(np.testing.assert_array_equal, found[name], wanted[name])
  assert not np.allclose(found["hidden"]["kernel"], wanted["hidden"]["kernel"], rtol=0.1)
  make = functools.partial(optim.scale_by_kfac_muon, apply, params, x)
  assert set(first(make(adam_paths=""))[1]) == {"hidden", "head", "Embed_0"}
  assert set(first(make(plain="^head/"))[1]) == {"hidden"}
  assert set(first(make(adam_paths="head/kernel"))[1]) == {"hidden", "Embed_0"}  # and its bias
  assert set(first(make(plain="^hidden/", adam_paths="^head"))[1]) == {"Embed_0"}
  with pytest.raises(ValueError, match=r"plain is '\^hed', which matches no parameter"):
    make(plain="^hed")
  for wrong, why in (("(", "no regular expression"), ("^hed", "which matches no parameter")):
    with pytest.raises(ValueError, match=re.escape(f"adam_paths is {wrong!r}, {why}")):
      make(adam_paths=wrong)
  nothing = (
    "no parameter is left for K-FAC's basis; the parameters are Embed_0/embedding, head/bias"
  )
  with pytest.raises(ValueError, match=nothing):
    make(plain="^hidden/")
  with pytest.raises(ValueError, match=nothing):
    optim.scale_by_kfac_adam(apply, params, x, plain=".")


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_steps_end_where_gradients_do(scale):
  """As those of Muon: momentum decays until float32 has no digits for it."""
  params, batch, grads = sequence()[0]
  options = dict(momentum=0.9, nesterov=False, weight_decay=0.0)
  ours = optim.kfac_muon(1.0, predict, params, batch, estimation="empirical", **options)
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
  options = dict(estimation="empirical", ridge=0.1)
  tx = optim.scale_by_kfac_muon(predict, params, batch, **options)
  found, state = tx.update(grads, tx.init(params), params, batch=batch, rng=jax.random.key(0))
  assert not state.basis["one"][1].values.any()
  a, _ = empirical_factors(params, batch)["one"]
  left = root_of(a, 0.1, -0.5)
  step = left @ quintic(left @ matrix(grads["one"]), 3)
  step *= 0.2 / np.sqrt(np.mean(step**2))
  np.testing.assert_allclose(matrix(found["one"]), step, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("eigenvalues", ["batch", "examples"])
@pytest.mark.first(1)
def test_ekfac(eigenvalues):
  params, batch, _ = sequence()[0]
  options = dict(estimation="empirical", factor_decay=0.7, factor_period=3, inverse_period=6)
  options |= dict(eigenvalues=eigenvalues, moment_decay=0.6, damping=0.1)
  tx = optim.scale_by_kfac(predict, params, batch, **options)
  wanted, state = [], {name: {} for name in SIZES}
  for t, factors in averages(0.7, 3):
    wanted.append({})
    for name, factor in factors.items():
      own, (a, d) = state[name], rows(*sequence()[t][:2])[name]
      tokens = a.shape[1]
      if t % 6 == 0:
        (la, qa), (lg, qg) = map(np.linalg.eigh, factor)
        own["basis"], own["moments"], own["estimates"] = (qa, qg), np.outer(la, lg), []
      qa, qg = own["basis"]
      if t % 3 == 0 and eigenvalues == "examples":
        each = np.einsum("nti,nto->nio", a @ qa, d @ qg)  # a gradient of every example
        own["estimates"].append(tokens * (each**2).mean(axis=0))
        weights = 0.6 ** np.arange(len(own["estimates"]))[::-1]
        own["moments"] = np.average(own["estimates"], axis=0, weights=weights)
      v = qa.T @ matrix(sequence()[t][2][name]) @ qg
      if eigenvalues == "batch":
        own["moments"] = 0.6 * own["moments"] + 0.4 * EXAMPLES * tokens * v**2
      wanted[-1][name] = qa @ (v / (own["moments"] + 0.1)) @ qg.T
  assert_steps(updates_of(tx)[0], wanted)


def test_ekfac_is_kfac_where_the_second_moments_of_a_batch_have_no_weight():
  params, batch, _ = sequence()[0]
  options = dict(damping=0.1, factor_decay=0.7, factor_period=3, inverse_period=6)
  kfac = updates_of(optim.scale_by_kfac(predict, params, batch, **options))[0]
  options |= dict(eigenvalues="batch", moment_decay=1.0)
  found = updates_of(optim.scale_by_kfac(predict, params, batch, **options))[0]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, kfac)


def test_ekfac_is_kfac_where_the_second_moments_are_the_products_of_eigenvalues():
  """Of all pairs of four inputs and three output gradients E[aa' (x) gg'] is E[aa'] (x) E[gg']."""
  rng = np.random.default_rng(0)
  inputs, output_gradients = rng.normal(size=(4, 3)), rng.normal(size=(3, 2))
  x = np.repeat(inputs, 3, axis=0).astype(np.float32)
  layer = nn.Dense(2, name="layer")
  params = {"kernel": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "bias": jnp.ones(2)}
  outputs = layer.apply({"params": params}, x)
  batch = {"x": x, "y": outputs - np.tile(output_gradients, (4, 1))}
  of_one = lambda params, batch: (layer.apply({"params": params}, batch["x"]), batch["y"])
  options = dict(likelihood="normal", estimation="empirical", damping=1e-3, identity_start=False)
  options |= dict(factor_period=2, inverse_period=4)
  steps = {}
  for eigenvalues in ("factors", "examples"):
    tx = optim.scale_by_kfac(of_one, params, batch, eigenvalues=eigenvalues, **options)
    state, steps[eigenvalues] = tx.init(params), []
    update = jax.jit(tx.update)
    for t in range(6):
      gradient = jax.tree.map(
        lambda p, t=t: jnp.cos(t + jnp.arange(p.size)).reshape(p.shape), params
      )
      step, state = update(gradient, state, params, batch=batch)
      steps[eigenvalues].append(step)
  same = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
  jax.tree.map(same, steps["examples"], steps["factors"])
  assert np.abs(steps["factors"][0]["kernel"]).max() > 0.1


def authors_soap(gradients, b1, b2, eps, period, decay):
  """Algorithm 3 of Vyas et al. for one matrix, with its first step, which only makes a basis."""
  steps, mean, squares = [], 0.0, 0.0
  for t, g in enumerate(gradients):
    if t == 0:
      left, right = g @ g.T, g.T @ g
      ql, qr = (np.linalg.eigh(f)[1] for f in (left, right))
      steps.append(np.zeros_like(g))
      continue
    mean = b1 * mean + (1 - b1) * g
    squares = b2 * squares + (1 - b2) * (ql.T @ g @ qr) ** 2
    ratio = (ql.T @ mean @ qr) / (1 - b1**t)
    steps.append(ql @ (ratio / (np.sqrt(squares / (1 - b2**t)) + eps)) @ qr.T)
    # An average of which the weights add up to 1 has the eigenvectors of the authors'.
    weight = (1 - decay) / (1 - decay ** (t + 1))
    left = (1 - weight) * left + weight * g @ g.T
    right = (1 - weight) * right + weight * g.T @ g
    if t % period == 0:
      ql, squares = power_iteration(left, ql, squares)
      qr, squares = power_iteration(right, qr, squares.T)
      squares = squares.T
  return steps


def power_iteration(factor, q, squares):
  order = np.argsort(-np.diag(q.T @ factor @ q))
  return np.linalg.qr(factor @ q[:, order])[0], squares[order]


def kernels(tx):
  """The updates of kernel "one" alone, an array without a bias."""
  gradients = [np.asarray(grads["one"]["kernel"]) for _, _, grads in sequence()]
  state, found, states = tx.init(gradients[0]), [], []
  step = jax.jit(tx.update)
  for g in gradients:
    update, state = step(g, state)
    found.append(np.asarray(update))
    states.append(state)
  return [g.astype(np.float64) for g in gradients], found, states


def test_soap_is_its_authors_algorithm():
  options = dict(b1=0.9, b2=0.8, eps=1e-3, factor_decay=0.9)
  gradients, found, _ = kernels(optim.scale_by_soap(basis_period=4, **options))
  wanted = authors_soap(gradients, 0.9, 0.8, 1e-3, period=4, decay=0.9)
  np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("corrected", [False, True])
def test_shampoo(corrected):
  options = dict(b2=0.8, eps=1e-3, factor_decay=0.9, ridge=1e-3, basis_period=4)
  tx = optim.scale_by_shampoo(corrected=corrected, power=0.25, **options)
  gradients, found, _ = kernels(tx)
  left, right, squares = np.zeros((4, 4)), np.zeros((4, 4)), np.zeros((4, 4))
  basis = None
  for t, g in enumerate(gradients):
    if t and not corrected:
      roots = []
      for values, q in basis:
        roots.append(q * (values + 1e-3 * values.max()) ** -0.25 @ q.T)
      step = roots[0] @ g @ roots[1]
    elif t:
      (_, ql), (_, qr) = basis
      squares = 0.8 * squares + 0.2 * (ql.T @ g @ qr) ** 2
      step = ql @ (ql.T @ g @ qr / (np.sqrt(squares / (1 - 0.8**t)) + 1e-3)) @ qr.T
    else:
      step = np.zeros_like(g)
    np.testing.assert_allclose(found[t], step, rtol=2e-3, atol=2e-4, err_msg=str(t))
    weight = 0.1 / (1 - 0.9 ** (t + 1))
    left = (1 - weight) * left + weight * g @ g.T
    right = (1 - weight) * right + weight * g.T @ g
    if t % 4 == 0:
      old = basis
      basis = [np.linalg.eigh(left), np.linalg.eigh(right)]
      if t:
        turns = [new.T @ q for (_, new), (_, q) in zip(basis, old)]
        squares = turns[0] ** 2 @ squares @ turns[1].T ** 2


def test_in_coordinates_it_is_adam_to_the_bit():
  params, batch, _ = sequence()[0]
  adam = updates_of(optax.with_extra_args_support(optax.scale_by_adam(0.9, 0.95)))[0]
  kfac = optim.scale_by_kfac_adam(predict, params, batch, max_factor=1)
  jax.tree.map(np.testing.assert_array_equal, updates_of(kfac)[0], adam)
  tx = optim.scale_by_soap(b1=0.9, max_factor=1)
  gradients, found, _ = kernels(tx)
  rule = optax.scale_by_adam(0.9, 0.95)
  state, step = rule.init(found[0]), jax.jit(rule.update)
  assert not found[0].any()
  for g, update in zip(gradients[1:], found[1:]):
    wanted, state = step(g.astype(np.float32), state)
    np.testing.assert_array_equal(update, wanted)


def test_in_a_basis_of_unit_vectors_it_is_adam_to_the_bit():
  """The gradient is turned by identity matrices, which are renewed every four updates."""
  rule = optax.scale_by_adam(0.9, 0.95)
  ordered = lambda b: Kronecker(*(jnp.diag(jnp.arange(1.0, d + 1)) for d in b.factor_sizes))
  estimate = lambda blocks, *_: {b.name: ordered(b) for b in blocks}
  source = eigenbasis.Source(eigenbasis.gradient_source(None).blocks, estimate, after=False)
  found, states = updates_of(eigenbasis.in_basis(rule, rule, source, basis_period=4))
  for eigen in states[-1].basis["one/kernel"]:
    np.testing.assert_array_equal(eigen.vectors, np.eye(len(eigen.values)))
  adam = updates_of(optax.with_extra_args_support(rule))[0]
  jax.tree.map(np.testing.assert_array_equal, found, adam)


MAKES = [
  optim.scale_by_soap,
  optim.scale_by_shampoo,
  functools.partial(optim.scale_by_kfac_adam, predict, *sequence()[0][:2]),
  functools.partial(optim.scale_by_kfac_muon, predict, *sequence()[0][:2]),
]


@pytest.mark.parametrize("make", MAKES)
def test_full_factors_have_a_basis_at_any_size(make):
  """Each on one of two layers: that layer's updates are those without a largest size."""
  free, cut = updates_of(make())[0], updates_of(make(max_factor=1))[0]
  some = updates_of(make(max_factor=1, full_factors="^one/"))[0]
  for t, update in enumerate(some):
    jax.tree.map(np.testing.assert_array_equal, update["one"], free[t]["one"])
    jax.tree.map(np.testing.assert_array_equal, update["two"], cut[t]["two"])
  assert np.abs(free[-1]["one"]["kernel"] - cut[-1]["one"]["kernel"]).max() > 1e-3
  with pytest.raises(ValueError, match="full_factors is 'three', which matches no parameter"):
    updates_of(make(full_factors="three"))


@pytest.mark.parametrize("refresh", ["eigh", "qr"])
def test_moments_turn_with_the_basis(refresh):
  _, _, states = kernels(optim.scale_by_soap(b1=0.8, basis_period=5, refresh=refresh))
  gradients, mean = [g for _, _, g in sequence()], 0.0
  for t, state in enumerate(states[1:], 1):
    mean = 0.8 * mean + 0.2 * gradients[t]["one"]["kernel"]
    left, right = state.basis[""]
    outside = left.vectors @ state.inner.mu[""] @ right.vectors.T
    np.testing.assert_allclose(outside, mean, rtol=1e-4, atol=1e-5)
    eye = left.vectors.T @ left.vectors
    np.testing.assert_allclose(eye, np.eye(4), atol=1e-5)


def a_factor(seed, gap=4.0):
  """A factor with eigenvalues gap^-i, its eigenvectors, and vectors a small turn from them."""
  rng = np.random.default_rng(seed)
  q = np.linalg.qr(rng.normal(size=(6, 6)))[0]
  values = gap ** -np.arange(6.0)
  near = np.linalg.qr(q + 0.05 * rng.normal(size=(6, 6)))[0]
  return (q * values @ q.T).astype(np.float32), q, near.astype(np.float32)


def warm(factor, vectors, tolerance=None, mesh=None):
  eigen = algebra.Eigen(jnp.ones(6), jnp.asarray(vectors))
  factors = {"layer": Kronecker(jnp.asarray(factor), jnp.asarray(factor))}
  return algebra.warm_started_bases(factors, {"layer": (eigen, eigen)}, tolerance, mesh)[0]["layer"]


def test_warm_started_steps_end_at_the_eigenvectors():
  factor, q, vectors = a_factor(0)
  for _ in range(8):
    values, vectors = warm(factor, vectors)[0]
  np.testing.assert_allclose(np.abs(np.sum(vectors * q, axis=0)), 1.0, atol=1e-4)
  np.testing.assert_allclose(values, 4.0 ** -np.arange(6), rtol=1e-3)


def test_a_basis_that_is_good_enough_stays():
  factor, _, vectors = a_factor(1)
  inside = vectors.T.astype(np.float64) @ factor @ vectors
  apart = np.linalg.norm(inside - np.diag(np.diag(inside))) / np.linalg.norm(inside)
  for tolerance, stays in ((1.01 * apart, True), (0.99 * apart, False)):
    for values, found in warm(factor, vectors, float(tolerance)):
      assert (np.asarray(found) == vectors).all() == stays
      rayleigh = np.sum(found * (factor @ found), axis=0)
      np.testing.assert_allclose(values, rayleigh, rtol=1e-4)


def test_a_basis_of_one_large_eigenvalue_is_told_from_its_eigenvectors():
  """Its share off the diagonal, 6e-5, is that of rounding where squares are subtracted."""
  q = np.linalg.qr(np.random.default_rng(3).normal(size=(6, 6)))[0]
  factor = (q * [1e4, 1, 1, 1, 1, 1] @ q.T).astype(np.float32)
  turn = np.eye(6)
  turn[:2, :2] = np.cos(6.4e-5), np.sin(6.4e-5)
  turn[1, :2] = -np.sin(6.4e-5), np.cos(6.4e-5)
  vectors = (q @ turn).astype(np.float32)
  for tolerance, stays in ((1e-3, True), (1e-5, False)):
    for _, found in warm(factor, vectors, tolerance):
      assert (np.asarray(found) == vectors).all() == stays


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.first(1)
def test_devices_that_share_renewals_make_the_same_steps(make):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
  alone, shared = updates_of(make(eps=1e-3))[0], updates_of(make(eps=1e-3, mesh=mesh))[0]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), shared, alone)


def test_devices_share_warm_started_steps():
  factor, _, vectors = a_factor(2)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
  alone, shared = (
    warm(factor, vectors),
    jax.jit(functools.partial(warm, mesh=mesh))(factor, vectors),
  )
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), shared, alone)


@pytest.mark.thorough
def test_shampoo_knows_no_scale_of_the_loss():
  """With p = 1/4 on both sides the step is of degree 0 in the gradient, however small that is."""
  g = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
  tx, steps = optim.scale_by_shampoo(), []
  for scale in (1.0, 1e-6):
    state = tx.update(scale * g, tx.init(g))[1]
    steps.append(tx.update(scale * g, state)[0])
  assert np.abs(steps[0]).max() > 0.1
  np.testing.assert_allclose(*steps, rtol=1e-3)


@pytest.mark.parametrize("make", [optim.scale_by_soap, optim.scale_by_shampoo])
@pytest.mark.first(1)
def test_types_and_empty_arrays(make):
  params = {
    "w": jnp.ones((4, 3), jnp.bfloat16),
    "b": jnp.ones(3, jnp.bfloat16),
    "none": jnp.ones((0, 5)),
  }
  tx = make()
  state = tx.init(params)
  step = jax.jit(lambda g, s: tx.update(g, s))
  for _ in range(2):
    update, after = step(params, state)
    jax.tree.map(lambda x, y: (x.dtype, x.shape) == (y.dtype, y.shape) or 1 / 0, after, state)
    state = after
  assert update["w"].dtype == update["b"].dtype == jnp.bfloat16 and update["none"].shape == (0, 5)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(refresh="QR"), "refresh is 'QR'; allowed: eigh, qr"),
    (dict(precondition_dtype="float16"), "precondition_dtype is 'float16'"),
    (dict(factor_decay=1.0), "factor_decay is 1.0; allowed: 0 to 0.9999999"),
    (dict(basis_period=0), "basis_period is 0; allowed: 1 or more"),
    (dict(basis_period=2.5), "basis_period is 2.5; allowed: an integer"),
    (dict(b1=1.5), "b1 is 1.5; allowed: 0 to"),
    (dict(refresh="eigh", tolerance=0.1), 'tolerance is 0.1; it needs refresh="qr"'),
  ],
)
def test_mistakes_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    optim.scale_by_soap(**options)


def test_unknown_options_are_told_with_those_that_there_are():
  with pytest.raises(
    TypeError, match="scale_by_soap has no option 'basis_periods'; allowed: b1, b2"
  ):
    optim.scale_by_soap(basis_periods=2)
  with pytest.raises(TypeError, match="kfac_adam has no option 'inverse_period'; .*basis_period"):
    optim.kfac_adam(1e-3, predict, *sequence()[0][:2], inverse_period=2)


def test_mistakes_of_kfac_s_relatives_are_named():
  params, batch, grads = sequence()[0]
  make = functools.partial(optim.scale_by_kfac, predict, params, batch)
  with pytest.raises(ValueError, match="inverse_period is 15; .* a multiple of factor_period, 10"):
    make(eigenvalues="examples", inverse_period=15)
  with pytest.raises(ValueError, match="moment_decay is 1.5; allowed: 0 to 1"):
    make(eigenvalues="batch", moment_decay=1.5)
  with pytest.raises(ValueError, match="factor_fraction is 2.0; allowed: 1e-06 to 1"):
    make(factor_fraction=2.0)
  tx = optim.scale_by_kfac_adam(predict, params, batch)
  with pytest.raises(ValueError, match="the update needs batch: tx.update"):
    tx.update(grads, tx.init(params), params)


@pytest.mark.thorough
def test_each_optimizer_may_have_its_part_of_the_parameters():
  params, batch, _ = sequence()[0]
  parts = {"soap": optim.scale_by_soap(), "kfac": optim.scale_by_kfac_adam(predict, params, batch)}
  labels = {"one": "soap", "two": "kfac"}
  tx = optax.multi_transform(parts, labels)
  state, both = tx.init(params), []
  for params, batch, grads in sequence()[:3]:
    extra = dict(batch=batch, rng=jax.random.key(0), model_params=params)
    update, state = tx.update(grads, state, params, **extra)
    both.append(update)
  alone = updates_of(optim.scale_by_kfac_adam(predict, *sequence()[0][:2]))[0]
  for update, whole in zip(both, alone):
    np.testing.assert_allclose(
      update["two"]["kernel"], whole["two"]["kernel"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_the_first_update_is_zero_without_decay_too(name):
  """As in the code of SOAP's authors; grafted, decay alone would be the direction of a whole step."""
  params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
  grads = jax.tree.map(lambda x: 0.1 * x, params)
  tx = optim.graft(optim.adam(0.1), optim.OPTIMIZERS[name](1.0, weight_decay=0.5))
  state = tx.init(params)
  updates, state = tx.update(grads, state, params)
  assert not any(np.any(x) for x in jax.tree.leaves(updates))
  alone = optim.OPTIMIZERS[name](1.0, weight_decay=0.5)
  zeros, steps, own = jax.tree.map(jnp.zeros_like, params), [], alone.init(params)
  for _ in range(2):
    step, own = alone.update(zeros, own, params)
    steps.append(step["kernel"])
  np.testing.assert_allclose(steps, [np.zeros((4, 3)), np.full((4, 3), -0.5)], rtol=1e-6)


@pytest.mark.parametrize("stacked", [None, {"w": 1}])
def test_a_first_gradient_does_not_wait_for_a_basis(stacked):
  """Layers behind a head that starts at zero: L^-1/4 V R^-1/4 of one gradient is orthogonal."""
  gradient = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
  gradient = {"w": gradient if stacked else gradient[0]}
  tx = optim.scale_by_shampoo(ridge=0.0, basis_period=50, factor_decay=0.5, stacked=stacked)
  state, step = tx.init(gradient), jax.jit(tx.update)
  for size in (0.0, 0.0, 0.0, 1.0):
    found, state = step({"w": size * gradient["w"]}, state)
    assert not found["w"].any()
  found, after = step(gradient, state)
  u, _, v = np.linalg.svd(gradient["w"].astype(np.float64), full_matrices=False)
  # The average of three zeros and V V^T, and its square root: 15/8 = 1 + 1/2 + 1/4 + 1/8.
  np.testing.assert_allclose(found["w"], u @ v * (15 / 8) ** 0.5, rtol=1e-3, atol=1e-4)
  same = lambda a, b: bool(jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), a, b)))
  assert same(after.basis, state.basis)
  # The average of V V^T was 8/15 of it and becomes (32 square + 24) / 63: fourfold above 3.45.
  for square, renewed in ((3.3, False), (3.6, True)):
    _, last = step({"w": square**0.5 * gradient["w"]}, after)
    assert same(last.basis, after.basis) != renewed


def test_the_momentum_of_shampoo_does_not_count_its_first_update():
  """Of a constant gradient the average of the steps is that of their weights, which sum to 1."""
  params = {"kernel": jnp.ones((4, 3))}
  gradient = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)}
  alone, tx = optim.scale_by_shampoo(), optim.shampoo(1.0, momentum=0.9, weight_decay=0.0)
  states, plain = [alone.init(params), tx.init(params)], []
  for _ in range(6):
    step, states[0] = alone.update(gradient, states[0], params)
    plain.append(np.float64(step["kernel"]))
    found, states[1] = tx.update(gradient, states[1], params)
    weights = 0.9 ** np.arange(len(plain) - 1)[::-1] if len(plain) > 1 else np.ones(0)
    wanted = np.einsum("n,nij->ij", weights, plain[1:]) / weights.sum() if len(plain) > 1 else 0.0
    np.testing.assert_allclose(found["kernel"], -wanted, rtol=1e-4, atol=1e-6)


def test_kfac_adam_takes_a_part_of_the_batch():
  params, batch = small_net.problem()
  half = jax.tree.map(lambda x: x[::2], batch)
  options = dict(estimation="exact")
  tx = optim.scale_by_kfac_adam(small_net.predict, params, batch, factor_fraction=0.5, **options)
  state = tx.update(params, tx.init(params), params, batch=batch)[1]
  wanted = optim.kfac_factors(
    small_net.predict, params, half, None, token_averaging="expand", **options
  )
  small_net.close(state.factors, wanted, rtol=1e-5, atol=1e-6)
