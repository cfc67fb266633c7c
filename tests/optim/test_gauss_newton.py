"""Gauss-Newton steps against dense solutions in float64."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import model_steps
from mixer_jax.optim.hessian_free import conjugate_gradients
from tests.optim.curvature.test_gram import CASES, LOSSES, jacobian, layers, made, mlp

LAMBDA = 1e-6


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def flat(tree):
  return np.asarray(jax.flatten_util.ravel_pytree(tree)[0])


def loss_of(name, batch):
  predict = CASES[name](np.random.default_rng(0))[0]
  return lambda params: LOSSES[name](predict(params, batch), batch)


def updated(tx, loss, batch, params, state, told=True):
  """An update, compiled."""

  def update(params, state):
    value, grads = jax.value_and_grad(loss)(params)
    extra = dict(value=value, value_fn=loss) if told else {}
    return tx.update(grads, state, params, batch=batch, rng=jax.random.key(0), **extra)

  return jax.jit(update)(params, state)


def dense(curvature, params, batch, grads, damping=LAMBDA):
  j = np.asarray(jacobian(curvature, params, batch))
  return -np.linalg.solve(j.T @ j + damping * np.eye(j.shape[1]), flat(grads))


def tx_of(name, curvature, damping=LAMBDA, **options):
  if name == "gauss_newton":
    return optim.gauss_newton(curvature, damping=damping, **options)
  first = optim.scale_by_kfac(curvature, factor_period=1, inverse_period=1, identity_start=False)
  enough = dict(max_iterations=200, cg_tolerance=0.0, precondition=first)
  return optim.hessian_free(curvature, damping=damping, **enough, **options)


STEPS = [("gauss_newton", "physics"), ("hessian_free", "weighted"), ("gauss_newton", "poisson")]
STEPS += [("gauss_newton", "classifier"), ("hessian_free", "physics"), ("hessian_free", "poisson")]


@pytest.mark.parametrize("name, case", STEPS)
@pytest.mark.first(3)
def test_a_step_is_the_dense_one(name, case):
  curvature, params, batch = made(case, estimation="exact")
  loss = loss_of(case, batch)
  damping = LAMBDA if name == "gauss_newton" else 1e-3  # with less, more iterations are enough
  tx = tx_of(name, curvature, damping, learning_rate=0.5)
  found, state = updated(tx, loss, batch, params, tx.init(params), told=False)
  expected = dense(curvature, params, batch, jax.grad(loss)(params), damping)
  np.testing.assert_allclose(flat(found), 0.5 * expected, atol=1e-7 * np.abs(expected).max())
  assert state.damping == damping


@pytest.mark.parametrize("examples", [6, 100], ids=["wide", "tall"])
def test_momentum_is_that_of_the_minimum(examples):
  """Two steps at one place: the second is nearest to mu times the first, up to what J sees."""
  curvature, params, batch = made("weighted", examples)
  loss, mu = loss_of("weighted", batch), 0.8
  tx = optim.gauss_newton(curvature, damping=LAMBDA, momentum=mu, bias_correction=True)
  one, state = updated(tx, loss, batch, params, tx.init(params), told=False)
  two, _ = updated(tx, loss, batch, params, state, told=False)
  j = np.asarray(jacobian(curvature, params, batch))
  r = np.asarray(curvature.residuals(params, batch).vector)
  solve = lambda b: np.linalg.solve(j.T @ j + LAMBDA * np.eye(j.shape[1]), b)
  first = solve(-j.T @ r)
  second = solve(-j.T @ r + LAMBDA * mu * first)
  size = np.abs(second).max()
  np.testing.assert_allclose(flat(one), first / np.sqrt(1 - mu**2), atol=1e-7 * size)
  np.testing.assert_allclose(flat(two), second / np.sqrt(1 - mu**4), atol=1e-7 * size)


@pytest.mark.parametrize(
  "name, examples", [("gauss_newton", None), ("gauss_newton", 100), ("hessian_free", None)]
)
@pytest.mark.first(2)
def test_acceleration_is_the_second_order_of_residuals(name, examples):
  """Second derivatives of the residuals themselves, along the first step; no more of it than of that."""
  curvature, params, batch = made("weighted", examples, estimation="exact")
  loss, damping = loss_of("weighted", batch), 1.0
  tx = tx_of(name, curvature, damping, acceleration=True)
  found, _ = updated(tx, loss, batch, params, tx.init(params), told=False)
  j = np.asarray(jacobian(curvature, params, batch))
  first = dense(curvature, params, batch, jax.grad(loss)(params), damping)
  start, back = jax.flatten_util.ravel_pytree(params)
  r = lambda t: curvature.residuals(back(start + t * first), batch).vector
  bend = jax.jit(jax.jacfwd(jax.jacfwd(r)))(0.0)
  second = np.linalg.solve(j.T @ j + damping * np.eye(j.shape[1]), -j.T @ bend)
  assert 0.01 < np.linalg.norm(second) / np.linalg.norm(first) < 0.75
  np.testing.assert_allclose(flat(found), first + second / 2, rtol=1e-6, atol=1e-9)
  if examples is not None:
    return  # with more examples the second order is not too long
  tx = tx_of(name, curvature, 1e-3, acceleration=True)
  found, _ = updated(tx, loss, batch, params, tx.init(params), told=False)
  expected = dense(curvature, params, batch, jax.grad(loss)(params), 1e-3)
  np.testing.assert_allclose(flat(found), expected, atol=1e-6 * np.abs(expected).max())


TRAINED = [
  ("gauss_newton", dict(acceleration=True, momentum=0.5)),
  ("hessian_free", dict(line_search=True, acceleration=True)),
  ("gauss_newton", dict(line_search=True)),
]


@pytest.mark.parametrize("name, options", TRAINED)
@pytest.mark.first(2)
def test_losses_fall_and_damping_with_them(name, options):
  """A net that can have the values of another one: the residuals vanish."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(20, 2)))
  batch = {"x": x, "y": mlp(layers(rng, 2, 4, 1), x)}
  params = jax.tree.map(jnp.asarray, layers(rng, 2, 16, 1))
  predict = lambda params, batch: (mlp(params, batch["x"]), batch["y"])
  curvature = optim.Curvature(predict, params, batch, likelihood="normal", estimation="exact")
  loss = lambda p: jnp.mean((mlp(p, batch["x"]) - batch["y"]) ** 2)
  tx = getattr(optim, name)(curvature, **options)

  def step(carry, _):
    params, state = carry
    value, grads = jax.value_and_grad(loss)(params)
    extra = dict(batch=batch, rng=jax.random.key(0), value=value, value_fn=loss)
    updates, state = tx.update(grads, state, params, **extra)
    return (optax.apply_updates(params, updates), state), (value, state.damping)

  run = jax.jit(lambda carry: jax.lax.scan(step, carry, length=60))
  values, dampings = map(np.asarray, run((params, tx.init(params)))[1])
  assert (np.diff(values) <= 1e-24).all()
  assert values[-1] < (1e-20 if name == "gauss_newton" else 1e-8)
  assert dampings.min() < 1e-6  # it grows where rounding alone is left


@pytest.mark.parametrize("line_search", [False, True])
def test_a_step_that_raises_the_loss_is_not_made(line_search):
  curvature, params, batch = made("classifier")
  loss = lambda p: jnp.sum(jax.flatten_util.ravel_pytree(p)[0]) * 0 + 1.0
  tx = optim.gauss_newton(curvature, line_search=line_search)
  update = lambda g, s: tx.update(g, s, params, batch=batch, value_fn=loss)
  found, state = jax.jit(update)(params, tx.init(params))
  assert not flat(found).any() and not flat(state.previous).any() and state.damping > 1e-3


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("name", ["gauss_newton", "hessian_free"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.first(4)
def test_residuals_that_are_not_finite_make_no_step(bad, name, told):
  curvature, params, batch = made("weighted", estimation="exact")
  loss = lambda p, b: loss_of("weighted", b)(p)
  tx = tx_of(name, curvature, damping=0.1)
  spoiled = batch | {"y": jnp.asarray(batch["y"]).at[0].set(bad)}

  @jax.jit
  def update(state, batch):
    extra = dict(value_fn=lambda p: loss(p, batch)) if told else {}
    grads = jax.grad(loss)(params, batch)
    return tx.update(grads, state, params, batch=batch, rng=jax.random.key(0), **extra)

  found, state = update(tx.init(params), spoiled)
  assert not flat(found).any()
  found, state = update(state, batch)
  assert flat(found).any()
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((found, state)))


@pytest.mark.parametrize("ratio, factor", [(0.9, 0.5), (0.5, 1.0), (0.1, 2.0), (-1.0, 2.0)])
def test_damping_follows_the_ratio(ratio, factor):
  slope, curve = jnp.float64(-2.0), jnp.float64(2.0)  # a model that falls by 1
  way = model_steps.Direction({}, {}, slope, curve, jnp.float64(0.1))
  how, one = model_steps.Damping(0.5), jnp.float64(1.0)
  found, damping = model_steps.adapted(way, one, 5 * one, (5 - ratio) * one, how)
  np.testing.assert_allclose([found, damping], [ratio, 0.1 * factor])


@pytest.mark.parametrize("start", [1.0, 2.0**-9, 2.0**6])
def test_the_search_finds_the_least_of_powers_of_two(start):
  loss = lambda x: (x - 0.06) ** 2
  rate, least = jax.jit(lambda x: model_steps.search(loss, 0.06**2, x))(jnp.float64(start))
  assert rate == 2.0**-4 and least == loss(2.0**-4)


@pytest.mark.parametrize("start", ["zero", "near", "worse"])
def test_iterations_end_where_the_model_stops_falling(start):
  """Against NumPy's iterations, looked at after each."""
  rng = np.random.default_rng(0)
  matrix = np.diag(np.logspace(-3, 0, 80))
  target = rng.normal(size=80)
  solution = target / np.diag(matrix)
  first = {"zero": 0 * target, "near": 0.9 * solution, "worse": -solution}[start]
  x = np.zeros(80) if start == "worse" else first
  r = target - matrix @ x
  p, model = r, [-x @ (target + r) / 2]
  for i in range(1, 60):
    rate = r @ r / (p @ matrix @ p)
    x, new = x + rate * p, r - rate * matrix @ p
    p, r = new + new @ new / (r @ r) * p, new
    model.append(-x @ (target + r) / 2)
    if i > 10 and model[i] < 0 and (model[i] - model[i - 10]) / model[i] < 10 * 0.002:
      break
  product = lambda v: {"a": matrix @ v["a"]}
  found, residual, number = conjugate_gradients(
    product, lambda v: v, {"a": jnp.asarray(target)}, {"a": jnp.asarray(first)}, 60, 0.002
  )
  assert number == i < 59
  y = np.asarray(found["a"])
  np.testing.assert_allclose(residual["a"], target - matrix @ y, atol=1e-9 * np.abs(target).max())
  np.testing.assert_allclose(y @ matrix @ y / 2 - target @ y, model[i], rtol=1e-6)


def test_only_the_parameters_of_the_gradient_move():
  curvature, params, batch = made("physics")
  loss = loss_of("physics", batch)
  tx = optax.masked(
    optim.gauss_newton(curvature, damping=LAMBDA), {"layer0": True, "layer1": True, "layer2": False}
  )
  update = lambda p: tx.update(jax.grad(loss)(p), tx.init(p), p, batch=batch, model_params=p)[0]
  found = jax.jit(update)(params)
  j, kept = (
    np.asarray(jacobian(curvature, params, batch)),
    flat({k: params[k] for k in ("layer0", "layer1")}).size,
  )
  j, g = j[:, :kept], flat(jax.grad(loss)(params))
  expected = -np.linalg.solve(j.T @ j + LAMBDA * np.eye(kept), g[:kept])
  np.testing.assert_allclose(flat(found)[:kept], expected, atol=1e-7 * np.abs(expected).max())
  np.testing.assert_array_equal(flat(found)[kept:], g[kept:])  # as masked leaves them


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["gauss_newton", "hessian_free"])
@pytest.mark.first(1)
def test_devices_share_a_batch(name, kind):
  curvature, params, batch = made("physics", estimation="exact")
  loss = loss_of("physics", batch)
  tx = tx_of(name, curvature, damping=1e-3)
  alone, _ = updated(tx, loss, batch, params, tx.init(params), told=False)
  mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
  whole, split = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("d",)))
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, whole), jax.device_put(batch, split)
    update = lambda p, b: tx.update(
      jax.grad(lambda p: loss_of("physics", b)(p))(p), tx.init(p), p, batch=b, rng=jax.random.key(0)
    )[0]
    found = jax.jit(update)(*placed)
  np.testing.assert_allclose(flat(found), flat(alone), atol=1e-7 * np.abs(flat(alone)).max())


def test_float32_steps_are_near_to_those_of_float64():
  with jax.enable_x64(False):
    rng = np.random.default_rng(0)
    batch = {"x": jnp.asarray(rng.normal(size=(20, 3)), jnp.float32)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), layers(rng, 3, 6, 2))
    curvature = optim.Curvature(lambda p, b: mlp(p, b["x"]), params, batch, likelihood="normal")
    tx = optim.gauss_newton(curvature, damping=1e-2)
    grads = jax.grad(lambda p: jnp.sum(mlp(p, batch["x"]) ** 2) / 20)(params)
    found, state = jax.jit(lambda g, s: tx.update(g, s, params, batch=batch))(
      grads, tx.init(params)
    )
    j = np.float64(jacobian(curvature, params, batch))
  expected = -np.linalg.solve(j.T @ j + 1e-2 * np.eye(j.shape[1]), np.float64(flat(grads)))
  np.testing.assert_allclose(flat(found), expected, atol=1e-4 * np.abs(expected).max())
  assert {x.dtype.name for x in jax.tree.leaves(state)} == {"int32", "float32"}


def test_a_gradient_of_another_loss_is_said(caplog):
  """Also where predict returns residuals alone."""
  curvature, params, batch = made("physics")
  tx = optim.gauss_newton(curvature)
  other = lambda p: sum(jnp.sum(mlp(p, x)) for x in batch.values())
  update = lambda p: tx.update(jax.grad(other)(p), tx.init(p), p, batch=batch)[0]
  jax.block_until_ready(jax.jit(update)(params))
  jax.effects_barrier()
  assert "cosine" in caplog.text
