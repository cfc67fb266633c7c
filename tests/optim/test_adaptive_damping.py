"""Levenberg and Marquardt's rule against NumPy, and the optimizer that follows it against kfac-jax's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import adaptive_damping
from mixer_jax.optim.curvature.kfac_jax_blocks import kfac_jax
from tests.optim.small_net import (
  close,
  curvature,
  loss,
  needs_kfac_jax_s_tracer,
  problem,
  registered,
)
from tests.optim.small_net_fisher import EXACT, chosen, train


class Flat:
  """No curvature, so that the predicted change is the slope alone."""

  def quadratic(self, params, batch, vectors):
    return jnp.zeros((len(vectors), len(vectors)))


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.thorough
def test_damping_follows_the_rule(decay):
  """The ratios swing over both thresholds; the bounds are reached; NumPy does the same."""
  plain = optax.sgd(0.1)
  rule = dict(damping_period=2, damping_decay=0.5, min_damping=0.3, max_damping=8.0)
  tx = adaptive_damping.levenberg_marquardt(plain, Flat(), 1.0, weight_decay=decay, **rule)
  ratios = [1.0, 0.9, 0.5, 0.1, -3.0, np.nan, 0.0, 0.0, 0.0, 0.74, 0.76, 0.26, 0.24]
  params, grads = jnp.array([2.0, -1.0]), jnp.array([0.5, 1.0])
  state, lam, update = tx.init(params), 1.0, jax.jit(tx.update, static_argnames="value_fn")
  step = -0.1 * np.float64(grads)
  change = step @ grads
  own = decay * (params @ step + step @ step / 2)
  for t, ratio in enumerate(np.repeat(ratios, 2)):
    after = ratio * (change + own) - own + 7.0

    def value_fn(p, after=after):
      return jnp.where((p == params).all(), 7.0, after)

    found, state = update(grads, state, params, batch=None, value_fn=value_fn)
    np.testing.assert_allclose(found, step, rtol=1e-6)
    if t % 2:
      lam = np.clip(lam * (0.25 if ratio > 0.75 else 1.0 if ratio >= 0.25 else 4.0), 0.3, 8.0)
      np.testing.assert_allclose(state.ratio, np.nan_to_num(ratio, nan=-1.0), atol=1e-4)
    assert float(state.damping) == pytest.approx(lam)


def test_a_step_without_expected_reduction_raises_the_damping():
  """Even if the loss rises as expected."""
  tx = adaptive_damping.levenberg_marquardt(optax.sgd(-0.1), Flat(), 1.0, damping_period=1)
  params, grads = jnp.ones(2), jnp.ones(2)
  _, state = tx.update(grads, tx.init(params), params, batch=None, value_fn=jnp.sum)
  assert float(state.damping) == pytest.approx(1 / 0.95)


@pytest.mark.parametrize(
  "after, made", [(3.9, True), (4.1, False), (np.inf, False), (np.nan, False)]
)
def test_a_step_that_raises_the_loss_too_far_is_not_made(after, made):
  """Also between the updates that compare the model; the damping grows at once."""
  rule = dict(damping_period=5, damping_decay=0.5, max_increase=4.0)
  tx = adaptive_damping.levenberg_marquardt(optax.sgd(0.1), Flat(), 1.0, **rule)
  params, grads = jnp.ones(2), jnp.ones(2)
  value_fn = lambda p: jnp.where((p == params).all(), 1.0, after)
  step, state = tx.update(grads, tx.init(params), params, batch=None, value_fn=value_fn)
  np.testing.assert_allclose(step, -0.1 * made * np.ones(2), rtol=1e-6)
  assert float(state.damping) == (1.0 if made else 32.0)


class Linear(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(2)(x)


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.thorough
def test_least_squares_are_solved_in_one_step(decay):
  """K-FAC's matrix is exact for one linear layer: the step is Newton's, and alpha is 1."""
  rng = np.random.default_rng(0)
  x, y = (rng.normal(size=(20, n)).astype(np.float32) for n in (4, 2))
  params = jax.jit(Linear().init)(jax.random.key(0), x)["params"]
  predict = lambda p, b: Linear().apply({"params": p}, b[0])
  squares = lambda p: jnp.square(predict(p, (x, y)) - y).sum(axis=1).mean()
  of = optim.Curvature(predict, params, (x, y), likelihood="normal", **EXACT)
  tx = chosen(of, 1e-5, weight_decay=decay, damping_period=1, identity_start=False)
  step, state = tx.update(
    jax.grad(squares)(params), tx.init(params), params, batch=(x, y), value_fn=squares
  )
  found = optax.apply_updates(params, step)["Dense_0"]
  inputs = np.concatenate([x, np.ones((20, 1))], axis=1)
  moment = 2 * inputs.T @ inputs / 20 + decay * np.eye(5)
  ridge = np.linalg.solve(moment, 2 * inputs.T @ y / 20)
  np.testing.assert_allclose(found["kernel"], ridge[:4], rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(found["bias"], ridge[4], rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(state.inner.coefficients, [1.0, 0.0], rtol=1e-3)
  assert float(state.ratio) == pytest.approx(1.0, rel=1e-3)  # the model is the loss


def steps_of_kfac_jax(params, batch, steps, damping, decay):
  """Parameters and, by step, loss, alpha, mu and damping."""
  key = jax.random.key(0)
  theirs = kfac_jax.Optimizer(
    jax.value_and_grad(registered(decay)),
    l2_reg=decay,
    use_adaptive_learning_rate=True,
    use_adaptive_momentum=True,
    use_adaptive_damping=True,
    initial_damping=damping,
    damping_adaptation_decay=0.95,
    inverse_update_period=5,
    estimation_mode="fisher_exact",
    multi_device=False,
    num_burnin_steps=0,
  )
  params, rows = jax.tree.map(jnp.array, params), []
  try:
    state = theirs.init(params, key, batch)
  except (AttributeError, NotImplementedError, TypeError) as e:
    pytest.skip(f"kfac-jax's tracer does not run on JAX {jax.__version__}: {e}")
  for t in range(steps):
    params, state, stats = theirs.step(params, state, key, batch=batch, global_step_int=t)
    rows.append([stats[k] for k in ("loss", "learning_rate", "momentum", "damping")])
  return params, np.float64(rows)


@needs_kfac_jax_s_tracer
@pytest.mark.parametrize("damping, decay", [(0.1, 1e-3), (0.3, 0.0)])
@pytest.mark.thorough
def test_fifty_steps_are_those_of_kfac_jax(damping, decay):
  """Rounding alone differs: 1e-7 of a step, amplified where two vectors are nearly parallel."""
  params, batch = problem(64)
  moved, theirs = steps_of_kfac_jax(params, batch, 50, damping, decay)
  options = dict(damping_type="factored", factor_period=1, inverse_period=5)
  options |= dict(factor_decay=0.95, identity_start=False, weight_decay=decay)
  tx = chosen(curvature(params, batch, **EXACT), damping, **options)

  @jax.jit
  def step(params, state):
    value, grads = jax.value_and_grad(loss)(params, batch)
    told = dict(batch=batch, value=value, value_fn=lambda p: loss(p, batch))
    updates, after = tx.update(grads, state, params, **told)
    value += decay / 2 * optax.tree.vdot(params, params)
    row = jnp.array([value, *after.inner.coefficients, state.damping])
    return optax.apply_updates(params, updates), after, row

  state, ours = tx.init(params), []
  for _ in range(50):
    params, state, row = step(params, state)
    ours.append(np.float64(row))
  ours = np.stack(ours)
  np.testing.assert_allclose(ours[:10], theirs[:10], rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(ours[:, 0], theirs[:, 0], rtol=1e-3)
  np.testing.assert_allclose(ours[:, 3], theirs[:, 3], rtol=1e-5)
  assert theirs[-1, 0] < 0.8 * theirs[0, 0] and theirs[-1, 3] < 0.5 * damping
  size = max(np.abs(x).max() for x in jax.tree.leaves(moved))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2 * size), params, moved)


@pytest.mark.thorough
def test_fixed_rates_may_have_adaptive_damping():
  params, batch = problem(16)
  of = curvature(params, batch, **EXACT)
  fixed = optim.kfac(0.05, of, damping=0.1, weight_decay=0.0)
  adaptive = optim.levenberg_marquardt(fixed, of, 0.1)
  (one, state), (other, _) = (train(tx, params, batch, 5) for tx in (adaptive, fixed))
  close(one, other, rtol=1e-4, atol=1e-5)  # the damping of the first five
  assert float(state.ratio) > 0.75 and float(state.damping) == pytest.approx(0.1 * 0.95**5)
