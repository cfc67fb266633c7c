"""Every kind of layer against brute force in float64: rows found by probing, gradients by offsets."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from mixer_jax.optim.curvature import Curvature


def captured(model, params, x, **variables):
  """Every call of a layer with parameters of its own: its module, method, arguments and result."""
  found = []

  def note(next_call, args, kwargs, context):
    y = next_call(*args, **kwargs)
    own = context.module.variables.get("params", {})
    arrays = any(not hasattr(v, "items") for v in own.values())
    if arrays and context.method_name == "__call__":
      found.append((context.module.path, context.module, args, y))
    return y

  with nn.intercept_methods(note):
    model.apply({"params": params, **variables}, x)
  return found


@contextlib.contextmanager
def offset(offsets):
  """Adds to the outputs of layers: the gradient of an offset is that of an output."""

  def add(next_call, args, kwargs, context):
    y = next_call(*args, **kwargs)
    meant = context.module.path in offsets and context.method_name == "__call__"
    return y + offsets[context.module.path] if meant else y

  with nn.intercept_methods(add):
    yield


def output_factor(model, params, x, path, d_out):
  """1/B sum over examples and rows of E[d d^T], labels drawn from softmax(outputs), float64."""
  shapes = {c[0]: c[3].shape for c in captured(model, params, x[:1])}

  def log_loss(offset_of, x, y):
    with offset({path: offset_of}):
      logits = model.apply({"params": params}, x[None])[0]
    return -jax.nn.log_softmax(logits)[y]

  logits = model.apply({"params": params}, x)
  every = jax.vmap(jax.vmap(jax.grad(log_loss), (None, None, 0)), (None, 0, None))
  d = jax.jit(every)(jnp.zeros(shapes[path]), x, jnp.arange(logits.shape[-1]))
  d = np.asarray(d).reshape(*d.shape[:2], -1, d_out)
  return np.einsum("by,byto,bytp->op", jax.nn.softmax(logits), d, d) / len(x)


def rows_by_probing(module, args, shape, inputs):
  """Rows of a layer: each entry of its kernel alone, from every input to the first output."""
  d_in = int(np.prod([shape[i] for i in inputs]))
  outputs = [i for i in range(len(shape)) if i not in inputs]
  free = module.clone(parent=None, name=None)
  own = {k: jnp.zeros_like(v) for k, v in module.variables["params"].items() if k != "kernel"}
  layer = jax.jit(lambda kernel: free.apply({"params": {"kernel": kernel, **own}}, *args))
  rows = []
  for entry in range(d_in):
    kernel = np.zeros([shape[i] for i in inputs] + [shape[i] for i in outputs])
    kernel.reshape(d_in, -1)[entry, 0] = 1.0
    kernel = kernel.transpose(np.argsort([*inputs, *outputs]))
    y = layer(jnp.asarray(kernel))
    y = y.reshape(-1, *[shape[i] for i in outputs])
    rows.append(y.reshape(len(y), -1)[:, 0])
  return np.stack(rows, axis=1)


class Named(nn.Module):
  """A layer between two others, then a mean over places."""

  make: object

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(self.make()(x))
    x = x.reshape(len(x), -1)
    return nn.Dense(3, name="head")(x)


CASES = {
  "dense": (lambda: nn.Dense(4, name="layer"), (3, 5), [0]),
  "tokens": (lambda: nn.Dense(4, name="layer"), (3, 2, 5), [0]),
  "general": (lambda: nn.DenseGeneral((2, 3), axis=(1, 3), name="layer"), (3, 2, 4, 3), [0, 1]),
  "general unsorted": (
    lambda: nn.DenseGeneral(3, axis=(-1, 1), name="layer"),
    (3, 2, 4, 3),
    [0, 1],
  ),
  "general axis 1": (lambda: nn.DenseGeneral(4, axis=1, name="layer"), (3, 5, 2), [0]),
  "einsum": (lambda: nn.Einsum((4, 2, 5), "bti,oki->btko", name="layer"), (3, 2, 5), [2]),
  "einsum ellipsis": (lambda: nn.Einsum((5, 4), "...i,io->...o", name="layer"), (3, 2, 5), [0]),
  "conv": (lambda: nn.Conv(2, (3, 3), strides=(2, 1), name="layer"), (3, 4, 5, 2), [0, 1, 2]),
  "conv 1d": (lambda: nn.Conv(3, 3, padding="CAUSAL", name="layer"), (3, 5, 2), [0, 1]),
  "circular": (
    lambda: nn.Conv(2, (3, 3), padding="CIRCULAR", name="layer"),
    (3, 4, 4, 2),
    [0, 1, 2],
  ),
  "padded": (
    lambda: nn.Conv(2, (2, 3), padding=((1, 2), (0, 1)), kernel_dilation=2, name="layer"),
    (3, 4, 5, 2),
    [0, 1, 2],
  ),
  "patches": (
    lambda: nn.Conv(2, (2, 2), strides=(2, 2), padding="VALID", name="layer"),
    (3, 5, 4, 2),
    [0, 1, 2],
  ),
  "transposed": (
    lambda: nn.ConvTranspose(2, (3, 3), strides=(2, 2), name="layer"),
    (3, 2, 3, 2),
    [0, 1, 2],
  ),
  "transposed kernel": (
    lambda: nn.ConvTranspose(
      2, (2, 3), strides=(2, 1), padding="VALID", transpose_kernel=True, name="layer"
    ),
    (3, 2, 2, 3),
    [0, 1, 3],
  ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.first(1)
def test_a_layer_equals_brute_force(name):
  make, shape, inputs = CASES[name]
  model = Named(make)
  with jax.enable_x64(True):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda p: p + 0.1, params)
    [(path, module, args, _)] = [c for c in captured(model, params, x) if c[0] == ("layer",)]
    kernel = params["layer"]["kernel"]
    rows = rows_by_probing(module, args, kernel.shape, inputs)
    outputs = [i for i in range(kernel.ndim) if i not in inputs]
    d_out = int(np.prod([kernel.shape[i] for i in outputs]))
    expected_g = output_factor(model, params, x, path, d_out)
  rows = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
  x = np.asarray(x, np.float32)
  params = jax.tree.map(lambda p: np.asarray(p, np.float32), params)
  predict = lambda p, x: model.apply({"params": p}, x)
  options = dict(estimation="exact", token_averaging="expand")
  # An example batch of another size than the batch at hand.
  factors = jax.jit(Curvature(predict, params, x[:2], **options).estimate)(params, x)["layer"]
  np.testing.assert_allclose(factors.inputs, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
  # The order of a block's outputs is that of the layer's results.
  np.testing.assert_allclose(factors.outputs, expected_g, rtol=1e-4, atol=1e-6)


def fisher(predict, params, x, classes):
  """The Fisher matrix of one layer's parameters, by the gradients of every label, float64."""
  log_loss = lambda p, x, y: -jax.nn.log_softmax(predict(p, x[None])[0])[y]
  every = jax.vmap(jax.vmap(jax.grad(log_loss), (None, None, 0)), (None, 0, None))
  grads = jax.jit(every)(params, x, jnp.arange(classes))
  weights = jax.nn.softmax(predict(params, x))
  return grads, np.asarray(weights)


class Attention(nn.Module):
  """Two heads, and a class for each of the examples."""

  @nn.compact
  def __call__(self, x):
    x = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=4, name="attention")(x)
    return nn.Dense(3, name="head")(x.mean(axis=1))


class Words(nn.Module):
  @nn.compact
  def __call__(self, ids):
    x = nn.Embed(7, 3, name="words")(ids)
    return nn.Dense(3, name="head")(nn.tanh(x).mean(axis=1))


SAME_LAYER = [pytest.param(name, marks=pytest.mark.slow) for name in ("key", "value")]


@pytest.mark.parametrize("name", ["query", *SAME_LAYER, "out", "words"])
@pytest.mark.thorough
def test_one_example_of_one_row_is_exact(name):
  """A (x) G is the Fisher matrix itself where there is one row: attention, embeddings."""
  model = Words() if name == "words" else Attention()
  tokens = 1
  with jax.enable_x64(True):
    rng = np.random.default_rng(0)
    x = jnp.asarray([[4]]) if name == "words" else jnp.asarray(rng.normal(size=(1, tokens, 4)))
    params = jax.tree.map(
      lambda p: p + 0.3 * rng.normal(size=p.shape), model.init(jax.random.key(0), x)["params"]
    )
    predict = lambda p, x: model.apply({"params": p}, x)
    grads, weights = fisher(predict, params, x, 3)
    grads = grads["words"] if name == "words" else grads["attention"][name]
    flat = [np.asarray(grads[k])[0].reshape(3, -1) for k in sorted(grads, reverse=True)]
    g = np.concatenate(flat, axis=1)  # kernel, then bias: the order of a block
    expected = np.einsum("y,yi,yj->ij", weights[0], g, g)
  params = jax.tree.map(np.float32, params)
  x = np.asarray(x, np.int32 if name == "words" else np.float32)
  factors = optim.kfac_factors(predict, params, x, None, estimation="exact")
  a, b = factors["words" if name == "words" else f"attention/{name}"]
  a = np.diag(a.values) if name == "words" else a
  # A query and a key of one token change nothing: their Fisher matrix is 0.
  np.testing.assert_allclose(np.kron(a, b), expected, rtol=1e-4, atol=1e-7)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    return nn.tanh(nn.Dense(4, name="inner")(x)), None


def stacked_model(lift):
  """Two equal layers: in a loop of Python, scanned, rematerialised, or side by side."""

  class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
      if lift == "scan":
        loop = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = loop(name="blocks")(x, None)
      elif lift == "remat scan":
        loop = nn.scan(
          nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = loop(name="blocks")(x, None)
      else:
        block = nn.remat(Block) if lift == "remat" else Block
        for i in range(2):
          x, _ = block(name=f"block_{i}")(x)
      return nn.Dense(3, name="head")(x)

  return Stack()


@pytest.mark.parametrize("lift", ["scan", "remat scan", "remat"])
@pytest.mark.thorough
def test_lifted_layers_equal_those_of_a_loop(lift):
  x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
  plain = jax.jit(stacked_model("loop").init)(jax.random.key(0), x)["params"]
  params = plain
  if "scan" in lift:
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), plain["block_0"], plain["block_1"])
    params = {"blocks": both, "head": plain["head"]}

  def update(model, params):
    predict = lambda p, x: model.apply({"params": p}, x)
    tx = optim.scale_by_kfac(predict, params, x, estimation="exact", damping=1e-2, factor_decay=0.5)
    grads = jax.tree.map(jnp.ones_like, params)
    return jax.jit(lambda g: tx.update(g, tx.init(params), params, batch=x)[0])(grads)

  found, expected = update(stacked_model(lift), params), update(stacked_model("loop"), plain)
  if "scan" in lift:
    apart = {f"block_{i}": jax.tree.map(lambda z, i=i: z[i], found["blocks"]) for i in (0, 1)}
    found = {**apart, "head": found["head"]}
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


class Twice(nn.Module):
  """The same layer for two inputs; their rows in one call if `together`."""

  together: bool

  @nn.compact
  def __call__(self, x):
    layer = nn.Dense(4, name="shared")
    a, b = x[:, 0], x[:, 1]
    h = layer(x) if self.together else jnp.stack([layer(a), layer(b)], axis=1)
    return nn.Dense(3, name="head")(nn.tanh(h).reshape(len(x), -1))


@pytest.mark.thorough
def test_uses_of_a_layer_count_like_tokens():
  x = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
  params = jax.jit(Twice(True).init)(jax.random.key(0), x)["params"]
  factors = [
    optim.kfac_factors(
      lambda p, x: Twice(t).apply({"params": p}, x), params, x, None, estimation="exact"
    )
    for t in (True, False)
  ]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *factors)


class Tied(nn.Module):
  """Words whose matrix is the head, too."""

  tied: bool = True

  @nn.compact
  def __call__(self, ids):
    words = nn.Embed(7, 3, name="words")
    x = nn.tanh(words(ids)).mean(axis=1)
    return words.attend(x) if self.tied else nn.Dense(7, use_bias=False, name="head")(x)


def test_a_tied_embedding_mixes_the_factors_of_both_uses():
  ids = np.random.default_rng(0).integers(0, 7, (6, 4))
  params = jax.jit(Tied().init)(jax.random.key(0), ids)["params"]
  params = {"words": {"embedding": params["words"]["embedding"] + 0.2}}
  untied = {**params, "head": {"kernel": params["words"]["embedding"].T}}
  factors = lambda tied, p: optim.kfac_factors(
    lambda p, ids: Tied(tied).apply({"params": p}, ids), p, ids, None, estimation="exact"
  )
  apart, together = factors(False, untied), factors(True, params)["words"]
  uses = [
    (np.asarray(apart["words"].inputs.values), np.asarray(apart["words"].outputs)),
    # The head's outputs are words: only the diagonal of their factor is kept.
    (np.diag(apart["head"].outputs), np.asarray(apart["head"].inputs)),
  ]
  t = np.array([a.sum() * np.trace(g) for a, g in uses])
  inputs = sum(p * a / a.sum() for p, (a, _) in zip(t / t.sum(), uses))
  outputs = sum(p * g / np.trace(g) for p, (_, g) in zip(t / t.sum(), uses))
  product = np.kron(np.diag(together.inputs.values), together.outputs)
  np.testing.assert_allclose(
    product, np.kron(np.diag(inputs), outputs) * t.sum(), rtol=1e-4, atol=1e-8
  )


class Doubled(nn.Conv):
  def __call__(self, x):
    return nn.relu(super().__call__(2 * x))


class Padded(nn.ConvTranspose):
  def __call__(self, x):
    return super().__call__(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))))


class Shifted(nn.LayerNorm):
  def __call__(self, x):
    return super().__call__(x) + 10.0


@pytest.mark.parametrize(
  "sub, base, around",
  [
    (Doubled(3, (3, 3), name="layer"), nn.Conv(3, (3, 3), name="layer"), lambda x: 2 * x),
    (
      Padded(3, (2, 2), (2, 2), name="layer"),
      nn.ConvTranspose(3, (2, 2), (2, 2), name="layer"),
      lambda x: jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))),
    ),
    (Shifted(name="layer"), nn.LayerNorm(name="layer"), lambda x: x),
  ],
)
def test_a_subclass_that_changes_inputs_and_outputs_has_the_factors_of_its_base(sub, base, around):
  x = np.random.default_rng(0).normal(size=(3, 4, 4, 2)).astype(np.float32)
  after = {Doubled: nn.relu, Shifted: lambda y: y + 10.0}.get(type(sub), lambda y: y)
  params = jax.jit(base.init)(jax.random.key(0), around(x))["params"]
  wide = lambda y: nn.tanh(y).reshape(len(y), -1)[:, :4]
  of_sub = lambda params, x: wide(sub.apply({"params": params}, x))
  of_base = lambda params, x: wide(after(base.apply({"params": params}, around(x))))
  options = dict(estimation="exact", norms="diagonal", likelihood="normal")
  found, wanted = (optim.kfac_factors(f, params, x, None, **options) for f in (of_sub, of_base))
  assert found
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  jax.tree.map(close, found, wanted)
