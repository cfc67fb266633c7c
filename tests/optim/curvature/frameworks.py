"""The same six functions of the same weights in Linen, NNX, Equinox, Haiku and plain JAX.

Each framework has functions `name(weights) -> (predict, params)`, by the name of the model. Weights
are float64 [d_in, d_out] and [d_out] by layer; a convolution has rows in the order (height, width,
channel).
"""

import equinox as eqx
from flax import nnx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

HEADS = 2
# Rows in, columns out, of the layers of each model; (a, b, c, d) is a convolution's kernel.
SIZES = {
  "attention": {"query": (4, 4), "key": (4, 4), "value": (4, 4), "out": (4, 4), "head": (4, 3)},
  "convnet": {"one": (3, 3, 2, 3), "two": (2, 2, 3, 4), "head": (16, 3)},
  "tied": {"table": (7, 5), "hidden": (5, 5)},
  "scanned": {"0": (5, 5), "1": (5, 5), "head": (5, 3)},
  "recurrent": {"in": (3, 4), "state": (4, 4), "head": (4, 3)},
  "pinn": {"one": (2, 6), "two": (6, 5), "three": (5, 1)},
}
UNBIASED = {"table", "state"}
SHAPES = {
  "attention": (3, 4),
  "convnet": (8, 8, 2),
  "tied": (4,),
  "scanned": (5,),
  "recurrent": (5, 3),
  "pinn": (2,),
}
LIKELIHOODS = {"pinn": "normal"}


def weights(model):
  """For each layer its matrix, and its bias where it has one."""
  rng = np.random.default_rng(0)
  made = {}
  for name, sizes in SIZES[model].items():
    d_in, d_out = int(np.prod(sizes[:-1])), sizes[-1]
    made[name] = [rng.normal(size=(d_in, d_out)) / np.sqrt(d_in) + 0.1]
    if name not in UNBIASED:
      made[name].append(rng.normal(size=d_out) / 2)
  return made


def batch(model, examples=3):
  rng = np.random.default_rng(1)
  shape = (examples, *SHAPES[model])
  return rng.integers(0, 7, shape) if model == "tied" else rng.normal(size=shape).astype(np.float32)


def residual(u, x):
  """The Laplacian of u at x, by forward mode twice for each direction, and u^2."""
  total = u(x) ** 2
  for direction in np.eye(len(x), dtype=np.float32):
    slope = lambda x: jax.jvp(u, (x,), (direction,))[1]
    total = total + jax.jvp(slope, (x,), (direction,))[1]
  return total


def narrow(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def filled(shapes, found):
  """A tree of these shapes from arrays by path; each is used once."""
  rest = dict(found)

  def one(path, like):
    array = jnp.asarray(
      rest.pop(jax.tree_util.keystr(path, simple=True, separator="/")), like.dtype
    )
    assert array.shape == like.shape, (path, array.shape, like.shape)
    return array

  full = jax.tree_util.tree_map_with_path(one, shapes)
  assert not rest
  return full


class Plain:
  """Functions of a dict of arrays."""

  @staticmethod
  def _of(function, weights):
    def layer(p, name, a):
      kernel, *bias = p[name]
      return a @ kernel + bias[0] if bias else a @ kernel

    one = lambda p, x: function(lambda name, a: layer(p, name, a), p, x)
    return (lambda p, x: jax.vmap(lambda x: one(p, x))(x)), narrow(weights)

  def attention(self, w):
    def of(layer, p, x):
      q, k, v = (layer(n, x).reshape(len(x), HEADS, -1) for n in ("query", "key", "value"))
      scores = jnp.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
      mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(len(x), -1)
      return layer("head", layer("out", mixed).mean(0))

    return self._of(of, w)

  def convnet(self, w):
    def predict(p, x):
      conv = lambda x, n, stride, padding: (
        p[n][1]
        + jax.lax.conv_general_dilated(
          x, p[n][0], (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
      )
      x = jnp.tanh(conv(x, "one", 2, "SAME"))
      x = jnp.tanh(conv(x, "two", 2, "VALID"))
      return x.reshape(len(x), -1) @ p["head"][0] + p["head"][1]

    return predict, narrow(
      {n: [w[n][0].reshape(s), *w[n][1:]] for n, s in SIZES["convnet"].items()}
    )

  def tied(self, w):
    def of(layer, p, ids):
      table = p["table"][0]
      return jnp.tanh(layer("hidden", table[ids])).mean(0) @ table.T

    return self._of(of, w)

  def scanned(self, w):
    stack = [jnp.stack(pair) for pair in zip(w["0"], w["1"])]
    step = lambda x, p: (jnp.tanh(x @ p[0] + p[1]), None)
    of = lambda layer, p, x: layer("head", jax.lax.scan(step, x, tuple(p["stack"]))[0])
    return self._of(of, {"stack": stack, "head": w["head"]})

  def recurrent(self, w):
    def of(layer, p, x):
      step = lambda h, x: (jnp.tanh(layer("in", x) + layer("state", h)), None)
      return layer("head", jax.lax.scan(step, jnp.zeros(4), x)[0])

    return self._of(of, w)

  def pinn(self, w):
    def of(layer, p, x):
      u = lambda x: layer("three", jnp.tanh(layer("two", jnp.tanh(layer("one", x)))))
      return residual(u, x)

    return self._of(of, w)


def _kernels(weights, kernel, bias, scope="", sizes=None):
  """Arrays by path "layer/kernel" and "layer/bias"."""
  found = {}
  for n, (matrix, *rest) in weights.items():
    found[f"{scope}{n}/{kernel}"] = matrix if sizes is None else matrix.reshape(sizes[n])
    found |= {f"{scope}{n}/{bias}": b for b in rest}
  return found


class Linen:
  """Modules with setup in `__call__`."""

  @staticmethod
  def _of(function, found, model):
    class Net(nn.Module):
      @nn.compact
      def __call__(self, x):
        return function(x)

    net, x = Net(), batch(model)
    shapes = jax.eval_shape(net.init, jax.random.key(0), x)["params"]
    return (lambda p, x: net.apply({"params": p}, x)), filled(shapes, found)

  def attention(self, w):
    found = _of_heads(w, "layer/")
    attend = lambda: nn.MultiHeadDotProductAttention(num_heads=HEADS, name="layer")
    of = lambda x: nn.Dense(3, name="head")(attend()(x).mean(1))
    return self._of(of, found, "attention")

  def convnet(self, w):
    def of(x):
      x = jnp.tanh(nn.Conv(3, (3, 3), strides=2, name="one")(x))
      x = jnp.tanh(nn.Conv(4, (2, 2), strides=2, padding="VALID", name="two")(x))
      return nn.Dense(3, name="head")(x.reshape(len(x), -1))

    return self._of(of, _kernels(w, "kernel", "bias", sizes=SIZES["convnet"]), "convnet")

  def tied(self, w):
    def of(ids):
      table = nn.Embed(7, 5, name="table")
      return table.attend(jnp.tanh(nn.Dense(5, name="hidden")(table(ids))).mean(1))

    found = {"table/embedding": w["table"][0]} | _kernels({"hidden": w["hidden"]}, "kernel", "bias")
    return self._of(of, found, "tied")

  def scanned(self, w):
    class Block(nn.Module):
      @nn.compact
      def __call__(self, x, _):
        return jnp.tanh(nn.Dense(5, name="inner")(x)), None

    def of(x):
      many = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=2)(name="stack")
      return nn.Dense(3, name="head")(many(x, None)[0])

    stack = [np.stack(pair) for pair in zip(w["0"], w["1"])]
    return self._of(
      of, _kernels({"stack/inner": stack, "head": w["head"]}, "kernel", "bias"), "scanned"
    )

  def recurrent(self, w):
    def of(x):
      return nn.Dense(3, name="head")(nn.RNN(nn.SimpleCell(4, name="cell"))(x)[:, -1])

    own = {"cell/i": w["in"], "cell/h": w["state"], "head": w["head"]}
    return self._of(of, _kernels(own, "kernel", "bias"), "recurrent")

  def pinn(self, w):
    class Net(nn.Module):
      @nn.compact
      def __call__(self, x):
        x = jnp.tanh(nn.Dense(5, name="two")(jnp.tanh(nn.Dense(6, name="one")(x))))
        return nn.Dense(1, name="three")(x)

    shapes = jax.eval_shape(Net().init, jax.random.key(0), batch("pinn"))["params"]
    u = lambda p: lambda x: Net().apply({"params": p}, x)
    predict = lambda p, x: jax.vmap(lambda x: residual(u(p), x))(x)
    return predict, filled(shapes, _kernels(w, "kernel", "bias"))


def _of_heads(w, scope):
  """The layers of Flax's attention, which keeps an axis of heads."""
  found = _kernels({"head": w["head"]}, "kernel", "bias")
  for n in ("query", "key", "value"):
    found[f"{scope}{n}/kernel"] = w[n][0].reshape(4, HEADS, -1)
    found[f"{scope}{n}/bias"] = w[n][1].reshape(HEADS, -1)
  found[f"{scope}out/kernel"] = w["out"][0].reshape(HEADS, -1, 4)
  return found | {f"{scope}out/bias": w["out"][1]}


class Nnx:
  """Graphs of modules, split into a graph and the state of `nnx.Param`."""

  @staticmethod
  def _of(make, function, found):
    model = make(nnx.Rngs(0))
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    state = filled(nnx.to_pure_dict(state), found)
    return (lambda p, x: function(nnx.merge(graph, p, rest, copy=True), x)), state

  @staticmethod
  def _layers(model, skip=()):
    own = {n: s for n, s in SIZES[model].items() if n not in skip}
    linear = lambda n, s, rngs: nnx.Linear(*s, use_bias=n not in UNBIASED, rngs=rngs)

    class Net(nnx.Module):
      def __init__(self, rngs):
        for n, s in own.items():
          setattr(self, n, linear(n, s, rngs))

    return Net

  def attention(self, w):
    class Net(nnx.Module):
      def __init__(self, rngs):
        self.layer = nnx.MultiHeadAttention(HEADS, 4, decode=False, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    return self._of(Net, lambda m, x: m.head(m.layer(x).mean(1)), _of_heads(w, "layer/"))

  def convnet(self, w):
    class Net(nnx.Module):
      def __init__(self, rngs):
        self.one = nnx.Conv(2, 3, (3, 3), strides=2, rngs=rngs)
        self.two = nnx.Conv(3, 4, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    of = lambda m, x: m.head(jnp.tanh(m.two(jnp.tanh(m.one(x)))).reshape(len(x), -1))
    return self._of(Net, of, _kernels(w, "kernel", "bias", sizes=SIZES["convnet"]))

  def tied(self, w):
    class Net(nnx.Module):
      def __init__(self, rngs):
        self.table = nnx.Embed(7, 5, rngs=rngs)
        self.hidden = nnx.Linear(5, 5, rngs=rngs)

    of = lambda m, ids: m.table.attend(jnp.tanh(m.hidden(m.table(ids))).mean(1))
    found = {"table/embedding": w["table"][0]} | _kernels({"hidden": w["hidden"]}, "kernel", "bias")
    return self._of(Net, of, found)

  def scanned(self, w):
    class Net(nnx.Module):
      def __init__(self, rngs):
        one = lambda rngs: nnx.Linear(5, 5, rngs=rngs)
        self.stack = nnx.split_rngs(splits=2)(nnx.vmap(one))(rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)

    step = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    stack = [np.stack(pair) for pair in zip(w["0"], w["1"])]
    own = _kernels({"stack": stack, "head": w["head"]}, "kernel", "bias")
    return self._of(Net, lambda m, x: m.head(step(x, m.stack)), own)

  def recurrent(self, w):
    """`nnx.RNN`; the cell's bias, of the layer of the state, goes to that of the input."""

    class Net(nnx.Module):
      def __init__(self, rngs):
        cell = nnx.SimpleCell(3, 4, rngs=rngs)
        cell.dense_i = nnx.Linear(3, 4, rngs=rngs)
        cell.dense_h = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.net, self.head = nnx.RNN(cell, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    own = {"net/cell/dense_i": w["in"], "net/cell/dense_h": w["state"], "head": w["head"]}
    return self._of(Net, lambda m, x: m.head(m.net(x)[:, -1]), _kernels(own, "kernel", "bias"))

  def pinn(self, w):
    u = lambda m: lambda x: m.three(jnp.tanh(m.two(jnp.tanh(m.one(x)))))
    of = lambda m, x: jax.vmap(lambda x: residual(u(m), x))(x)
    return self._of(self._layers("pinn"), of, _kernels(w, "kernel", "bias"))


class Equinox:
  """Pytrees of modules for one example; kernels are [out, in]."""

  @staticmethod
  def _of(model, weights, function):
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    params = filled(arrays, weights)
    over = lambda p, x: jax.vmap(lambda x: function(eqx.combine(p, rest), x))(x)
    return over, params

  @staticmethod
  def _linear(n, sizes):
    return eqx.nn.Linear(*sizes, use_bias=n not in UNBIASED, key=jax.random.key(0))

  def _dict(self, model, w, function):
    layers = {n: self._linear(n, s) for n, s in SIZES[model].items()}
    return self._of(layers, _kernels(_turned(w), "weight", "bias"), function)

  def attention(self, w):
    options = dict.fromkeys("query key value output".split(), True)
    attend = eqx.nn.MultiheadAttention(
      HEADS, 4, key=jax.random.key(0), **{f"use_{n}_bias": True for n in options}
    )
    model = {"layer": attend, "head": self._linear("head", (4, 3))}
    t = _turned(w)
    own = {f"layer/{n}_proj": t[n] for n in ("query", "key", "value")}
    own |= {"layer/output_proj": t["out"], "head": t["head"]}
    of = lambda m, x: m["head"](m["layer"](x, x, x).mean(0))
    return self._of(model, _kernels(own, "weight", "bias"), of)

  def convnet(self, w):
    key = jax.random.key(0)
    model = {
      "one": eqx.nn.Conv2d(2, 3, 3, 2, padding="SAME", key=key),
      "two": eqx.nn.Conv2d(3, 4, 2, 2, key=key),
      "head": self._linear("head", (16, 3)),
    }
    own = {}
    for n in ("one", "two"):
      own[f"{n}/weight"] = w[n][0].reshape(SIZES["convnet"][n]).transpose(3, 2, 0, 1)
      own[f"{n}/bias"] = w[n][1].reshape(-1, 1, 1)
    own |= _kernels({"head": _turned(w)["head"]}, "weight", "bias")

    def of(m, x):
      x = jnp.tanh(m["two"](jnp.tanh(m["one"](x.transpose(2, 0, 1)))))
      return m["head"](x.transpose(1, 2, 0).ravel())

    return self._of(model, own, of)

  def tied(self, w):
    key = jax.random.key(0)
    model = {"table": eqx.nn.Embedding(7, 5, key=key), "hidden": self._linear("hidden", (5, 5))}
    shared = eqx.nn.Shared(
      (model["table"], eqx.nn.Linear(5, 7, use_bias=False, key=key)),
      where=lambda pair: pair[1].weight,
      get=lambda pair: pair[0].weight,
    )

    def of(m, ids):
      table, head = m["tied"]()
      return head(jnp.tanh(jax.vmap(m["hidden"])(jax.vmap(table)(ids))).mean(0))

    own = {"tied/pytree/0/weight": w["table"][0]}
    own |= _kernels({"hidden": _turned(w)["hidden"]}, "weight", "bias")
    return self._of({"tied": shared, "hidden": model["hidden"]}, own, of)

  def scanned(self, w):
    many = eqx.filter_vmap(lambda key: eqx.nn.Linear(5, 5, key=key))
    model = {
      "stack": many(jax.random.split(jax.random.key(0))),
      "head": self._linear("head", (5, 3)),
    }
    t = _turned(w)
    stack = [np.stack(pair) for pair in zip(t["0"], t["1"])]

    def of(m, x):
      arrays, rest = eqx.partition(m["stack"], eqx.is_array)
      step = lambda x, layer: (jnp.tanh(eqx.combine(layer, rest)(x)), None)
      return m["head"](jax.lax.scan(step, x, arrays)[0])

    return self._of(model, _kernels({"stack": stack, "head": t["head"]}, "weight", "bias"), of)

  def recurrent(self, w):
    def of(m, x):
      step = lambda h, x: (jnp.tanh(m["in"](x) + m["state"](h)), None)
      return m["head"](jax.lax.scan(step, jnp.zeros(4), x)[0])

    return self._dict("recurrent", w, of)

  def pinn(self, w):
    u = lambda m: lambda x: m["three"](jnp.tanh(m["two"](jnp.tanh(m["one"](x)))))
    return self._dict("pinn", w, lambda m, x: residual(u(m), x))


def _turned(weights):
  return {n: [matrix.T, *bias] for n, (matrix, *bias) in weights.items()}


class Haiku:
  """Functions behind `hk.transform`."""

  @staticmethod
  def _of(function, found, model):
    net = hk.without_apply_rng(hk.transform(function))
    shapes = jax.eval_shape(net.init, jax.random.key(0), batch(model))
    return net.apply, filled(shapes, found)

  def attention(self, w):
    def of(x):
      attend = hk.MultiHeadAttention(HEADS, 2, w_init=hk.initializers.Constant(0), name="layer")
      return hk.Linear(3, name="head")(attend(x, x, x).mean(1))

    own = {f"layer/{n}": w[n] for n in ("query", "key", "value")}
    own |= {"layer/linear": w["out"], "head": w["head"]}
    return self._of(of, _kernels(own, "w", "b"), "attention")

  def convnet(self, w):
    def of(x):
      x = jnp.tanh(hk.Conv2D(3, 3, stride=2, name="one")(x))
      x = jnp.tanh(hk.Conv2D(4, 2, stride=2, padding="VALID", name="two")(x))
      return hk.Linear(3, name="head")(hk.Flatten()(x))

    return self._of(of, _kernels(w, "w", "b", sizes=SIZES["convnet"]), "convnet")

  def tied(self, w):
    def of(ids):
      table = hk.Embed(7, 5, name="table")
      h = jnp.tanh(hk.Linear(5, name="hidden")(table(ids))).mean(1)
      return h @ table.embeddings.T

    found = {"table/embeddings": w["table"][0]} | _kernels({"hidden": w["hidden"]}, "w", "b")
    return self._of(of, found, "tied")

  def scanned(self, w):
    def of(x):
      stack = hk.experimental.layer_stack(2)(lambda x: jnp.tanh(hk.Linear(5, name="inner")(x)))
      return hk.Linear(3, name="head")(stack(x))

    stack = [np.stack(pair) for pair in zip(w["0"], w["1"])]
    own = {"__layer_stack_no_per_layer/inner": stack, "head": w["head"]}
    return self._of(of, _kernels(own, "w", "b"), "scanned")

  def recurrent(self, w):
    class Cell(hk.RNNCore):
      def __call__(self, x, h):
        h = jnp.tanh(hk.Linear(4, name="in")(x) + hk.Linear(4, False, name="state")(h))
        return h, h

      def initial_state(self, batch_size):
        return jnp.zeros((batch_size, 4))

    def of(x):
      cell = Cell(name="cell")
      _, h = hk.dynamic_unroll(cell, x, cell.initial_state(len(x)), time_major=False)
      return hk.Linear(3, name="head")(h)

    own = {"cell/in": w["in"], "cell/state": w["state"], "head": w["head"]}
    return self._of(of, _kernels(own, "w", "b"), "recurrent")

  def pinn(self, w):
    def net(x):
      x = jnp.tanh(hk.Linear(5, name="two")(jnp.tanh(hk.Linear(6, name="one")(x))))
      return hk.Linear(1, name="three")(x)

    apply, params = self._of(net, _kernels(w, "w", "b"), "pinn")
    predict = lambda p, x: jax.vmap(lambda x: residual(lambda x: apply(p, x), x))(x)
    return predict, params


FRAMEWORKS = {"plain": Plain, "linen": Linen, "nnx": Nnx, "equinox": Equinox, "haiku": Haiku}


def build(framework, model):
  """predict, params and batch of a model."""
  return (*getattr(FRAMEWORKS[framework](), model)(weights(model)), batch(model))
