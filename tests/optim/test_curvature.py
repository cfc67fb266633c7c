"""Factors against brute force, and a Kronecker block for every dense layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import models, optim
from mixer_jax.models import layers
from mixer_jax.optim.curvature import Curvature


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
  zeros = {"one": jnp.zeros(rows + (4,)), "two": jnp.zeros(rows + (3,)), "head": jnp.zeros(5)}
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


class Opposed(nn.Module):
  """Two logits z and -z, of the mean over tokens: ones as their gradients cancel."""

  @nn.compact
  def __call__(self, x):
    z = nn.Dense(1, name="out")(nn.tanh(nn.Dense(4, name="in")(x)).mean(axis=1))
    return jnp.concatenate([z, -z], axis=1)


def test_exact_factors_count_all_rows_where_outputs_cancel():
  x = np.random.default_rng(0).normal(size=(6, 3, 5)).astype(np.float32)
  params = jax.jit(Opposed().init)(jax.random.key(0), x)["params"]
  predict = lambda p, x: Opposed().apply({"params": p}, x)
  masked = lambda p, x: (predict(p, x), None, None, np.ones((6, 3), bool))
  of = lambda predict, **kw: optim.kfac_factors(predict, params, x, None, estimation="exact", **kw)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, of(masked), of(predict))
  two = lambda p, x: dict(zip("ab", jnp.split(predict(p, x), 2, axis=1)))
  apart = lambda p, x: (two(p, x), None, None, np.ones((6, 3), bool))
  likelihood = dict(likelihood={"a": "normal", "b": "normal"})
  jax.tree.map(close, of(apart, **likelihood), of(two, **likelihood))


@pytest.mark.thorough
def test_sampled_factors_average_to_the_exact_ones():
  predict, params, batch = problem((6, 7))
  estimate = Curvature(predict, params, batch).estimate
  keys = jax.random.split(jax.random.key(1), 4000)
  sampled = jax.jit(jax.vmap(estimate, (None, None, 0)))(params, batch, keys)
  exact = jax.jit(Curvature(predict, params, batch, estimation="exact").estimate)(
    params, batch, keys[0]
  )
  for name, factor in exact.items():
    mean = sampled[name].outputs.mean(axis=0)
    assert np.linalg.norm(mean - factor.outputs) < 0.03 * np.linalg.norm(factor.outputs)


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


def test_convolution_equals_brute_force():
  class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Conv(2, (3, 3), strides=(2, 1), padding="SAME", name="conv")(x)
      return nn.Dense(3, name="head")(x.reshape(len(x), -1))

  x = np.random.default_rng(0).normal(size=(4, 4, 3, 2)).astype(np.float32)
  params = jax.jit(Conv().init)(jax.random.key(0), x)["params"]
  predict = lambda p, b: Conv().apply({"params": p}, b)
  curvature = Curvature(predict, params, x, estimation="exact", token_averaging="expand")
  factors = jax.jit(curvature.estimate)(params, x, jax.random.key(0))["conv"]
  padded = np.pad(x, ((0, 0), (0, 1), (1, 1), (0, 0)))  # SAME: the odd pixel goes below
  rows = [padded[:, i : i + 3, j : j + 3].reshape(4, -1) for i in (0, 2) for j in range(3)]
  rows = np.concatenate([np.concatenate(rows), np.ones((24, 1))], axis=1)
  np.testing.assert_allclose(factors.inputs, rows.T @ rows / 24, rtol=1e-5, atol=1e-6)
  # Gradients of all labels with respect to the convolution's outputs.
  kernel, bias = params["head"]["kernel"], params["head"]["bias"]
  outputs = rows[:, :-1] @ params["conv"]["kernel"].reshape(18, 2) + params["conv"]["bias"]
  logits = outputs.reshape(6, 4, 2).swapaxes(0, 1).reshape(4, 12) @ kernel + bias
  expected = 0.0
  for p in np.asarray(jax.nn.softmax(logits)):
    for y in range(3):
      d = ((p - np.eye(3)[y]) @ kernel.T).reshape(6, 2)
      expected = expected + p[y] * d.T @ d / 4
  np.testing.assert_allclose(factors.outputs, expected, rtol=1e-4, atol=1e-6)


def test_layers_declare_their_blocks():
  class Gate(nn.Module):
    curvature = "gradient"

    @nn.compact
    def __call__(self, x):
      return nn.Dense(4, name="inner")(x * self.param("gate", nn.initializers.ones, (4,)))

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Conv(4, (3, 3), feature_group_count=2, name="grouped")(x)
      x = layers.LayerScale(0.5, name="scale")(layers.Affine(name="affine")(x))
      return nn.Dense(3, name="head")(Gate(name="gated")(x).mean(axis=(1, 2)))

  x = np.random.default_rng(0).normal(size=(4, 5, 5, 2)).astype(np.float32)
  params = jax.jit(Net().init)(jax.random.key(0), x)["params"]
  predict = lambda p, b: Net().apply({"params": p}, b)
  with pytest.raises(ValueError, match="grouped/kernel .a grouped nn.Conv.: list them in `plain`"):
    optim.kfac_blocks(predict, params, x, norms="diagonal")
  blocks = optim.kfac_blocks(predict, params, x, norms="diagonal", plain="^grouped/")
  kinds = {b.paths: b.kind for b in blocks}
  assert kinds == {
    ("affine/scale", "affine/bias"): "diagonal",
    ("scale/scale",): "diagonal",
    ("gated/inner/kernel", "gated/inner/bias"): "kronecker",
    ("head/kernel", "head/bias"): "kronecker",
    ("gated/gate",): "gradient",
    ("grouped/bias", "grouped/kernel"): "gradient",
  }


def mixer_blocks(**overrides):
  fields = dict(hidden_dim=12, num_blocks=3, tokens_mlp_dim=7, channels_mlp_dim=20)
  model = models.build("mixer_small", 10, **fields | overrides)
  images = jax.ShapeDtypeStruct((8, 16, 16, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  predict = lambda p, b: model.apply({"params": p}, b)
  return params, optim.kfac_blocks(predict, params, images)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.first(1)
def test_every_dense_layer_of_a_mixer_has_its_own_kronecker_block(dtype):
  params, blocks = mixer_blocks(dtype=dtype)
  kernels = {
    "/".join(k.key for k in path[:-1]): x.shape
    for path, x in jax.tree_util.tree_leaves_with_path(params)
    if path[-1].key == "kernel"
  }
  kronecker = [b for b in blocks if b.kind == "kronecker"]
  assert {b.name for b in kronecker} == set(kernels)
  assert len(kronecker) == len(kernels) == 3 * 4 + 2
  for block in kronecker:
    *d_in, d_out = kernels[block.name]
    assert block.factor_sizes == (np.prod(d_in) + 1, d_out)
    assert block.paths == (f"{block.name}/kernel", f"{block.name}/bias")
  assert all(
    b.name.split("/")[-1].startswith(("LayerNorm", "pre_head"))
    for b in blocks
    if b.kind == "gradient"
  )


@pytest.mark.thorough
def test_factors_are_float32_under_bfloat16():
  model = models.build("mixer_small", 10, hidden_dim=12, num_blocks=1, dtype="bfloat16")
  images, key = jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.float32), jax.random.key(0)
  params = jax.eval_shape(model.init, key, images)["params"]
  curvature = Curvature(lambda p, b: model.apply({"params": p}, b), params, images)
  factors = jax.eval_shape(curvature.estimate, params, images, key)
  assert {x.dtype for x in jax.tree.leaves(factors)} == {jnp.dtype("float32")}


def test_a_parameter_without_a_block_is_named():
  class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(4, name="one")(x)
      gate = self.param("gate", nn.initializers.ones, (4,))
      return nn.Dense(5, name="head")(x * gate)

  x = jnp.ones((2, 3))
  params = jax.jit(Scaled().init)(jax.random.key(0), x)["params"]
  predict = lambda p, b: Scaled().apply({"params": p}, b)
  with pytest.raises(ValueError, match="no K-FAC block covers the parameters gate"):
    optim.kfac_blocks(predict, params, x)
  kinds = {b.name: b.kind for b in optim.kfac_blocks(predict, params, x, plain=("^gate$",))}
  assert kinds == {"one": "kronecker", "head": "kronecker", "gate": "gradient"}


@pytest.mark.thorough
def test_norm_diagonal_equals_brute_force():
  class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(5, name="head")(nn.LayerNorm(name="norm")(x))

  x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
  params = jax.jit(Norm().init)(jax.random.key(0), x)["params"]
  predict = lambda p, b: Norm().apply({"params": p}, b)
  curvature = Curvature(predict, params, x, estimation="exact", norms="diagonal")
  scale, bias = jax.jit(curvature.estimate)(params, x, jax.random.key(0))["norm"].values
  loss = lambda p, x, y: -jax.nn.log_softmax(predict(p, x[None])[0])[y]
  every = jax.vmap(jax.vmap(jax.grad(loss), (None, None, 0)), (None, 0, None))
  grads, weights = (
    jax.jit(every)(params, x, jnp.arange(5))["norm"],
    jax.nn.softmax(predict(params, x)),
  )
  expected = {k: np.einsum("iy,iyc->c", weights, np.square(v)) / len(x) for k, v in grads.items()}
  np.testing.assert_allclose(scale, expected["scale"], rtol=1e-4)
  np.testing.assert_allclose(bias, expected["bias"], rtol=1e-4)


def test_factors_of_a_linear_classifier_in_closed_form():
  """A = E[a a^T] with a 1 appended, G = E[diag(p) - p p^T] for softmax cross-entropy."""

  class Linear(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(5, name="head")(x)

  x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
  params = jax.jit(Linear().init)(jax.random.key(0), x)["params"]
  predict = lambda p, b: Linear().apply({"params": p}, b)
  factors = optim.kfac_factors(predict, params, x, jax.random.key(1), estimation="exact")
  inputs = np.concatenate([x, np.ones((6, 1))], axis=1)
  p = np.exp(predict(params, x))
  p /= p.sum(axis=1, keepdims=True)
  expected = np.mean([np.diag(row) - np.outer(row, row) for row in p], axis=0)
  assert set(factors) == {"head"}
  np.testing.assert_allclose(factors["head"].inputs, inputs.T @ inputs / 6, rtol=1e-5)
  np.testing.assert_allclose(factors["head"].outputs, expected, atol=1e-6)
