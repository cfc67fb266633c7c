"""Steps of the K-FAC transform: what each renews, spread over devices, and on odd data."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import models, optim
from tests.optim.small_net import close, curvature, loss, problem


@functools.partial(jax.jit, static_argnums=0)
def step_of(tx, params, state, batch, key):
  grads = jax.grad(loss)(params, batch)
  updates, state = tx.update(grads, state, params, batch=batch, rng=key)
  return optax.apply_updates(params, updates), state


def steps_of(tx, params, batch, steps):
  state = tx.init(params)
  for t in range(steps):
    params, state = step_of(tx, params, state, batch, jax.random.key(t))
  return params, state


@pytest.mark.parametrize("name", ["eigenbases", "factored", "kfac_adam", "qr"])
def test_a_plain_step_transposes_no_factor(name):
  """Outside of the branches that renew, each matrix of a factor's shape is stored row after row."""
  params, batch = problem()
  of, periods = curvature(params, batch), dict(factor_period=2, inverse_period=4)
  in_basis = dict(factor_period=2, basis_period=4)
  tx = {
    "eigenbases": lambda: optim.scale_by_kfac(of, **periods),
    "factored": lambda: optim.scale_by_kfac(of, damping_type="factored", **periods),
    "kfac_adam": lambda: optim.scale_by_kfac_adam(of, **in_basis),
    "qr": lambda: optim.scale_by_kfac_adam(of, decomposition=optim.Decomposition("qr"), **in_basis),
  }[name]()
  update = lambda g, s: tx.update(g, s, params, batch=batch, rng=jax.random.key(0))
  program = jax.jit(update, donate_argnums=1).lower(params, tx.init(params)).compile().as_text()
  always = program[program.index("\nENTRY") :]
  assert "conditional(" in always
  for rows in (4, 6, 7):  # outputs of the layers, inputs with a bias
    assert f"f32[{rows},{rows}]{{1,0}}" in always
    assert f"f32[{rows},{rows}]{{0,1}}" not in always


def test_periods_decide_what_a_step_renews():
  params, batch = problem()
  options = dict(factor_period=2, inverse_period=4)
  tx = optim.scale_by_kfac(curvature(params, batch), **options)
  states = [tx.init(params)]
  grads, update = jax.grad(loss)(params, batch), jax.jit(tx.update)
  for t in range(6):
    states.append(update(grads, states[-1], params, batch=batch, rng=jax.random.key(t))[1])
  changed = lambda a, b: not np.array_equal(jax.tree.leaves(a)[0], jax.tree.leaves(b)[0])
  pairs = list(itertools.pairwise(states))
  assert [changed(a.factors, b.factors) for a, b in pairs] == [True, False] * 3
  assert [changed(a.inverses, b.inverses) for a, b in pairs] == [t % 4 == 0 for t in range(6)]


@pytest.mark.thorough
def test_a_sharded_batch_makes_the_same_steps():
  params, batch = problem(batch_size=16)
  tx = optim.kfac(0.05, curvature(params, batch), factor_period=2, inverse_period=5)
  one, _ = steps_of(tx, params, batch, 10)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  eight, _ = steps_of(tx, params, jax.device_put(batch, rows), 10)
  close(eight, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  "damping_type, identity_start",
  [("exact", False), pytest.param("factored", True, marks=pytest.mark.slow)],
)
@pytest.mark.thorough
def test_no_nan(damping_type, identity_start):
  model = models.build(
    "mixer_small", 4, hidden_dim=8, num_blocks=1, tokens_mlp_dim=6, channels_mlp_dim=10
  )
  images = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)
  labels = np.arange(4)
  predict = lambda p, b: (model.apply({"params": p}, b[0]), b[1])
  objective = lambda p, b: optax.softmax_cross_entropy_with_integer_labels(*predict(p, b)).mean()
  fresh = jax.jit(model.init)(jax.random.key(0), images)["params"]
  learnt = fresh | {"head": jax.tree.map(lambda x: x + 0.1, fresh["head"])}
  dead = learnt | {"MixerBlock_0": jax.tree.map(jnp.zeros_like, learnt["MixerBlock_0"])}
  options = dict(damping_type=damping_type, identity_start=identity_start)
  options |= dict(factor_period=1, inverse_period=1)
  of = optim.Curvature(predict, fresh, (images, labels))
  first = optim.constrain_norm(optim.scale_by_kfac(of, **options), of, 1e-2, 0.01)
  tx = optax.chain(first, optax.trace(0.9), optax.scale(-0.01))

  @jax.jit
  def step(params, state, batch, key):
    grads = jax.grad(objective)(params, batch)
    updates, state = tx.update(grads, state, params, batch=batch, rng=key)
    return optax.apply_updates(params, updates), state

  cases = {
    "zero head": (fresh, images),
    "constant image": (learnt, np.ones_like(images)),
    "one image": (learnt, np.repeat(images[:1], 4, axis=0)),
    "dead units": (dead, images),
  }
  for name, (params, pixels) in cases.items():
    state = tx.init(params)
    for t in range(3):
      params, state = step(params, state, (pixels, labels), jax.random.key(t))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state))), name


def test_decay_waits_for_twenty_factor_periods():
  params, batch = problem()
  tx = optim.kfac(1.0, curvature(params, batch), momentum=0.0, weight_decay=0.5, factor_period=2)
  state, update = tx.init(params), jax.jit(tx.update)
  for t in range(42):
    updates, state = update(
      jax.tree.map(jnp.zeros_like, params), state, params, batch=batch, rng=jax.random.key(t)
    )
    close(updates, jax.tree.map(lambda p: (-0.5 if t >= 40 else 0.0) * p, params), rtol=1e-6)
