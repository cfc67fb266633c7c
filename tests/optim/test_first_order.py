"""First-order chains against their equations in NumPy, as PyTorch has them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import first_order


def path(tx, steps=25):
  """Parameters after each step on the loss sum(w^4) / 4."""
  w = np.array([1.0, -2.0, 0.5], np.float32)
  state, points = tx.init(w), []
  for _ in range(steps):
    updates, state = tx.update(w**3, state, w)
    w = np.asarray(optax.apply_updates(w, updates))
    points.append(w)
  return np.array(points)


def numpy_path(step, steps=25):
  w, memory, points = np.array([1.0, -2.0, 0.5]), {}, []
  for t in range(1, steps + 1):
    w = step(w, w**3, memory, t)
    points.append(w)
  return np.array(points)


def sgd(w, g, m, t):
  m["b"] = 0.9 * m.get("b", 0.0) + g + 0.1 * w
  return w - 0.01 * m["b"]


def moments(g, m, t):
  m["m"] = 0.9 * m.get("m", 0.0) + 0.1 * g
  m["v"] = 0.999 * m.get("v", 0.0) + 0.001 * g**2
  return (m["m"] / (1 - 0.9**t)) / (np.sqrt(m["v"] / (1 - 0.999**t)) + 1e-8)


def adam(w, g, m, t):
  return w - 0.01 * moments(g + 0.1 * w, m, t)


def adamw(w, g, m, t):
  return w - 0.01 * (moments(g, m, t) + 0.1 * w)


def adagrad(w, g, m, t):
  g = g + 0.1 * w
  m["s"] = m.get("s", 0.1) + g**2
  return w - 0.01 * g / np.sqrt(m["s"] + 1e-7)


@pytest.mark.parametrize("step", [sgd, adam, adamw, adagrad])
def test_steps_equal_numpy(step):
  tx = getattr(first_order, step.__name__)(0.01, weight_decay=0.1)
  np.testing.assert_allclose(path(tx), numpy_path(step), rtol=2e-5, atol=1e-6)


def test_lamb_equals_that_of_apex():
  """NumPy: a step of the parameter's length, but Adam's where nothing decays; 25 steps."""
  rng = np.random.default_rng(0)
  start = {"kernel": rng.normal(size=(3, 2)), "bias": np.zeros(2)}
  targets = {name: rng.normal(size=x.shape) for name, x in start.items()}
  rate, b1, b2, eps, decay = 0.02, 0.9, 0.99, 1e-6, 0.1
  mask = {"kernel": True, "bias": False}
  tx = first_order.lamb(rate, b1=b1, b2=b2, weight_decay=decay, decay_mask=mask)
  params = jax.tree.map(np.float32, start)
  state = tx.init(params)
  expected, moments = dict(start), dict.fromkeys(start, (0.0, 0.0))
  for count in range(1, 26):
    gradient = jax.tree.map(lambda w, t: w - t, params, targets)
    updates, state = tx.update(jax.tree.map(np.float32, gradient), state, params)
    params = jax.tree.map(np.add, params, updates)
    for name, w in expected.items():
      g = w - targets[name]
      m, v = moments[name]
      m, v = moments[name] = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
      step = m / (1 - b1**count) / (np.sqrt(v / (1 - b2**count)) + eps)
      if mask[name]:
        step = step + decay * w
        step *= np.linalg.norm(w) / np.linalg.norm(step)
      expected[name] = w - rate * step
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), params, expected
  )
  assert np.abs(expected["bias"]).min() > 0.1


def newton_schulz(m):
  x = m / np.linalg.norm(m)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x


def test_muon_sees_the_matrices_of_attention():
  """The update of 16x16 matrices has singular values near 1; biases and scales take Adam."""
  x, keys = jnp.ones((2, 5, 16)), jax.random.split(jax.random.key(0))
  attention = nn.MultiHeadDotProductAttention(num_heads=4)
  params = jax.jit(attention.init)(keys[0], x)["params"]
  grads = jax.tree.map(lambda p: jax.random.normal(keys[1], p.shape), params)
  tx = first_order.muon(1.0, nesterov=False, rms=0.25, weight_decay=0.0)
  updates = tx.update(grads, tx.init(params), params)[0]
  for name in ("query", "key", "value", "out"):
    values = np.linalg.svd(np.reshape(updates[name]["kernel"], (16, 16)), compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.3
    np.testing.assert_allclose(updates[name]["bias"], -np.sign(grads[name]["bias"]), rtol=1e-3)


@pytest.mark.parametrize(
  "name, fields", [("muon", ()), ("soap", ("bias",)), ("muon", ("bias",)), ("shampoo", ())]
)
@pytest.mark.first(2)
def test_several_features_are_as_one(name, fields):
  """By its bias, or by its name in attention, a kernel [6, 2, 5] is the matrix [6, 10]."""
  layer = nn.DenseGeneral((2, 5), use_bias=bool(fields), name="any" if fields else "query")
  params = layer.init(jax.random.key(0), jnp.ones((1, 6)))["params"]
  tx = getattr(optim, name)(0.1)
  several = {layer.name: params}
  one = jax.tree.map(lambda x: x.reshape(*x.shape[:-2], 10), several)
  states = {True: tx.init(several), False: tx.init(one)}
  for i in range(4):
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(i), x.shape), one)
    wide = jax.tree.map(lambda g, x: g.reshape(x.shape), grads, several)
    expected, states[False] = tx.update(grads, states[False], one)
    found, states[True] = tx.update(wide, states[True], several)
    flat = jax.tree.map(lambda f, e: f.reshape(e.shape), found, expected)
    jax.tree.map(
      lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-7), flat, expected
    )


def test_muon_s_adam_has_nesterov_s_momentum_by_default():
  matrix = {"kernel": jnp.ones((2, 2))}
  grads = [matrix | {"bias": jnp.float32([1, -2, 0.5]) * t} for t in (1, -3, 2)]
  for nesterov, other in ((True, optax.nadam), (False, optax.adam)):
    txs = first_order.muon(0.1, nesterov=nesterov, weight_decay=0.0), other(0.1)
    states = [tx.init(grads[0]) for tx in txs]
    for g in grads:
      (found, expected), states = zip(*(tx.update(g, s, g) for tx, s in zip(txs, states)))
      np.testing.assert_allclose(found["bias"], expected["bias"], rtol=1e-6)


def test_adam_paths_of_muon():
  params = {name: {"kernel": jnp.ones((3, 4))} for name in ("hidden", "head")}
  grads = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), params)

  def by_adam(**options):
    tx = first_order.muon(1.0, nesterov=False, weight_decay=0.0, **options)
    steps = tx.update(grads, tx.init(params), params)[0]
    # Adam's first step is the gradient's sign.
    return {name for name, x in steps.items() if np.allclose(jnp.abs(x["kernel"]), 1.0, atol=1e-5)}

  assert by_adam() == {"head"}
  assert by_adam(adam_paths="^hidden/") == {"hidden"}
  assert by_adam(adam_paths="") == set()


@pytest.mark.parametrize("normuon", [False, True])
def test_muon(normuon):
  options = dict(momentum=0.9, nesterov=False, rms=0.2, weight_decay=0.0, normuon=normuon)
  tx = first_order.muon(0.1, **options)
  rng = np.random.default_rng(0)
  gradients = [
    {"block": {"kernel": rng.normal(size=(3, 2, 7))}, "head": {"kernel": rng.normal(size=(4, 3))}}
    for _ in range(25)
  ]
  params = jax.tree.map(np.float32, gradients[0])
  state, mean, m, v, step = tx.init(params), 0.0, 0.0, 0.0, jax.jit(tx.update)
  squares = np.zeros(7)
  for t, grads in enumerate(gradients, 1):
    update, state = step(jax.tree.map(np.float32, grads), state, params)
    mean = 0.9 * mean + 0.1 * grads["block"]["kernel"].reshape(6, 7)
    wanted = -0.1 * 0.2 * np.sqrt(7) * newton_schulz(mean / (1 - 0.9**t))
    if normuon:  # Li et al., 2025; a column is a neuron
      unit = wanted / np.sqrt(np.mean(wanted**2))
      squares = 0.95 * squares + 0.05 * np.mean(unit**2, axis=0)
      unit = unit / (np.sqrt(squares) + 1e-3)
      wanted = unit * np.linalg.norm(wanted) / np.linalg.norm(unit)
    np.testing.assert_allclose(
      update["block"]["kernel"].reshape(6, 7), wanted, rtol=1e-3, atol=1e-5
    )
    g = grads["head"]["kernel"]
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    wanted = -0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(update["head"]["kernel"], wanted, rtol=1e-3)
