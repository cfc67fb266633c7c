"""The K-FAC transform against dense algebra, NumPy and kfac-jax itself."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import algebra
from mixer_jax.optim.curvature.kfac_jax_blocks import kfac_jax
from tests.optim.small_net import (
  close,
  curvature,
  loss,
  needs_kfac_jax_s_tracer,
  predict,
  problem,
  registered,
)
from tests.optim.two_layers import matrix


def first_update(damping_type, damping=1e-2):
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  options = dict(damping=damping, damping_type=damping_type, factor_decay=0.5)
  tx = optim.scale_by_kfac(curvature(params, batch, estimation="exact"), **options)
  updates, state = jax.jit(tx.update)(
    grads, tx.init(params), params, batch=batch, rng=jax.random.key(0)
  )
  return grads, updates, jax.tree.map(np.float64, state.factors)


def numpy_kfac(params, batches, labels, steps, lr, damping, decay, t_cov, t_inv, clip, wd):
  """The study's algorithm (equations 4 to 6) with given sampled labels, float64."""
  w = {k: matrix(v) for k, v in params.items()}
  factors = {k: [np.eye(v.shape[0]), np.eye(v.shape[1])] for k, v in w.items()}
  buffers = {k: np.zeros_like(v) for k, v in w.items()}
  eig = {}

  def forward(x):
    ones = np.ones((len(x), 1))
    a1 = np.concatenate([x, ones], 1)
    z = a1 @ w["one"]
    a2 = np.concatenate([np.tanh(z), ones], 1)
    logits = a2 @ w["two"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    return a1, z, a2, p / p.sum(1, keepdims=True)

  def backward(z, p, y):
    d2 = (p - np.eye(4)[y]) / len(y)  # of the batch-mean loss
    return (d2 @ w["two"][:-1].T) * (1 - np.tanh(z) ** 2), d2

  for t in range(steps):
    x, y = batches["x"], batches["y"]
    a1, z, a2, p = forward(x)
    n = len(x)
    if t % t_cov == 0:
      sampled = backward(z, p, labels[t])
      for name, a, d in (("one", a1, sampled[0]), ("two", a2, sampled[1])):
        fresh = [a.T @ a / n, n * d.T @ d]
        factors[name] = [decay * f + (1 - decay) * s for f, s in zip(factors[name], fresh)]
    if t % t_inv == 0:
      eig = {k: [np.linalg.eigh(f) for f in v] for k, v in factors.items()}
    d1, d2 = backward(z, p, y)
    grads = {"one": a1.T @ d1, "two": a2.T @ d2}
    update, inner = {}, 0.0
    for name, g in grads.items():
      (la, qa), (lg, qg) = eig[name]
      v = qa @ ((qa.T @ g @ qg) / (np.outer(la, lg) + damping)) @ qg.T
      update[name] = v
      inner += np.sum(v * g) * lr**2
    nu = min(1.0, np.sqrt(clip / inner))
    for name, v in update.items():
      v = v * nu + (wd * w[name] if t >= 20 * t_cov else 0.0)
      buffers[name] = 0.9 * buffers[name] + v
      w[name] = w[name] - lr * buffers[name]
  return w


def sampled_labels(params_by_step, batch, key):
  """The labels that kfac-jax draws from the model with this key."""
  logits, _ = predict(params_by_step, batch)
  drawn = kfac_jax.CategoricalLogitsNegativeLogProbLoss(logits).sample(key)
  return np.asarray(drawn)


def test_the_published_algorithm():
  params, batch = problem()
  steps, lr, period = 25, 0.05, 1
  options = dict(damping=1e-3, factor_decay=0.95, factor_period=period, inverse_period=4)
  tx = optim.kfac(lr, curvature(params, batch), weight_decay=0.1, **options)
  state, current, labels = tx.init(params), params, []
  update, gradient = jax.jit(tx.update), jax.jit(jax.grad(loss))
  for t in range(steps):
    key = jax.random.key(t)
    labels.append(sampled_labels(current, batch, key))
    grads = gradient(current, batch)
    updates, state = update(grads, state, current, batch=batch, rng=key)
    current = optax.apply_updates(current, updates)
  expected = numpy_kfac(params, batch, labels, steps, lr, 1e-3, 0.95, period, 4, 1e-2, 0.1)
  start = {k: matrix(v) for k, v in params.items()}
  for name, value in expected.items():
    moved = np.linalg.norm(value - start[name])
    assert moved > 0.01  # or the comparison would say nothing
    assert np.linalg.norm(matrix(current[name]) - value) < 1e-4 * np.linalg.norm(value)


@needs_kfac_jax_s_tracer
def test_one_step_equals_kfac_jax():
  """kfac_jax.Optimizer with fixed rates; its factored damping, fresh factors."""
  params, batch = problem()
  damping, lr = 0.05, 0.3

  theirs = kfac_jax.Optimizer(
    jax.value_and_grad(registered()),
    l2_reg=0.0,
    value_func_has_aux=False,
    use_adaptive_learning_rate=False,
    use_adaptive_momentum=False,
    use_adaptive_damping=False,
    curvature_ema=0.95,
    inverse_update_period=1,
    estimation_mode="fisher_exact",
    multi_device=False,
    num_burnin_steps=0,
  )
  key = jax.random.key(3)
  state = theirs.init(params, key, batch)
  moved, _, _ = theirs.step(
    jax.tree.map(jnp.array, params),
    state,
    key,
    batch=batch,
    global_step_int=0,
    learning_rate=lr,
    momentum=0.0,
    damping=damping,
  )
  tx = optax.chain(
    optim.scale_by_kfac(
      curvature(params, batch, estimation="exact", token_averaging="expand"),
      damping=damping,
      damping_type="factored",
      identity_start=False,
    ),
    optax.scale(-lr),
  )
  grads = jax.grad(loss)(params, batch)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, batch=batch, rng=key)
  close(optax.apply_updates(params, updates), moved, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("damping_type", ["exact", "factored"])
@pytest.mark.thorough
def test_factors_inverted_together_equal_those_inverted_apart(monkeypatch, damping_type):
  *_, factors = first_update(damping_type)
  factors = jax.tree.map(np.float32, factors)
  # One more block of the same sizes, so that there is something to stack.
  factors["three"] = jax.tree.map(lambda x: 2 * x, factors["one"])
  exact = damping_type == "exact"
  damped = lambda factors: algebra.factored_inverses(factors, 0.01)
  invert = algebra.eigendecompositions if exact else damped
  apart = invert(factors)
  accelerated = lambda *args, default, **platforms: default(*args)  # as a GPU does
  monkeypatch.setattr(jax.lax, "platform_dependent", accelerated)
  jaxpr = str(jax.make_jaxpr(invert)(factors))
  assert jaxpr.count(" eigh" if exact else " cholesky") == len({6, 7, 4})
  dense = lambda i: (i.vectors * i.values) @ i.vectors.T if exact else i
  for name, pair in invert(factors).items():
    for together, alone in zip(pair, apart[name]):
      np.testing.assert_allclose(dense(together), dense(alone), rtol=1e-4, atol=1e-5)


class Norm(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(5, name="head")(nn.LayerNorm(name="norm")(x))


def test_the_diagonal_of_a_normalisation_divides_its_gradient():
  x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
  params = jax.jit(Norm().init)(jax.random.key(0), x)["params"]
  normed = lambda p, x: Norm().apply({"params": p}, x)
  of = optim.Curvature(normed, params, x, estimation="exact", norms="diagonal")
  tx = optim.scale_by_kfac(of, damping=0.1, factor_decay=0.5)
  fresh = of.factors(params, x)
  grads = jax.tree.map(jnp.ones_like, params)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, batch=x)
  for name in ("scale", "bias"):
    [d] = fresh[f"norm/{name}"].values
    wanted = 1 / (0.5 + 0.5 * np.float64(d) + 0.1)
    np.testing.assert_allclose(updates["norm"][name], wanted, rtol=1e-5)


def test_schedules_of_damping_and_rate_are_of_the_update_count():
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  damping, rate = (lambda t: 0.01 * (1 + 3.0 * t)), (lambda t: 0.1 * (1 + 1.0 * t))
  of = curvature(params, batch, estimation="exact")
  tx = optim.scale_by_kfac(of, damping=damping, factor_decay=0.5)
  tx = optim.constrain_norm(tx, of, 1e-6, rate)
  state = tx.init(params)
  for t in range(3):
    updates, state = jax.jit(tx.update)(grads, state, params, batch=batch)
    wanted, inner = {}, 0.0
    for name in ("one", "two"):
      g, dense = matrix(grads[name]), np.kron(*map(np.float64, state.factors[name]))
      v = np.linalg.solve(dense + damping(t) * np.eye(len(dense)), g.ravel()).reshape(g.shape)
      wanted[name], inner = v, inner + np.sum(v * g)
    for name, v in wanted.items():
      v = v * np.sqrt(1e-6 / (rate(t) ** 2 * inner))
      assert np.linalg.norm(matrix(updates[name]) - v) < 1e-4 * np.linalg.norm(v), (t, name)


def test_a_schedule_of_weight_decay_is_of_the_update_count():
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  ends = []
  for decay in (lambda t: 0.3 * (t >= 2), 0.0):
    tx = optim.kfac(0.1, curvature(params, batch), momentum=0.0, weight_decay=decay)
    state, found = tx.init(params), []
    for t in range(4):
      updates, state = jax.jit(tx.update)(grads, state, params, batch=batch, rng=jax.random.key(t))
      found.append(updates)
    ends.append(found)
  for t, (decayed, plain) in enumerate(zip(*ends)):
    wanted = jax.tree.map(lambda u, p, t=t: u - 0.03 * (t >= 2) * p, plain, params)
    close(decayed, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["kfac", "kfac_adam"])
def test_a_batch_of_padding_alone_leaves_the_factors_as_they_are(kind):
  params, batch = problem()
  weighted = lambda params, batch: (*predict(params, batch), batch["weights"])
  batch["weights"] = np.ones(8, np.float32)
  make = {"kfac": optim.scale_by_kfac, "kfac_adam": optim.scale_by_kfac_adam}[kind]
  tx = make(optim.Curvature(weighted, params, batch), factor_period=1)
  update = jax.jit(tx.update)
  _, state = update(params, tx.init(params), params, batch=batch, rng=jax.random.key(0))
  empty = batch | {"weights": np.zeros(8, np.float32)}
  _, after = update(params, state, params, batch=empty, rng=jax.random.key(1))
  close(after.factors, state.factors, rtol=1e-6)
