"""L-BFGS and self-scaled Broyden methods against NumPy's formulas, SciPy and optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from scipy import optimize

from mixer_jax import optim

START = {"x": np.array([-1.2, 1.0]), "y": np.array([[0.5], [-0.8]])}
METHODS = ("ssbroyden", "ssbfgs", "bfgs")
MAKES = {method: functools.partial(optim.ssbroyden, method=method) for method in METHODS}
MAKES["lbfgs"] = optim.lbfgs  # its steps are compared with optax's
every = pytest.mark.parametrize("name", MAKES)
one = pytest.mark.first(1)


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def rosenbrock(params):
  z = jnp.concatenate([params["x"], params["y"][:, 0]])
  return jnp.sum(100 * (z[1:] - z[:-1] ** 2) ** 2 + (1 - z[:-1]) ** 2)


def run(tx, loss, params, updates, state=None, more=None):
  """Parameters, gradients and states after each update, from the start on, and the last state."""

  def step(carry, _):
    params, state = carry
    value, grads = jax.value_and_grad(loss)(params)
    moved, new = tx.update(grads, state, params, value=value, value_fn=loss, **(more or {}))
    return (optax.apply_updates(params, moved), new), (params, grads, new)

  @jax.jit
  def scanned(params, state):
    return jax.lax.scan(step, (params, state), length=updates)

  (params, state), path = scanned(params, tx.init(params) if state is None else state)
  return params, state, path


def flat(tree):
  return np.concatenate([np.reshape(tree[k], (len(tree["x"]), -1)) for k in ("x", "y")], axis=1)


def inverse_of(method, x, g):
  """H after the steps between points x [k, n] with gradients g, by the papers' formulas."""
  n, inverse = x.shape[1], np.eye(x.shape[1])
  for k in range(len(x) - 1):
    s, y = x[k + 1] - x[k], g[k + 1] - g[k]
    ys, hy = y @ s, inverse @ y
    b, h = s @ np.linalg.solve(inverse, s) / ys, y @ hy / ys
    a, theta, tau = b * h - 1, 0.0, 1.0
    if method == "ssbfgs":
      tau = min(1, 1 / b)
    if method == "ssbroyden":
      rho = min(1, h * (1 - np.sqrt(a / (1 + a))))
      theta = max((rho - 1) / a, min(1 / rho, (1 - b) / b))
      sigma, most = 1 + a * theta, min(1, 1 / b)
      root = sigma ** (1 / (1 - n))
      tau = most * min(root, 1 / theta) if theta > 0 else min(most * root, sigma)
    if k == 0:
      tau = h / (1 + a * theta)
    v, phi = s / ys - hy / (y @ hy), (1 - theta) / (1 + a * theta)
    inverse = inverse - np.outer(hy, hy) / (y @ hy) + phi * (y @ hy) * np.outer(v, v)
    inverse = inverse / tau + np.outer(s, s) / ys
  return inverse


@pytest.mark.parametrize("method", METHODS)
def test_the_inverse_is_that_of_the_formulas(method):
  _, _, (points, grads, states) = run(MAKES[method](), rosenbrock, START, 12)
  x, g = flat(points), flat(grads)
  assert not states.failed.any()
  for k in range(1, 12):
    wanted = inverse_of(method, x[: k + 1], g[: k + 1])
    found = states.memory.inverse[k - 1]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())
    step = flat(points)[k] - x[k - 1]
    if k > 1:  # along -H g, and meets the strong Wolfe conditions
      before = np.asarray(states.memory.inverse[k - 2])
      np.testing.assert_allclose(step, -states.step_size[k - 1] * before @ g[k - 1], rtol=1e-6)
      assert abs(g[k] @ step) <= 0.9 * abs(g[k - 1] @ step)


@one
@every
def test_the_minimum_is_scipy_s(name):
  found, _, (points, _, _) = run(MAKES[name](), rosenbrock, START, 60)
  of_vector = lambda z: rosenbrock({"x": z[:2], "y": z[2:, None]})
  grad = jax.jit(jax.grad(of_vector))
  start = np.concatenate([START["x"], START["y"][:, 0]])
  wanted = optimize.minimize(
    jax.jit(of_vector), start, jac=lambda z: np.asarray(grad(z)), method="BFGS", tol=1e-10
  )
  np.testing.assert_allclose(np.concatenate([found["x"], found["y"][:, 0]]), wanted.x, atol=1e-7)
  losses = jax.vmap(rosenbrock)(points)
  assert (np.diff(losses) <= 1e-6 * losses[:-1]).all()


@one
@every
def test_a_quadratic_of_bad_condition(name):
  """In 40 dimensions, of condition 1e4, which the scaled methods overcome."""
  rng = np.random.default_rng(0)
  basis = np.linalg.qr(rng.normal(size=(40, 40)))[0]
  hessian = basis @ np.diag(np.logspace(0, 4, 40)) @ basis.T
  loss = lambda p: p["w"] @ hessian @ p["w"] / 2
  start = {"w": rng.normal(size=40)}
  found, _, _ = run(MAKES[name](), loss, start, 200)
  assert loss(found) < (1e-16 if name.startswith("ss") else 1e-6) * loss(start)


def test_lbfgs_makes_the_steps_of_optax():
  ours, _, _ = run(optim.lbfgs(memory_size=5), rosenbrock, START, 30)
  tx = optax.lbfgs(memory_size=5)
  params, state = START, tx.init(START)

  @jax.jit
  def step(params, state):
    value, grads = jax.value_and_grad(rosenbrock)(params)
    moved, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=rosenbrock)
    return optax.apply_updates(params, moved), state

  for _ in range(30):
    params, state = step(params, state)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), ours, params)


@one
@every
def test_iterations_of_one_update_are_those_of_several(name):
  one, _, _ = run(MAKES[name](), rosenbrock, START, 12)
  four, state, _ = run(MAKES[name](iterations=4), rosenbrock, START, 3)
  assert state.count == 3
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-8), one, four)


@pytest.mark.parametrize("name", ["ssbroyden", "lbfgs"])
def test_a_batch_that_differs_puts_no_noise_into_the_inverse(name):
  """Linear terms of batches change gradients, but no curvature."""
  rng = np.random.default_rng(1)
  hessian = np.diag(np.logspace(0, 2, 6))
  tx, params = MAKES[name](), {"w": rng.normal(size=6)}
  state = tx.init(params)

  @jax.jit
  def update(params, state, shift):
    loss = lambda p: p["w"] @ hessian @ p["w"] / 2 + shift @ p["w"]
    value, grads = jax.value_and_grad(loss)(params)
    moved, state = tx.update(grads, state, params, value=value, value_fn=loss)
    return optax.apply_updates(params, moved), moved["w"], state

  for _ in range(12):
    params, step, state = update(params, state, 10 * rng.normal(size=6))
    if name == "lbfgs":
      pairs = state.memory.pairs
      steps, changes = pairs.diff_params_memory["w"], pairs.diff_updates_memory["w"]
    else:  # the secant equation H y = s
      steps, changes = step[None], (np.linalg.pinv(state.memory.inverse) @ step)[None]
    np.testing.assert_allclose(changes, steps @ hessian, rtol=1e-6, atol=1e-8)
  assert state.failed == 0


@one
@every
def test_a_search_that_fails_moves_nothing_and_forgets(name):
  """The loss says that every step leads up, against its gradient; then it is itself again."""
  tx = MAKES[name]()
  params, state, _ = run(tx, rosenbrock, START, 6)
  at = jax.tree.map(np.asarray, params)
  same = lambda p: jnp.array([jnp.all(p[k] == at[k]) for k in at]).all()

  def walled(p):
    return jnp.where(same(p), 0.0, 1.0) + rosenbrock(p) - rosenbrock(at)

  stuck, state, (_, _, states) = run(tx, walled, params, 3, state)
  jax.tree.map(np.testing.assert_array_equal, stuck, at)
  assert list(states.failed) == [1, 2, 3] and not states.step_size.any()
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
  end, state, _ = run(tx, rosenbrock, stuck, 60, state)
  assert rosenbrock(end) < 1e-10 and (state.failed <= 60)
  # The first step is that of the gradient, no longer than 1.
  one, _, _ = run(tx, rosenbrock, stuck, 1, jax.tree.map(lambda x: x[-1], states))
  fresh, _, _ = run(tx, rosenbrock, stuck, 1)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), one, fresh)


@one
@every
def test_a_gradient_that_is_not_finite_is_seen(name):
  tx = MAKES[name]()
  bad = jax.tree.map(lambda x: np.full_like(x, np.nan), START)
  moved, _ = tx.update(bad, tx.init(START), START, value_fn=rosenbrock)
  assert np.isnan(moved["x"]).all()


@one
@every
def test_a_saved_state_goes_on_to_the_bit(name, tmp_path):
  tx = MAKES[name]()
  donating = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  donating(tx.init(START))
  whole, _, _ = run(tx, rosenbrock, START, 10)
  half, state, _ = run(tx, rosenbrock, START, 5)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    state = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, START))
  again, _, _ = run(tx, rosenbrock, half, 5, state)
  jax.tree.map(np.testing.assert_array_equal, again, whole)


@one
@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_parameters_have_a_wide_state(name, dtype):
  """Also where float64 is enabled; losses fall."""
  tx, start = MAKES[name](), jax.tree.map(lambda x: jnp.asarray(x, dtype), START)
  end, state, (points, _, _) = run(tx, lambda p: rosenbrock(p).astype(jnp.float32), start, 10)
  assert {x.dtype for x in end.values()} == {jnp.dtype(dtype)}
  inverse = state.memory.inverse if name != "lbfgs" else state.memory.gradient["x"]
  assert inverse.dtype == state.step_size.dtype == jnp.float32
  losses = jax.vmap(rosenbrock)(points).astype(np.float32)
  assert losses[-1] < 0.2 * losses[0]


@one
@every
def test_wrappers_of_optax(name):
  """A masked part moves as if the rest were constants; a vmap is each member by itself."""
  tx = MAKES[name]()
  held = optax.masked(tx, {"x": True, "y": False})
  masked = optax.chain(held, optax.masked(optax.set_to_zero(), {"x": False, "y": True}))
  params, state = START, masked.init(START)

  @jax.jit
  def step(params, state):
    grads = jax.grad(rosenbrock)(params)
    moved, state = masked.update(grads, state, params, value_fn=rosenbrock, model_params=params)
    return optax.apply_updates(params, moved), state

  for _ in range(15):
    params, state = step(params, state)
  alone, _, _ = run(tx, lambda p: rosenbrock({**p, "y": START["y"]}), {"x": START["x"]}, 15)
  np.testing.assert_allclose(params["x"], alone["x"], rtol=1e-6)
  np.testing.assert_array_equal(params["y"], START["y"])
  same = optax.tree_map_params(tx, lambda x: x, tx.init(START))
  jax.tree.map(np.testing.assert_array_equal, same, tx.init(START))
