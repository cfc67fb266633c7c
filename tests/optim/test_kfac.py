"""The K-FAC transform against dense algebra, NumPy and kfac-jax itself."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import algebra
from mixer_jax.optim.kfac_jax_blocks import kfac_jax
from tests.optim.small_net import (
  close,
  first,
  loss,
  needs_kfac_jax_s_tracer,
  predict,
  problem,
  registered,
)
from tests.optim.two_layers import matrix


def test_a_layer_that_is_listed_has_no_factors_and_the_plain_gradient():
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  tx = optim.scale_by_kfac(predict, params, batch, plain=["^two/"])
  state = tx.init(params)
  assert set(state.factors) == {"one"}
  updates = first(tx, params, batch)
  close(updates["two"], grads["two"], rtol=1e-6)
  others = first(optim.scale_by_kfac(predict, params, batch), params, batch)
  close(updates["one"], others["one"], rtol=1e-6)
  with pytest.raises(ValueError, match="plain is '[(]', no regular expression"):
    optim.scale_by_kfac(predict, params, batch, plain=["("])
  half = "plain has two/bias of a layer .* one block: two/kernel, two/bias; allowed: all of them"
  for pattern in ("bias$", "^(one|two/bias)"):
    with pytest.raises(ValueError, match=half if "two" in pattern else "plain has one/bias"):
      optim.scale_by_kfac(predict, params, batch, plain=pattern)


def test_arguments_in_another_order_and_a_forgotten_batch_are_named():
  params, batch = problem()
  for swapped in ((predict, params, batch, 0.1), (0.1, params, predict, batch)):
    for make in (optim.kfac, optim.kfac_adam):
      with pytest.raises(ValueError, match="predict is of type dict; allowed: a function of"):
        make(*swapped)
  grads = jax.grad(loss)(params, batch)
  for tx in (optim.kfac(0.1, predict, params, batch), optim.kfac_adam(0.1, predict, params, batch)):
    with pytest.raises(ValueError, match="the update needs batch: tx.update"):
      tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize(
  "option, message",
  [
    (dict(damping_decay=5.0), "damping_decay is 5.0; allowed: 0.01 to 1"),
    (dict(damping_period=0), "damping_period is 0; allowed: 1 or more"),
    (dict(quadratic_model="yes"), "quadratic_model is 'yes'; allowed: True or False"),
    (dict(damping_period=3), "damping_period is 3; it needs adaptive_damping=True"),
    (dict(norm_constraint=-1), "norm_constraint is -1; allowed: 0 or more"),
    (
      dict(quadratic_model=True, eigenvalues="batch"),
      'quadratic_model with eigenvalues="batch" needs weight_decay=0',
    ),
    (
      dict(adaptive_damping=True, damping_type="factored", inverse_period=6),
      "inverse_period is 6; .* allows 1 to damping_period, 5",
    ),
  ],
)
def test_options_that_would_not_be_heeded_are_refused(option, message):
  params, batch = problem()
  with pytest.raises(ValueError, match=message):
    optim.kfac(0.1, predict, params, batch, **option)


def first_update(damping_type, damping=1e-2):
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  options = dict(damping=damping, damping_type=damping_type, factor_decay=0.5)
  tx = optim.scale_by_kfac(predict, params, batch, estimation="exact", **options)
  updates, state = jax.jit(tx.update)(
    grads, tx.init(params), params, batch=batch, rng=jax.random.key(0)
  )
  return grads, updates, jax.tree.map(np.float64, state.factors)


def test_exact_damping_equals_the_dense_solve():
  grads, updates, factors = first_update("exact")
  for name in ("one", "two"):
    dense = np.kron(factors[name].inputs, factors[name].outputs)
    v = np.linalg.solve(dense + 1e-2 * np.eye(len(dense)), matrix(grads[name]).ravel())
    error = np.linalg.norm(matrix(updates[name]).ravel() - v)
    assert error < 1e-5 * np.linalg.norm(v)


def test_factored_damping_equals_the_formula():
  grads, updates, factors = first_update("factored")
  for name in ("one", "two"):
    a, g = factors[name]
    pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
    a = a + pi * np.sqrt(1e-2) * np.eye(len(a))
    g = g + np.sqrt(1e-2) / pi * np.eye(len(g))
    v = np.linalg.inv(a) @ matrix(grads[name]) @ np.linalg.inv(g)
    np.testing.assert_allclose(matrix(updates[name]), v, rtol=1e-4, atol=1e-5)


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
  tx = optim.kfac(lr, predict, params, batch, weight_decay=0.1, **options)
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
      predict,
      params,
      batch,
      damping=damping,
      damping_type="factored",
      estimation="exact",
      identity_start=False,
      token_averaging="expand",
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
  accelerated = lambda *args, cpu, default: default(*args)
  monkeypatch.setattr(jax.lax, "platform_dependent", accelerated)
  jaxpr = str(jax.make_jaxpr(invert)(factors))
  assert jaxpr.count(" eigh" if exact else " cholesky") == len({6, 7, 4})
  dense = lambda i: (i.vectors * i.values) @ i.vectors.T if exact else i
  for name, pair in invert(factors).items():
    for together, alone in zip(pair, apart[name]):
      np.testing.assert_allclose(dense(together), dense(alone), rtol=1e-4, atol=1e-5)


def test_mistakes_are_refused():
  params, batch = problem()
  build = lambda **kw: optim.scale_by_kfac(predict, params, batch, **kw)
  with pytest.raises(ValueError, match="damping is 0.0; allowed: 1e-37 or more"):
    build(damping=0.0)
  with pytest.raises(ValueError, match="damping_type is 'tikhonov'; allowed: exact, factored"):
    build(damping_type="tikhonov")
  with pytest.raises(ValueError, match="factor_period is 0"):
    build(factor_period=0)
  with pytest.raises(ValueError, match="estimation is 'mc'; allowed: sampled, exact, empirical"):
    build(estimation="mc")
  with pytest.raises(ValueError, match="norm_constraint needs the learning_rate"):
    build(norm_constraint=0.1)
  with pytest.raises(ValueError, match="axis_name and mesh are both given; allowed: one of them"):
    build(axis_name="data", mesh=jax.make_mesh((1,), ("data",)))


def test_warm_started_inverses_follow_the_decomposition():
  """On other data than the first the basis turns to theirs, unless the tolerance is large."""
  (params, first_batch), (_, batch) = problem(32), problem(32, seed=1)
  grads, rng = jax.grad(loss)(params, batch), jax.random.key(0)
  options = dict(estimation="exact", damping=1e-3, factor_decay=0.0, factor_period=1)

  def updates(**more):
    make = functools.partial(optim.scale_by_kfac, predict, params, first_batch, inverse_period=1)
    tx = make(**options, **more)
    step = jax.jit(lambda state, batch: tx.update(grads, state, params, batch=batch, rng=rng))
    one, state = step(tx.init(params), first_batch)
    for _ in range(300):
      two, state = step(state, batch)
    return [jnp.concatenate([x.ravel() for x in jax.tree.leaves(u)]) for u in (one, two)]

  anew, warm, kept = updates(), updates(refresh="qr"), updates(refresh="qr", tolerance=1.0)
  far = lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y)
  assert far(warm[0], anew[0]) < 1e-5 and far(kept[0], anew[0]) < 1e-5
  assert far(warm[1], anew[1]) < 1e-2 < 0.1 < far(kept[1], anew[1])
  with pytest.raises(ValueError, match='refresh="qr" needs damping_type="exact"'):
    updates(refresh="qr", damping_type="factored")
  with pytest.raises(ValueError, match='tolerance is 0.1; it needs refresh="qr"'):
    updates(tolerance=0.1)


class Norm(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(5, name="head")(nn.LayerNorm(name="norm")(x))


def test_the_diagonal_of_a_normalisation_divides_its_gradient():
  x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
  params = jax.jit(Norm().init)(jax.random.key(0), x)["params"]
  normed = lambda p, x: Norm().apply({"params": p}, x)
  options = dict(estimation="exact", norms="diagonal")
  tx = optim.scale_by_kfac(normed, params, x, damping=0.1, factor_decay=0.5, **options)
  fresh = optim.kfac_factors(normed, params, x, None, **options)["norm"].values
  grads = jax.tree.map(jnp.ones_like, params)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, batch=x)
  for name, d in zip(("scale", "bias"), fresh):
    wanted = 1 / (0.5 + 0.5 * np.float64(d) + 0.1)
    np.testing.assert_allclose(updates["norm"][name], wanted, rtol=1e-5)


def test_schedules_of_damping_and_rate_are_of_the_update_count():
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  damping, rate = (lambda t: 0.01 * (1 + 3.0 * t)), (lambda t: 0.1 * (1 + 1.0 * t))
  options = dict(damping=damping, learning_rate=rate, norm_constraint=1e-6)
  tx = optim.scale_by_kfac(predict, params, batch, estimation="exact", factor_decay=0.5, **options)
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
  for decay, start in ((lambda t: 0.3 * (t >= 2), 0), (0.3, 2)):
    tx = optim.kfac(0.1, predict, params, batch, weight_decay=decay, decay_from=start)
    state, moved = tx.init(params), params
    for t in range(3):
      updates, state = jax.jit(tx.update)(grads, state, moved, batch=batch, rng=jax.random.key(t))
      moved = optax.apply_updates(moved, updates)
    ends.append(moved)
  jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize(
  "name, option",
  [
    *(("kfac", o) for o in ("momentum", "norm_constraint", "factor_decay", "factor_period")),
    *(("kfac", "damping_type"), ("kfac", "plain"), ("kfac_adam", "b2"), ("soap", "b1")),
    *(("sgd", "momentum"), ("muon", "rms")),
  ],
)
def test_schedules_of_other_options_are_refused(name, option):
  params, batch = problem()
  model = (predict, params, batch) if name.startswith("kfac") else ()
  with pytest.raises(ValueError, match=f"{option} is <function .*; allowed: "):
    getattr(optim, name)(0.1, *model, **{option: lambda count: 0.5})


@pytest.mark.parametrize("kind", ["kfac", "kfac_adam"])
def test_a_batch_of_padding_alone_leaves_the_factors_as_they_are(kind):
  params, batch = problem()
  weighted = lambda params, batch: (*predict(params, batch), batch["weights"])
  batch["weights"] = np.ones(8, np.float32)
  make = {"kfac": optim.scale_by_kfac, "kfac_adam": optim.scale_by_kfac_adam}[kind]
  tx = make(weighted, params, batch, factor_period=1)
  update = jax.jit(tx.update)
  _, state = update(params, tx.init(params), params, batch=batch, rng=jax.random.key(0))
  empty = batch | {"weights": np.zeros(8, np.float32)}
  _, after = update(params, state, params, batch=empty, rng=jax.random.key(1))
  close(after.factors, state.factors, rtol=1e-6)


@pytest.mark.parametrize(
  "options",
  [
    dict(damping=np.float64(1e-2), damping_type="factored", momentum=np.float64(0.9)),
    dict(damping=lambda count: np.float64(1e-2) * count, damping_type="factored"),
    dict(eigenvalues="batch", moment_decay=np.float64(0.9)),
    dict(adaptive_damping=True, min_damping=np.float64(1e-6)),
  ],
)
@pytest.mark.thorough
def test_numbers_of_numpy_do_not_change_the_types_of_the_state(options):
  with jax.enable_x64(True):
    params, batch = problem()
    tx = optim.kfac(1e-2, predict, params, batch, **options)
    state = tx.init(params)
    value = {"value_fn": lambda p: loss(p, batch)} if "min_damping" in options else {}
    step = lambda state: tx.update(
      params, state, params, batch=batch, rng=jax.random.key(0), **value
    )
    types = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    assert types(jax.eval_shape(step, state)[1]) == types(state)
