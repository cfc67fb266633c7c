"""The quadratic model against dense float64 matrices, and 50 steps against kfac-jax's optimizer."""

import functools

import flax.linen as nn
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mixer_jax import optim
from mixer_jax.errors import UserError
from mixer_jax.optim import quadratic
from mixer_jax.optim.kfac_jax_blocks import kfac_jax
from tests.conftest import waves
from tests.optim import small_net
from tests.optim.small_net import needs_kfac_jax_s_tracer
from tests.optim.test_likelihoods import fisher_of_outputs
from tests.training.test_step import advanced, assert_close

CHOSEN = dict(quadratic_model=True, adaptive_damping=True)
# Factors without chance, equal to those of kfac-jax.
EXACT = dict(estimation="exact", token_averaging="expand", identity_start=False)


class Net(nn.Module):
  """Two dense layers, 4 outputs."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(4, name="two")(nn.tanh(nn.Dense(3, name="one")(x)))


def problem(rows=6, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(rows, 5)).astype(np.float32)
  batch = {"x": x, "y": rng.integers(0, 4, rows).astype(np.int32)}
  return jax.jit(Net().init)(jax.random.key(seed), x)["params"], batch


def predict(params, batch):
  return Net().apply({"params": params}, batch["x"]), batch["y"]


def loss(params, batch):
  return optax.softmax_cross_entropy_with_integer_labels(*predict(params, batch)).mean()


def numpy_outputs(params, x):
  h = np.tanh(x @ params["one"]["kernel"] + params["one"]["bias"])
  return h @ params["two"]["kernel"] + params["two"]["bias"]


def jacobian(params, x, head):
  """The derivative of head's outputs [rows, n] in float64, [rows, n, parameters]."""
  params = jax.tree.map(np.float64, params)
  leaves, structure = jax.tree.flatten(params)
  columns = []
  for i, leaf in enumerate(leaves):
    for j in range(leaf.size):
      ends = []
      for h in (1e-5, -1e-5):
        moved = leaf.ravel().copy()
        moved[j] += h
        moved = [*leaves[:i], moved.reshape(leaf.shape), *leaves[i + 1 :]]
        ends.append(head(np, numpy_outputs(structure.unflatten(moved), x)))
      ends = [np.concatenate(jax.tree.leaves(end), axis=-1) for end in ends]
      columns.append((ends[0] - ends[1]) / 2e-5)
  return np.stack(columns, axis=-1)


def dense_fisher(params, x, head, of_row, weights):
  """The Fisher matrix of the mean over rows [parameters, parameters], float64."""
  j = jacobian(params, x, head)
  y = head(np, numpy_outputs(jax.tree.map(np.float64, params), x))
  y = np.concatenate(jax.tree.leaves(y), axis=-1)
  rows = zip(weights, j.reshape(-1, *j.shape[-2:]), y.reshape(-1, y.shape[-1]))
  return sum(w * a.T @ of_row(b) @ a for w, a, b in rows) / sum(weights)


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
  params, batch = problem()
  x, weights = batch["x"], np.ones(6, np.float32)
  if weighted != "mean":
    weights = np.array([1.0, 2.0, 0.5, 0.0, 1.0, 3.0], np.float32)
  if weighted == "tokens":
    x, weights = x.reshape(2, 3, 5), weights.reshape(2, 3)

  def predict(params, x):
    outputs = head(jnp, Net().apply({"params": params}, x))
    return (outputs, None, weights) if weighted != "mean" else outputs

  mask = lambda tree: jax.tree_util.tree_map_with_path(lambda k, _: "kernel" in str(k[-1]), tree)
  model = quadratic.Model(predict, likelihood, mask=mask)
  vectors = [random_like(params, seed) for seed in (1, 2)]
  found = jax.jit(model.products)(params, x, vectors, 0.3)
  fisher = dense_fisher(params, batch["x"], head, of_row, weights.ravel())
  kernels, _ = ravel_pytree(jax.tree_util.tree_map_with_path(
    lambda k, p: np.full(p.shape, float("kernel" in str(k[-1]))), params))  # fmt: skip
  v = np.stack([np.float64(ravel_pytree(vector)[0]) for vector in vectors], axis=1)
  expected = v.T @ (fisher + 0.3 * np.diag(kernels)) @ v
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_coefficients_solve_the_equations():
  rng = np.random.default_rng(0)
  for _ in range(20):
    root, slopes = rng.normal(size=(2, 2)), rng.normal(size=2)
    products = root @ root.T
    found = quadratic.minimum(jnp.float32(products), jnp.float32(slopes))
    expected = -np.linalg.solve(products, slopes)
    np.testing.assert_allclose(found, expected, rtol=1e-3 * np.linalg.cond(products) ** 0.5)


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
  params, batch = problem()
  damping, decay, rate = 0.02, 0.1, 0.7
  mask = {"one": True, "two": {"kernel": True, "bias": False}}
  options = dict(damping=damping, factor_period=1, inverse_period=1, **EXACT)
  decaying = dict(weight_decay=decay, decay_mask=mask, decay_from=0)
  tx = optim.kfac(rate, predict, params, batch, quadratic_model=True, **options, **decaying)
  inner = optim.scale_by_kfac(predict, params, batch, **options)
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
  params, batch = problem(rows=16)
  options = dict(damping=damping, damping_type="factored", factor_period=1, inverse_period=5)
  choice = dict(quadratic_model=True, factor_damping_period=5, weight_decay=decay, decay_from=0)
  tx = optim.kfac(1.0, predict, params, batch, **choice, **options, **EXACT)
  inner = optim.scale_by_kfac(predict, params, batch, **options, **EXACT)
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


class Fixed(quadratic.Model):
  """A model of no curvature, so that the predicted change is the slope alone."""

  def __init__(self, decay=0.0):
    self.decay, self._mask = (lambda count: decay), None

  def products(self, params, batch, vectors, decay):
    return jnp.zeros((len(vectors), len(vectors)))


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.thorough
def test_damping_follows_the_rule(decay):
  """The ratios swing over both thresholds; the bounds are reached; NumPy does the same."""
  plain = optax.sgd(0.1)
  rule = dict(damping_period=2, damping_decay=0.5, min_damping=0.3, max_damping=8.0)
  tx = quadratic.levenberg_marquardt(plain, Fixed(decay), 1.0, **rule)
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
  tx = quadratic.levenberg_marquardt(optax.sgd(-0.1), Fixed(), 1.0, damping_period=1)
  params, grads = jnp.ones(2), jnp.ones(2)
  _, state = tx.update(grads, tx.init(params), params, batch=None, value_fn=jnp.sum)
  assert float(state.damping) == pytest.approx(1 / 0.95)


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
  options = dict(likelihood="normal", damping=1e-5, weight_decay=decay, decay_from=0, **EXACT)
  tx = optim.kfac(1.0, predict, params, (x, y), damping_period=1, **CHOSEN, **options)
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


def registered(decay):
  """The loss of `predict` with kfac-jax's marks."""

  def dense(x, layer):
    y = x @ layer["kernel"] + layer["bias"]
    return kfac_jax.register_dense(y, x, layer["kernel"], layer["bias"])

  def of(params, batch):
    logits = dense(jnp.tanh(dense(batch["x"], params["one"])), params["two"])
    kfac_jax.register_softmax_cross_entropy_loss(logits, batch["y"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean() + decay / 2 * optax.tree.vdot(params, params)

  return of


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
  params, batch = problem(rows=64)
  moved, theirs = steps_of_kfac_jax(params, batch, 50, damping, decay)
  options = dict(damping=damping, damping_type="factored", factor_period=1, inverse_period=5)
  options |= dict(factor_decay=0.95, weight_decay=decay, decay_from=0)
  tx = optim.kfac(1.0, predict, params, batch, **options, **CHOSEN, **EXACT)

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


def train(tx, params, batch, steps, state=None):
  @jax.jit
  def step(params, state, key):
    told = dict(batch=batch, rng=key, value_fn=lambda p: loss(p, batch))
    grads = jax.grad(loss)(params, batch)
    updates, state = tx.update(grads, state, params, model_params=params, **told)
    return optax.apply_updates(params, updates), state

  state = tx.init(params) if state is None else state
  for t in range(steps):
    params, state = step(params, state, jax.random.key(t))
  return params, state


def close(a, b, rtol=1e-4, atol=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@pytest.mark.thorough
def test_a_saved_and_restored_state_goes_on(tmp_path):
  params, batch = problem(rows=16)
  tx = optim.kfac(1.0, predict, params, batch, damping=1e-3, inverse_period=3, **CHOSEN, **EXACT)
  first = train(tx, params, batch, 7)
  assert float(first[1].damping) != pytest.approx(1e-3)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "mid", first)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "mid", jax.eval_shape(lambda: first))
  whole, again = (train(tx, *pair[:1], batch, 5, state=pair[1]) for pair in (first, restored))
  jax.tree.map(np.testing.assert_array_equal, again, whole)


def test_a_state_may_be_donated_and_its_damping_given_as_an_array():
  params, batch = small_net.problem()
  damping = jnp.float32(1e-2)
  tx = optim.kfac(1.0, small_net.predict, params, batch, damping=damping, **CHOSEN)
  taken = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  for _ in range(2):  # the second time the caller's array is still there
    taken(tx.init(params))
  make = optax.inject_hyperparams(optim.kfac, static_args=("predict", "params", "batch"))
  taken(make(1.0, small_net.predict, params, batch, **CHOSEN).init(params))


@pytest.mark.thorough
def test_fixed_rates_may_have_adaptive_damping():
  params, batch = problem(rows=16)
  options = dict(damping=0.1, weight_decay=0.0, **EXACT)
  adaptive = optim.kfac(0.05, predict, params, batch, adaptive_damping=True, **options)
  fixed = optim.kfac(0.05, predict, params, batch, **options)
  (one, state), (other, _) = (train(tx, params, batch, 5) for tx in (adaptive, fixed))
  close(one, other)  # the damping of the first five
  assert float(state.ratio) > 0.75 and float(state.damping) == pytest.approx(0.1 * 0.95**5)


@pytest.mark.thorough
def test_a_part_of_the_parameters_is_moved():
  params, batch = problem(rows=16)
  tx = optim.kfac(1.0, predict, params, batch, damping=1e-3, damping_period=1, **CHOSEN, **EXACT)
  labels = {"one": "kfac", "two": "still"}
  mixed = optax.multi_transform({"kfac": tx, "still": optax.set_to_zero()}, labels)
  moved, state = train(mixed, params, batch, 3)
  assert loss(moved, batch) < loss(params, batch)
  close(moved["two"], params["two"], rtol=0, atol=0)
  ratio = state.inner_states["kfac"].inner_state.ratio
  assert 0.5 < float(ratio) < 1.5  # of the part alone


@pytest.mark.thorough
def test_devices_that_share_a_batch_make_the_same_steps():
  params, batch = problem(rows=16)
  options = CHOSEN | EXACT | dict(damping=0.1, damping_period=2)
  tx = optim.kfac(1.0, predict, params, batch, **options)
  one, state = train(tx, params, batch, 4)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  rows = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
  spread, other = train(tx, params, rows, 4)
  close(spread, one)
  by_hand = optim.kfac(1.0, predict, params, batch, axis_name="data", **options)

  def step(params, state, batch):
    mean = lambda p: jax.lax.pmean(loss(p, batch), "data")
    grads = jax.grad(mean)(params)
    updates, state = by_hand.update(grads, state, params, batch=batch, value_fn=mean)
    return optax.apply_updates(params, updates), state

  specs = dict(in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")))
  step = jax.jit(jax.shard_map(step, mesh=mesh, out_specs=PartitionSpec(), **specs))
  moved, hand = params, by_hand.init(params)
  for _ in range(4):
    moved, hand = step(moved, hand, rows)
  close(moved, one)
  for found in (other, hand):
    assert float(found.damping) == pytest.approx(float(state.damping))
    assert float(found.ratio) == pytest.approx(float(state.ratio), rel=1e-3)


def run(**values):
  options = dict(CHOSEN, damping_period=2, learning_rate=1.0, damping=0.1, estimation="exact")
  return waves("kfac", **{f"optimizer.{k}": v for k, v in options.items()}, **values)


FACTORED = dict(damping_type="factored", inverse_period=2, factor_damping_period=2)


@pytest.mark.parametrize("options", [{}, FACTORED], ids=["exact", "factored"])
@pytest.mark.thorough
def test_training_on_any_mesh_and_in_parts_makes_the_same_steps(options):
  options = {f"optimizer.{k}": v for k, v in options.items()}
  one = advanced(run(**options), steps=4)
  assert float(one[0].opt_state.damping) != pytest.approx(0.1)
  for change in ({"accum_steps": 4}, {"mesh.data": 2, "mesh.model": 4}):
    other = advanced(run(**options, **change), steps=4)
    assert_close(other, one, rtol=2e-3, atol=2e-4)
    states = [state.opt_state for state, _ in (one, other)]
    assert float(states[1].damping) == pytest.approx(float(states[0].damping))
    if options:
      own = [float(state.inner.factor_damping) for state in states]
      assert own[1] == pytest.approx(own[0]) and own[0] != pytest.approx(0.1)


def test_a_layout_is_left_before_the_loss_is_taken():
  layout = optim.Layout(
    lambda tree: {"a": tree["both"][0], "b": tree["both"][1]},
    lambda tree: {"both": jnp.stack([tree["a"], tree["b"]])},
  )
  inner = quadratic.levenberg_marquardt(optax.sgd(0.1), Fixed(), 1.0, damping_period=1)
  tx, params = optim.relayout(inner, layout), {"both": jnp.array([1.0, 2.0])}
  value_fn = lambda p: (p["both"] ** 2).sum()
  _, state = tx.update(jax.grad(value_fn)(params), tx.init(params), params, batch=None,
                       value_fn=value_fn)  # fmt: skip
  # -0.1 |g|^2 is expected, with |g|^2 = 20; -0.1 |g|^2 + 0.01 |g|^2 comes.
  assert float(state.ratio) == pytest.approx(0.9)


@pytest.mark.thorough
def test_mistakes_are_one_line():
  params, batch = problem()
  build = lambda **kw: optim.kfac(1.0, predict, params, batch, **EXACT, **kw)
  grads, tx = jax.grad(loss)(params, batch), build(**CHOSEN)
  with pytest.raises(ValueError, match="adaptive_damping needs the loss as a function"):
    tx.update(grads, tx.init(params), params, batch=batch)
  with pytest.raises(ValueError, match="update needs params"):
    build(quadratic_model=True).update(grads, tx.init(params).inner, batch=batch)
  with pytest.raises(ValueError, match="but damping is a schedule"):
    build(adaptive_damping=True, damping=lambda count: 0.1)
  with pytest.raises(ValueError, match="damping is 0.1; it must be from min_damping, 1e-08, to"):
    build(adaptive_damping=True, damping=0.1, max_damping=0.01)
  with pytest.raises(ValueError, match="momentum is 0.5; a quadratic model takes its place: leave"):
    build(quadratic_model=True, momentum=0.5)
  with pytest.raises(ValueError, match="norm_constraint is 0.1; .*: leave it at 0.01"):
    build(quadratic_model=True, norm_constraint=0.1)
  with pytest.raises(ValueError, match="factor_damping_period is 20; it needs damping_type="):
    build(quadratic_model=True, factor_damping_period=20)
  factored = dict(damping_type="factored", inverse_period=10)
  with pytest.raises(ValueError, match="factor_damping_period is 20; it needs quadratic_model"):
    build(factor_damping_period=20, **factored)
  with pytest.raises(ValueError, match="period is 15; allowed: a multiple of inverse_period, 10"):
    build(factor_damping_period=15, quadratic_model=True, **factored)
  drawn = POISSON._replace(factor=None)
  with pytest.raises(ValueError, match="quadratic model needs a likelihood with a factor"):
    optim.kfac(1.0, predict, params, batch, likelihood=drawn, quadratic_model=True)
  with pytest.raises(UserError, match="optimizer kfac: a quadratic model needs clip_norm=0"):
    advanced(run(**{"optimizer.clip_norm": 1.0}))


def test_a_schedule_shortens_the_step_of_the_model():
  params, batch = small_net.problem()
  make = functools.partial(
    optim.kfac,
    predict=small_net.predict,
    params=params,
    batch=batch,
    quadratic_model=True,
    estimation="exact",
    weight_decay=0.0,
  )
  scheduled, plain = make(lambda count: 1 / (1.0 + count)), make(1.0)
  state = scheduled.init(params)
  for t in range(3):
    grads = jax.grad(small_net.loss)(params, batch)
    whole, _ = jax.jit(plain.update)(grads, state, params, batch=batch)
    step, state = jax.jit(scheduled.update)(grads, state, params, batch=batch)
    small_net.close(step, jax.tree.map(lambda x: x / (1 + t), whole), rtol=1e-4, atol=1e-6)
    params = jax.tree.map(jnp.add, params, step)
