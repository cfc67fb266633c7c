"""A classifier of two dense layers, its data, and its first update by an optimizer."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim.curvature.kfac_jax_blocks import kfac_jax

# kfac-jax 0.0.8 traces a model on these alone; its blocks work on all.
needs_kfac_jax_s_tracer = pytest.mark.skipif(
  jax.__version_info__ >= (0, 9, 2), reason=f"kfac-jax traces no model on JAX {jax.__version__}"
)


class Net(nn.Module):
  """Two dense layers, tanh between, 4 classes."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(4, name="two")(nn.tanh(nn.Dense(6, name="one")(x)))


def problem(batch_size=8, seed=0):
  """Parameters and a batch, equal for equal arguments."""
  rng = np.random.default_rng(seed)
  batch = {
    "x": rng.normal(size=(batch_size, 5)).astype(np.float32),
    "y": rng.integers(0, 4, batch_size).astype(np.int32),
  }
  return jax.tree.map(lambda x: x, _params(seed)), batch


@functools.cache
def _params(seed):
  return jax.jit(Net().init)(jax.random.key(seed), np.zeros((1, 5), np.float32))["params"]


def predict(params, batch):
  return Net().apply({"params": params}, batch["x"]), batch["y"]


def curvature(params, batch, **options):
  """The curvature of the net; the options are those of `optim.Curvature`."""
  return optim.Curvature(predict, params, batch, **options)


def loss(params, batch):
  logits, labels = predict(params, batch)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def registered(decay=0.0):
  """The loss, and half the squares of all parameters times `decay`, with kfac-jax's marks."""

  def dense(x, layer):
    y = x @ layer["kernel"] + layer["bias"]
    return kfac_jax.register_dense(y, x, layer["kernel"], layer["bias"])

  def of(params, batch):
    logits = dense(jnp.tanh(dense(batch["x"], params["one"])), params["two"])
    kfac_jax.register_softmax_cross_entropy_loss(logits, batch["y"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean() + decay / 2 * optax.tree.vdot(params, params)

  return of


def close(a, b, rtol=1e-5, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def first(tx, params, batch, **extra):
  """The first update."""

  def update(params, batch):
    grads = jax.grad(loss)(params, batch)
    return tx.update(grads, tx.init(params), params, batch=batch, rng=jax.random.key(0), **extra)[0]

  return jax.jit(update)(params, batch)
