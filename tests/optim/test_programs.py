"""Layers in loops, stacks and maps: how often they run, and where their parameters are stacked."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim


class Square(nn.Module):
  """A layer of one's own, of which K-FAC knows nothing."""

  @nn.compact
  def __call__(self, x):
    return x @ self.param("kernel", nn.initializers.lecun_normal(), (5, 5))


class Layer(nn.Module):
  own: bool = False

  @nn.compact
  def __call__(self, x, _=None):
    x = nn.tanh(nn.Dense(5, name="dense")(x))
    x = Square(name="own")(x) if self.own else x
    return nn.LayerNorm(name="norm")(x), None


class Net(nn.Module):
  """Three layers: a stack along `axis`, or for None one layer three times; then a recurrent one."""

  axis: int | None = 0
  wrap: str = ""
  own: bool = False

  @nn.compact
  def __call__(self, x):  # [batch, 6, 5]
    layer = {"": Layer, "remat": nn.remat(Layer), "jit": nn.jit(Layer)}[self.wrap]
    shared = dict(variable_broadcast="params", split_rngs={"params": False})
    stacked = dict(variable_axes={"params": self.axis}, split_rngs={"params": True})
    repeated = nn.scan(layer, length=3, **(shared if self.axis is None else stacked))
    x, _ = repeated(self.own, name="net")(x, None)
    x = nn.RNN(nn.SimpleCell(4), name="loop")(x[:, :, None].sum(2))
    return nn.Dense(3, name="head")(x)


def predict_of(net, how):
  """The same function of one batch, mapped over its examples in several ways."""
  whole = lambda params, batch: net.apply({"params": params}, batch)
  one = lambda params, x: whole(params, x[None])[0]
  return {
    "whole": whole,
    "jit": jax.jit(whole),
    "vmap": lambda params, batch: jax.vmap(lambda x: one(params, x))(batch),
    "map": lambda params, batch: jax.lax.map(lambda x: one(params, x), batch),
    "map of four": lambda params, batch: jax.lax.map(lambda x: one(params, x), batch, batch_size=4),
  }[how]


@functools.cache
def problem(net):
  x = np.random.default_rng(0).normal(size=(8, 6, 5)).astype(np.float32)
  return jax.jit(net.init)(jax.random.key(0), x)["params"], x


@pytest.mark.parametrize("how", ["whole", "jit", "vmap", "map", "map of four"])
@pytest.mark.parametrize("net", [Net(), Net(None), Net(wrap="remat"), Net(None, wrap="jit")])
@pytest.mark.first(3)
def test_tokens_are_those_that_the_factors_count(net, how):
  """ "published" multiplies the outputs' factor by them; they scale EK-FAC's moments of batches."""
  params, x = problem(net)
  predict = predict_of(net, how)
  tokens = {b.name: b.tokens for b in optim.kfac_blocks(predict, params, x) if b.tokens}
  repeats = 3 if net.axis is None else 1
  assert tokens == {"net/dense": 6 * repeats, "SimpleCell_0/h": 6, "SimpleCell_0/i": 6, "head": 6}
  factors = functools.partial(optim.kfac_factors, predict, params, x, jax.random.key(1))
  published, expand = (factors(token_averaging=name) for name in ("published", "expand"))
  for name, count in tokens.items():
    np.testing.assert_allclose(published[name].outputs, count * expand[name].outputs, rtol=1e-4)


@pytest.mark.parametrize("how", ["vmap", "map"])
def test_a_recurrent_layer_in_a_loop_over_examples_has_its_factors(how):
  """The body of `nn.RNN` is traced once more than it runs."""
  net = Net(None)
  params, x = problem(net)
  options = dict(estimation="exact", likelihood="normal", token_averaging="expand")
  found, wanted = (
    optim.kfac_factors(predict_of(net, of), params, x, None, **options) for of in (how, "whole")
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
  jax.tree.map(close, found, wanted)


def test_a_stack_along_another_axis_is_refused():
  params, x = problem(Net(axis=1))
  with pytest.raises(ValueError, match="net/dense is scanned over another axis than the first"):
    optim.kfac_blocks(predict_of(Net(axis=1), "whole"), params, x)


@pytest.mark.parametrize("make", [optim.muon, optim.soap, optim.shampoo])
def test_a_stack_has_the_steps_of_its_layers(make):
  """Kernels of own layers, biases and scales included, against each layer as a tree of its own."""
  net = Net(own=True)
  params, x = problem(net)
  stacked = optim.stacked_axes(predict_of(net, "whole"), params, x)
  names = ("dense/kernel", "dense/bias", "own/kernel", "norm/scale", "norm/bias")
  assert stacked == {f"net/{name}": 1 for name in names}
  grads = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), params)

  def steps(tx, params, grads):
    state = tx.init(params)
    for i in range(3):
      turned = jax.tree.map(lambda g: jnp.roll(g, i, -1) / (1 + i), grads)
      updates, state = tx.update(turned, state, params)
    return updates["net"]

  renewed = {} if make is optim.muon else dict(basis_period=1)  # in mid-run
  found = steps(make(0.1, stacked=stacked, **renewed), params, grads)
  for i in range(3):
    one = lambda tree: {"net": jax.tree.map(lambda p: p[i], tree["net"])}
    alone = steps(make(0.1, **renewed), one(params), one(grads))
    own = jax.tree.map(lambda p: p[i], found)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), own, alone)
