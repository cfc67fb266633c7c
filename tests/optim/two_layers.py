"""Two dense layers, 25 batches and gradients for them, and their factors in NumPy, float64."""

import functools

import flax.linen as nn
import jax
import numpy as np

STEPS, EXAMPLES, TOKENS = 25, 6, 3
SIZES = {"one": (5, 4), "two": (5, 3)}  # of [inputs + 1, outputs]


class Net(nn.Module):
  """Two dense layers over tokens, the second after the mean over them."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(3, name="two")(nn.tanh(nn.Dense(4, name="one")(x)).mean(axis=1))


def predict(params, batch):
  return Net().apply({"params": params}, batch["x"]), batch["y"]


@functools.cache
def sequence():
  """Parameters, batches and gradients of every step, independent of all updates."""
  rng = np.random.default_rng(0)
  layers = lambda scale: {
    name: {
      "kernel": scale * rng.normal(size=(d_in - 1, d_out)).astype(np.float32),
      "bias": scale * rng.normal(size=d_out).astype(np.float32),
    }
    for name, (d_in, d_out) in SIZES.items()
  }
  drift = layers(1.0)
  steps = []
  for _ in range(STEPS):
    batch = {
      "x": rng.normal(size=(EXAMPLES, TOKENS, 4)).astype(np.float32),
      "y": rng.integers(0, 3, EXAMPLES).astype(np.int32),
    }
    grads = jax.tree.map(np.add, drift, layers(0.5))
    steps.append((layers(0.7), batch, grads))
  return steps


def updates_of(tx):
  """The update of every step, and the state after each."""
  params, batch, _ = sequence()[0]
  state, found, states = tx.init(params), [], []
  step = jax.jit(lambda g, s, p, b: tx.update(g, s, p, batch=b, rng=jax.random.key(0)))
  for params, batch, grads in sequence():
    update, state = step(grads, state, params, batch)
    found.append(jax.tree.map(np.asarray, update))
    states.append(state)
  return found, states


def matrix(layer):
  return np.concatenate([layer["kernel"], layer["bias"][None]]).astype(np.float64)


def rows(params, batch):
  """Inputs and output gradients [examples, rows, width] of both layers, given labels, float64."""
  w = {name: matrix(layer) for name, layer in params.items()}
  extended = lambda x: np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)
  x = extended(batch["x"].astype(np.float64))
  h = np.tanh(x @ w["one"])
  mean = extended(h.mean(axis=1))
  logits = mean @ w["two"]
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  d_two = p - np.eye(3)[batch["y"]]  # of the loss of an example
  d_one = (d_two @ w["two"][:-1].T)[:, None] / TOKENS * (1 - h**2)
  return {"one": (x, d_one), "two": (mean[:, None], d_two[:, None])}


def empirical_factors(params, batch):
  """A and G as "published": rows of tokens stacked, G times the number of tokens."""
  factors = {}
  for name, (a, d) in rows(params, batch).items():
    tokens = a.shape[1]
    a, d = a.reshape(-1, a.shape[-1]), d.reshape(-1, d.shape[-1])
    factors[name] = (a.T @ a / len(a), d.T @ d * tokens / EXAMPLES)
  return factors


def averages(decay, period):
  """The factors from the identity on, of every step."""
  now = {name: tuple(np.eye(d) for d in sizes) for name, sizes in SIZES.items()}
  for t, (params, batch, _) in enumerate(sequence()):
    if t % period == 0:
      fresh = empirical_factors(params, batch)
      mix = lambda old, new: decay * old + (1 - decay) * new
      now = {name: tuple(map(mix, now[name], fresh[name])) for name in now}
    yield t, now


def assert_steps(found, wanted, rtol=2e-3):
  for t, (update, step) in enumerate(zip(found, wanted, strict=True)):
    for name in SIZES:
      scale = np.abs(step[name]).max()
      error = np.abs(matrix(update[name]) - step[name]).max()
      assert error <= rtol * scale, (t, name, error, scale)


def power_iteration(factor, q):
  """A step of orthogonal iteration from the vectors q, and the order that they are taken in."""
  order = np.argsort(-np.diag(q.T @ factor @ q))
  return np.linalg.qr(factor @ q[:, order])[0], order


def kernels(tx, name="one"):
  """The updates of one kernel alone, an array without a bias."""
  gradients = [np.asarray(grads[name]["kernel"]) for _, _, grads in sequence()]
  state, found, states = tx.init(gradients[0]), [], []
  step = jax.jit(tx.update)
  for g in gradients:
    update, state = step(g, state)
    found.append(np.asarray(update))
    states.append(state)
  return [g.astype(np.float64) for g in gradients], found, states
