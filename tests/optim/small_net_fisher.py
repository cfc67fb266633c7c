"""The exact Fisher matrix of the small net in float64, and its training by a quadratic model."""

import jax
import numpy as np
import optax

from mixer_jax import optim
from tests.optim.small_net import loss

# Factors without chance; without the identity at the start they are equal to those of kfac-jax.
EXACT = dict(estimation="exact", token_averaging="expand")


def chosen(
  curvature, damping=1e-2, learning_rate=1.0, weight_decay=0.0, damping_period=5, **options
):
  """K-FAC by its quadratic model, with adaptive damping; `options` are those of `scale_by_kfac`."""
  inner = optim.scale_by_kfac(curvature, damping=damping, **options)
  both = dict(damping=damping, weight_decay=weight_decay)
  by_model = optim.by_quadratic_model(inner, curvature, learning_rate=learning_rate, **both)
  return optim.levenberg_marquardt(by_model, curvature, damping_period=damping_period, **both)


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
