"""The quadratic model and its minima against dense float64 matrices."""

import functools

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import quadratic
from tests.optim.curvature.test_likelihoods import fisher_of_outputs
from tests.optim.small_net import Net, close, curvature, loss, problem
from tests.optim.small_net_fisher import EXACT, dense_fisher


def of_several(y):
  blocks = fisher_of_outputs("categorical", y[:3]), 0.25 * fisher_of_outputs("normal", y[3:])
  return np.block([[blocks[0], np.zeros((3, 1))], [np.zeros((1, 3)), blocks[1]]])


POISSON = optim.Likelihood(
  sample=lambda key, y: jax.random.poisson(key, jnp.exp(y)),
  gradient=lambda y, n: jnp.exp(y) - n,
  factor=lambda y, v: jnp.exp(0.5 * y) * v,
)
WHOLE = lambda xp, y: y
CASES = {
  "categorical": ("categorical", WHOLE, lambda y: fisher_of_outputs("categorical", y)),
  "normal": ("normal", WHOLE, lambda y: fisher_of_outputs("normal", y)),
  "half the squares": ((0.5, "normal"), WHOLE, lambda y: np.eye(len(y))),
  "bernoulli": ("bernoulli", WHOLE, lambda y: fisher_of_outputs("bernoulli", y)),
  "normal_variance": (
    "normal_variance",
    lambda xp, y: (y[..., :2], xp.exp(y[..., 2:])),
    lambda y: np.diag(np.concatenate([1 / y[2:], 1 / (2 * y[2:] ** 2)])),
  ),
  "own": (POISSON, WHOLE, lambda y: np.diag(np.exp(y))),
  "several": (
    {"class": "categorical", "size": (0.25, "normal")},
    lambda xp, y: {"class": y[..., :3], "size": y[..., 3:]},
    of_several,
  ),
}


def random_like(params, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)


@pytest.mark.parametrize(
  "case, weighted",
  [(case, "mean") for case in CASES]
  + [(case, weighted) for case in ("categorical", "several") for weighted in ("rows", "tokens")],
)
@pytest.mark.first(2)
def test_products_are_those_of_the_dense_matrix(case, weighted):
  likelihood, head, of_row = CASES[case]
  params, batch = problem(6)
  x, weights = batch["x"], np.ones(6, np.float32)
  if weighted != "mean":
    weights = np.array([1.0, 2.0, 0.5, 0.0, 1.0, 3.0], np.float32)
  if weighted == "tokens":
    x, weights = x.reshape(2, 3, 5), weights.reshape(2, 3)

  def predict(params, batch):
    outputs = head(jnp, Net().apply({"params": params}, batch["x"]))
    return (outputs, None, batch["w"]) if "w" in batch else outputs

  given = {"x": x} | ({} if weighted == "mean" else {"w": weights})
  model = optim.Curvature(predict, params, given, likelihood=likelihood)
  vectors = [random_like(params, seed) for seed in (1, 2)]
  found = jax.jit(model.quadratic)(params, given, vectors)
  fisher = dense_fisher(params, batch["x"], head, of_row, weights.ravel())
  v = np.stack([np.float64(ravel_pytree(vector)[0]) for vector in vectors], axis=1)
  expected = v.T @ fisher @ v
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_coefficients_solve_the_equations():
  rng = np.random.default_rng(0)
  for _ in range(20):
    root, slopes = rng.normal(size=(2, 2)), rng.normal(size=2)
    products = root @ root.T
    found = quadratic.minimum(jnp.float32(products), jnp.float32(slopes))
    expected = -np.linalg.solve(products, slopes)
    np.testing.assert_allclose(found, expected, rtol=1e-3 * np.linalg.cond(products) ** 0.5)


def test_squares_that_leave_float16_are_numbers():
  v, w = {"a": jnp.full(10, 300.0, jnp.float16)}, {"a": jnp.full(10, -200.0, jnp.float16)}
  np.testing.assert_allclose(quadratic.inner_products([v, w]), [[9e5, -6e5], [-6e5, 4e5]])
  np.testing.assert_allclose(quadratic.slopes(v, [v, w]), [9e5, -6e5])


@pytest.mark.parametrize(
  "products, slopes, expected",
  [
    ([[4, 0], [0, 0]], [-2, 0], [0.5, 0]),  # no update before
    ([[0, 0], [0, 4]], [0, 2], [0, -0.5]),  # no direction
    ([[0, 0], [0, 0]], [0, 0], [0, 0]),
    ([[4, 8], [8, 16]], [-2, -4], [0.5, 0]),  # one direction twice
  ],
)
def test_vectors_that_add_nothing_get_no_part(products, slopes, expected):
  found = quadratic.minimum(jnp.float32(products), jnp.float32(slopes))
  np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.thorough
def test_updates_are_minima_of_the_damped_model():
  """The derivative of the dense model is 0 along both vectors, with decay of some parameters."""
  params, batch = problem(6)
  damping, decay, rate = 0.02, 0.1, 0.7
  mask = {"one": True, "two": {"kernel": True, "bias": False}}
  options = dict(factor_period=1, inverse_period=1, identity_start=False)
  of = curvature(params, batch, **EXACT)
  inner = optim.scale_by_kfac(of, **options)
  options = dict(damping=damping, weight_decay=decay, decay_mask=mask)
  tx = optim.by_quadratic_model(inner, of, learning_rate=rate, **options)
  kept = ravel_pytree(jax.tree.map(lambda m, p: np.full(p.shape, float(m)),
                                   mask | {"one": {"kernel": True, "bias": True}}, params))[0]  # fmt: skip
  flat = lambda tree: np.float64(ravel_pytree(tree)[0])
  of_row = CASES["categorical"][2]
  state, previous = tx.init(params), jax.tree.map(jnp.zeros_like, params)
  for t in range(3):
    grads = jax.grad(loss)(params, batch)
    step, after = jax.jit(tx.update)(grads, state, params, batch=batch)
    gradient = flat(grads) + decay * kept * flat(params)
    restored = ravel_pytree(params)[1](jnp.float32(gradient))
    direction, _ = inner.update(restored, state.inner, params, batch=batch, damping=damping + decay)
    vectors = np.stack([-flat(direction), flat(previous)], axis=1)
    matrix = dense_fisher(params, batch["x"], WHOLE, of_row, np.ones(6))
    matrix += decay * np.diag(kept) + damping * np.eye(len(matrix))
    products, slopes = vectors.T @ matrix @ vectors, vectors.T @ gradient
    used = 1 if t == 0 else 2
    best = -np.linalg.solve(products[:used, :used], slopes[:used])
    np.testing.assert_allclose(after.coefficients[:used], best, rtol=1e-3)
    np.testing.assert_allclose(flat(step), rate * vectors[:, :used] @ best, rtol=1e-3, atol=1e-5)
    params, state, previous = optax.apply_updates(params, step), after, step


@pytest.mark.parametrize("damping, decay, moves", [(0.03, 0.0, {-5, 5}), (0.3, 0.1, {-5})])
@pytest.mark.thorough
def test_the_factors_damping_is_the_best_of_three(damping, decay, moves):
  """25 updates; every fifth renews inverses and compares dense models in float64."""
  params, batch = problem(16)
  options = dict(damping_type="factored", factor_period=1, inverse_period=5, identity_start=False)
  of = curvature(params, batch, **EXACT)
  inner = optim.scale_by_kfac(of, **options)
  options = dict(damping=damping, weight_decay=decay, factor_damping_period=5)
  tx = optim.by_quadratic_model(inner, of, **options)
  flat = lambda tree: np.float64(ravel_pytree(tree)[0])
  update, renew = jax.jit(tx.update), jax.jit(inner.update)
  state, shift, seen = tx.init(params), damping + decay, set()
  for t in range(25):
    grads = jax.grad(loss)(params, batch)
    gradient = jax.tree.map(lambda g, p: g + decay * p, grads, params)
    step, after = update(grads, state, params, batch=batch)
    of_row = CASES["categorical"][2]
    matrix = dense_fisher(params, batch["x"], WHOLE, of_row, np.ones(16))
    matrix += (decay + damping) * np.eye(len(matrix))
    found = {}
    for factor in (1.0, 0.95**5, 0.95**-5) if t % 5 == 0 else (1.0,):
      told = dict(batch=batch, damping=jnp.float32(shift * factor))
      direction = flat(renew(gradient, state.inner, params, **told)[0])
      vectors = np.stack([-direction, flat(state.previous)], axis=1)[:, : 1 + (t > 0)]
      products, slope = vectors.T @ matrix @ vectors, vectors.T @ flat(gradient)
      best = -np.linalg.solve(products, slope)
      found[factor] = slope @ best / 2, vectors @ best
    chosen = min(found, key=lambda factor: found[factor][0])
    shift, seen = shift * chosen, seen | {chosen}
    assert float(after.factor_damping) == pytest.approx(shift, rel=1e-4)
    np.testing.assert_allclose(flat(step), found[chosen][1], rtol=1e-3, atol=1e-5)
    params, state = optax.apply_updates(params, step), after
  assert {0.95**power for power in moves} <= seen


def test_a_schedule_shortens_the_step_of_the_model():
  params, batch = problem()
  of = curvature(params, batch, estimation="exact")
  make = functools.partial(optim.by_quadratic_model, optim.scale_by_kfac(of), of)
  scheduled, plain = make(learning_rate=lambda count: 1 / (1.0 + count)), make()
  state = scheduled.init(params)
  for t in range(3):
    grads = jax.grad(loss)(params, batch)
    whole, _ = jax.jit(plain.update)(grads, state, params, batch=batch)
    step, state = jax.jit(scheduled.update)(grads, state, params, batch=batch)
    close(step, jax.tree.map(lambda x: x / (1 + t), whole), rtol=1e-4, atol=1e-6)
    params = jax.tree.map(jnp.add, params, step)
