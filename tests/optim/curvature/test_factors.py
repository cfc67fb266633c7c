"""Factors of dense layers against brute force and closed forms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.optim import Curvature


class Net(nn.Module):
  """Two dense layers and a classifier over the mean of the tokens."""

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(nn.Dense(4, name="one")(x))
    x = nn.tanh(nn.Dense(3, use_bias=False, name="two")(x))
    if x.ndim == 3:
      x = x.mean(axis=1)
    return nn.Dense(5, name="head")(x)


def problem(shape, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape).astype(np.float32)
  batch = {"x": x, "y": rng.integers(0, 5, shape[0])}
  params = jax.jit(Net().init)(jax.random.key(seed), x)["params"]
  predict = lambda p, b: (Net().apply({"params": p}, b["x"]), b["y"])
  return predict, params, batch


def brute_force(params, batch, weights):
  """A and sum over tokens of E[d d^T] per layer, from per-example gradients.

  weights [batch, classes]: the distribution of the labels. An offset added to a
  layer's outputs has the same gradient as the outputs.
  """
  x = batch["x"]
  tokens = x.shape[1] if x.ndim == 3 else 1

  def log_loss(offsets, x, y):
    h = nn.tanh(x @ params["one"]["kernel"] + params["one"]["bias"] + offsets["one"])
    g = nn.tanh(h @ params["two"]["kernel"] + offsets["two"])
    pooled = g.mean(axis=0) if g.ndim == 2 else g
    logits = pooled @ params["head"]["kernel"] + params["head"]["bias"] + offsets["head"]
    return -jax.nn.log_softmax(logits)[y], {"one": x, "two": h, "head": pooled}

  rows = (tokens,) if x.ndim == 3 else ()
  zeros = {"one": jnp.zeros((*rows, 4)), "two": jnp.zeros((*rows, 3)), "head": jnp.zeros(5)}
  gradient = jax.grad(log_loss, has_aux=True)
  every = jax.vmap(jax.vmap(gradient, (None, None, 0)), (None, 0, None))
  grads, acts = jax.jit(every)(zeros, x, jnp.arange(5))
  inputs, outputs = {}, {}
  for name in zeros:
    d = np.float64(grads[name]).reshape(len(x), 5, -1, grads[name].shape[-1])
    outputs[name] = np.einsum("iy,iyto,iytp->op", weights, d, d) / len(x)
    a = np.float64(acts[name][:, 0])  # the same for all labels
    a = a.reshape(-1, a.shape[-1])
    if name != "two":
      a = np.concatenate([a, np.ones((len(a), 1))], axis=1)
    inputs[name] = a.T @ a / len(a)
  return inputs, outputs


@pytest.mark.parametrize("shape", [(6, 7), (6, 3, 7)], ids=["rows", "tokens"])
@pytest.mark.parametrize("estimation", ["exact", "empirical"])
@pytest.mark.parametrize("token_averaging", ["published", "expand"])
@pytest.mark.first(1)
def test_factors_equal_brute_force(shape, estimation, token_averaging):
  predict, params, batch = problem(shape)
  options = dict(estimation=estimation, token_averaging=token_averaging)
  estimate = Curvature(predict, params, batch, **options).estimate
  factors = jax.jit(estimate)(params, batch, jax.random.key(0))
  if estimation == "exact":
    weights = np.asarray(jax.nn.softmax(predict(params, batch)[0]))
  else:
    weights = np.eye(5)[batch["y"]]
  inputs, outputs = brute_force(params, batch, weights)
  for name in ("one", "two", "head"):
    tokens = shape[1] if len(shape) == 3 and name != "head" else 1
    scale = tokens if token_averaging == "published" else 1
    np.testing.assert_allclose(factors[name].inputs, inputs[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(factors[name].outputs, scale * outputs[name], rtol=1e-4, atol=1e-6)


def test_two_tokens_by_hand():
  """One example with tokens a1 = 1, a2 = 2, weight w, squared error (a1 w + a2 w)^2.

  With w = 1 and target 0 the output is 3, the loss 9 and d = 2 * 3 = 6 for both
  tokens. A = (1 + 4) / 2; G = T/B sum d^2 = 2 (36 + 36) published, 72 expanded.
  """

  class Shared(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(1, use_bias=False, name="w")(x).sum(axis=1)

  batch = {"x": jnp.array([[[1.0], [2.0]]]), "y": jnp.zeros((1, 1))}
  params = {"w": {"kernel": jnp.ones((1, 1))}}
  predict = lambda p, b: (Shared().apply({"params": p}, b["x"]), b["y"])
  for token_averaging, outputs in (("published", 144.0), ("expand", 72.0)):
    curvature = Curvature(
      predict,
      params,
      batch,
      likelihood="normal",
      estimation="empirical",
      token_averaging=token_averaging,
    )
    factors = jax.jit(curvature.estimate)(params, batch, jax.random.key(0))["w"]
    np.testing.assert_allclose(factors.inputs, [[2.5]], rtol=1e-6)
    np.testing.assert_allclose(factors.outputs, [[outputs]], rtol=1e-6)


@pytest.mark.thorough
def test_patch_embedding_equals_a_dense_layer_over_patches():
  class Stem(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Conv(4, (2, 2), strides=(2, 2), padding="VALID", name="stem")(x)
      return nn.Dense(5, name="head")(x.reshape(len(x), -1, 4).mean(axis=1))

  class Patches(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = x.reshape(len(x), 2, 2, 3, 2, 3).swapaxes(2, 3).reshape(len(x), 6, 12)
      return nn.Dense(5, name="head")(nn.Dense(4, name="stem")(x).mean(axis=1))

  x = np.random.default_rng(0).normal(size=(6, 4, 6, 3)).astype(np.float32)
  params = jax.jit(Stem().init)(jax.random.key(0), x)["params"]
  flat = params | {"stem": params["stem"] | {"kernel": params["stem"]["kernel"].reshape(12, 4)}}

  def factors(model, params, token_averaging):
    predict = lambda p, b: model.apply({"params": p}, b)
    options = dict(estimation="exact", token_averaging=token_averaging)
    estimate = jax.jit(Curvature(predict, params, x, **options).estimate)
    return estimate(params, x, jax.random.key(0))["stem"]

  conv, dense = factors(Stem(), params, "expand"), factors(Patches(), flat, "expand")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), conv, dense)
  # The published code divides the inputs of convolutions by their 6 places once more.
  published = factors(Stem(), params, "published")
  np.testing.assert_allclose(published.inputs, conv.inputs / 6, rtol=1e-5)
  np.testing.assert_allclose(published.outputs, conv.outputs * 6, rtol=1e-4, atol=1e-7)
