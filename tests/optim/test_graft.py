"""Grafting: the norm of one optimizer, the direction of the other."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import first_order
from tests.optim import small_net

PARAMS, BATCH = small_net.problem()
CURVATURE = optim.Curvature(small_net.predict, PARAMS, BATCH)
gradient = jax.jit(jax.grad(small_net.loss))
OPTIMIZERS = {
  "sgd": first_order.sgd(0.1, weight_decay=0.01),
  "adam": first_order.adam(1e-3),
  "adamw": first_order.adamw(1e-3),
  "lamb": first_order.lamb(1e-3),
  "adagrad": first_order.adagrad(1e-2),
  "muon": first_order.muon(1e-2),
  "soap": optim.soap(1e-2),
  "shampoo": optim.shampoo(1e-2),
  "kfac_adam": optim.kfac_adam(1e-2, CURVATURE),
  "kfac_muon": optim.kfac_muon(1e-2, CURVATURE),
  "kfac": optim.kfac(0.01, CURVATURE, factor_period=1, inverse_period=1),
  "ekfac": optim.ekfac(0.01, CURVATURE, factor_period=1, inverse_period=1),
}


def run(tx, steps=25):
  """The updates of some steps along one fixed path of parameters."""
  tx = optax.with_extra_args_support(tx)
  state, params, history = tx.init(PARAMS), PARAMS, []
  update = jax.jit(tx.update)
  for t in range(steps):
    grads = gradient(params, BATCH)
    updates, state = update(grads, state, params, batch=BATCH, rng=jax.random.key(t))
    history.append(updates)
    params = optax.apply_updates(params, jax.tree.map(lambda g: -0.01 * g, grads))
  return history


HISTORY = {}


def history(name):
  if name not in HISTORY:
    HISTORY[name] = run(OPTIMIZERS[name])
  return HISTORY[name]


# Each optimizer as a magnitude and as a direction, and one with itself.
PAIRS = [("sgd", "sgd"), *itertools.pairwise([*OPTIMIZERS, "sgd"])]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.first(1)
def test_each_tensor_has_the_norm_of_one_and_the_direction_of_the_other(pair):
  magnitude, direction = pair
  late = 1 if {"soap", "shampoo"} & set(pair) else 0  # their first step is zero
  steps = run(optim.graft(OPTIMIZERS[magnitude], OPTIMIZERS[direction]))
  assert not late or not any(np.any(x) for x in jax.tree.leaves(steps[0]))
  for step, *sides in zip(steps[late:], history(magnitude)[late:], history(direction)[late:]):
    for leaves in zip(*map(jax.tree.leaves, (step, *sides))):
      x, m, d = (np.float64(a).ravel() for a in leaves)
      np.testing.assert_allclose(np.linalg.norm(x), np.linalg.norm(m), rtol=1e-5)
      assert x @ d / (np.linalg.norm(x) * np.linalg.norm(d)) > 1 - 1e-6
      if magnitude == direction:
        np.testing.assert_allclose(x, d, rtol=1e-5, atol=1e-9)


def test_global_scope_compares_the_whole_tree():
  tx = optim.graft(OPTIMIZERS["sgd"], OPTIMIZERS["adam"], scope="global")
  for x, m, d in zip(run(tx), history("sgd"), history("adam")):
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(a)) for a in jax.tree.leaves(tree)))
    expected = jax.tree.map(lambda leaf: leaf * norm(m) / norm(d), d)
    small_net.close(x, expected, rtol=1e-5)


def test_nests():
  inner = optim.graft(OPTIMIZERS["adam"], OPTIMIZERS["lamb"])
  for step, sgd in zip(run(optim.graft(OPTIMIZERS["sgd"], inner)), history("sgd")):
    for x, m in zip(jax.tree.leaves(step), jax.tree.leaves(sgd)):
      np.testing.assert_allclose(np.linalg.norm(x), np.linalg.norm(m), rtol=1e-5)


def test_zero_and_tiny_directions_stay_finite():
  identity = optax.identity()
  tx = optim.graft(optax.scale(2.0), identity)
  update = lambda tx, g: tx.update([g], tx.init([g]))[0][0]
  np.testing.assert_array_equal(update(tx, jnp.zeros(3)), 0.0)
  for scope in ("tensor", "global"):
    bare = optim.graft(optax.scale(2.0), identity, scope=scope, eps=0.0)
    np.testing.assert_array_equal(update(bare, jnp.zeros(3)), 0.0)
    # Squares of 1e-30 underflow in float32; the norms must not.
    np.testing.assert_allclose(update(bare, jnp.full(4, 1e-30)), 2e-30, rtol=1e-5)


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_parameters_without_elements_stay(scope):
  params = {"none": jnp.ones((0, 5)), "w": jnp.ones(3)}
  tx = optim.graft(optax.scale(2.0), optax.scale(-1.0), scope=scope)
  step, _ = tx.update(params, tx.init(params))
  np.testing.assert_allclose(step["w"], -2.0)
  assert step["none"].shape == (0, 5)


def test_its_state_can_be_donated_inside_of_a_wrapper():
  params, _ = small_net.problem()
  tx = optax.MultiSteps(optim.graft(optax.adam(0.1), optax.sgd(0.1)), 2)
  step = jax.jit(lambda state, params: tx.update(params, state, params), donate_argnums=0)
  step(tx.init(params), params)
