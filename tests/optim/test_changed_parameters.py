"""Parameters that change between their tree and their layer: refused, plain, or seen in full."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.small_net import close, predict, problem

P = PartitionSpec


def test_parameters_used_outside_their_layer_are_named():
  class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
      layer = nn.Dense(6, name="one")
      return nn.tanh(layer(x)) @ layer.variables["params"]["kernel"].T

  x = problem()[1]["x"]
  params = jax.jit(Tied().init)(jax.random.key(0), x)["params"]
  tied = lambda p, x: Tied().apply({"params": p}, x)
  with pytest.raises(ValueError, match="one/kernel are also used outside of their layers"):
    optim.kfac_blocks(tied, params, x)
  assert {b.kind for b in optim.kfac_blocks(tied, params, x, plain="one/")} == {"gradient"}


def test_parameters_cast_inside_predict_are_refused():
  params, batch = problem()
  half = lambda p, b: predict(jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), b)
  tx = optim.scale_by_kfac(half, params, batch)
  with pytest.raises(ValueError, match="are cast to bfloat16 inside predict"):
    tx.update(params, tx.init(params), params, batch=batch, rng=jax.random.key(0))


class Normalised(nn.Module):
  """A layer whose kernel is divided by its largest singular value."""

  @nn.compact
  def __call__(self, x):
    x = nn.SpectralNorm(nn.Dense(6, name="one"))(x, update_stats=False)
    return nn.Dense(4, name="two")(nn.tanh(x))


def test_layers_that_take_no_companion_may_be_plain():
  x = np.ones((2, 5), np.float32)
  variables = jax.jit(Normalised().init)(jax.random.key(0), x)
  predict = lambda p, x: Normalised().apply({**variables, "params": p}, x)
  params = variables["params"]
  with pytest.raises(
    ValueError, match="predict fails .* but for layers that are listed in `plain`"
  ):
    optim.kfac_blocks(predict, params, x)
  kinds = {b.name: b.kind for b in optim.kfac_blocks(predict, params, x, plain="^one/")}
  assert kinds == {"one": "gradient", "two": "kronecker"}


class Reparametrised(nn.Module):
  """A layer whose kernel is another one's, as large as `scale` says."""

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(nn.WeightNorm(nn.Dense(6, name="one"))(x))
    return nn.Dense(4, name="two")(x)


def test_parameters_that_change_before_their_layer_are_refused_or_plain():
  x = np.ones((2, 5), np.float32)
  params = jax.jit(Reparametrised().init)(jax.random.key(0), x)["params"]
  of = lambda change: lambda p, x: Reparametrised().apply({"params": change(p)}, x)
  with pytest.raises(ValueError, match="the model changes one/kernel, one/bias before .* `plain`"):
    optim.kfac_blocks(of(lambda p: p), params, x, plain="scale")
  blocks = optim.kfac_blocks(of(lambda p: p), params, x, plain="scale|one")
  assert {b.name: b.kind for b in blocks}["two"] == "kronecker"
  threefold = of(lambda p: jax.tree.map(lambda a: 3 * a, p))
  with pytest.raises(ValueError, match="the model changes two/kernel, two/bias"):
    optim.kfac_blocks(threefold, params, x, plain="scale|one")


@pytest.mark.parametrize("cut", [lambda a: a[:, :3], lambda a: a[:3], lambda a: a.reshape(10, 3)])
def test_a_kernel_that_is_cut_is_told(cut):
  whole = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
  own = cut(whole)

  def predict(p, x):
    tree = {"kernel": p["kernel"]} if p["kernel"].shape == own.shape else jax.tree.map(cut_all, p)
    return nn.Dense(own.shape[1], use_bias=False).apply({"params": tree}, x)

  cut_all = lambda a: cut(a) if a.shape == whole.shape else a
  with pytest.raises(
    ValueError, match="the model cuts or reshapes parameters of .* list .* `plain`"
  ):
    optim.kfac_blocks(predict, {"kernel": whole}, np.ones((2, own.shape[0]), np.float32))


_CHANGES = {
  "threefold": lambda k: 3 * k,
  "mask": lambda k: jnp.where(k > 0, k, 0.0),
  "tril": jnp.tril,
  "clip": lambda k: jnp.clip(k, -0.1, 0.1),
  "square": jnp.square,
  "abs": jnp.abs,
  "softplus": jax.nn.softplus,
  "transpose": lambda k: k.T,
  "reverse": lambda k: k[::-1],
  "roll": lambda k: jnp.roll(k, 1, axis=0),
  "sort": lambda k: jnp.sort(k, axis=0),
  "set": lambda k: k.at[0].set(0.0),
  "cumsum": lambda k: jnp.cumsum(k, axis=0),
  "cast after": lambda k: jnp.sin(k).astype(jnp.float32)[:],
  "jitted": jax.jit(jnp.cos),
}


@pytest.mark.parametrize("change", _CHANGES)
@pytest.mark.first(3)
def test_a_kernel_that_is_computed_from_another_is_refused(change):
  x, model = np.ones((2, 5), np.float32), nn.Dense(5)
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]

  def predict(p, x):  # of the kernel alone, not of the companion beside it
    return model.apply({"params": {**p, "kernel": _CHANGES[change](p["kernel"])}}, x)

  with pytest.raises(ValueError, match="the model changes kernel, bias before .* `plain`"):
    optim.kfac_blocks(predict, params, x)


_SAME = {
  "cast": lambda p: jax.tree.map(lambda a: a.astype(jnp.float32), p),
  "jitted": jax.jit(lambda p: jax.tree.map(lambda a: a.astype(jnp.float32)[:], p)),
  "held": jax.lax.optimization_barrier,
}


@pytest.mark.parametrize("how", _SAME)
def test_a_kernel_may_be_cast_placed_or_taken_from_a_stack(how):
  x, model = np.ones((2, 5), np.float32), nn.Dense(5)
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  blocks = optim.kfac_blocks(lambda p, x: model.apply({"params": _SAME[how](p)}, x), params, x)
  assert [b.kind for b in blocks] == ["kronecker"]


def test_a_layer_taken_from_a_stack_by_hand_is_refused_or_seen():
  """Each of them a slice of one array: then statistics are those of each slice."""
  x, model = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32), nn.Dense(5)
  init = jax.jit(jax.vmap(model.init, (0, None)))
  params = init(jax.random.split(jax.random.key(0), 2), x)["params"]

  def predict(p, x):
    for i in range(2):
      x = nn.tanh(model.apply({"params": jax.tree.map(lambda a: a[i], p)}, x))
    return x

  @jax.jit
  def looped(p, x):
    one = lambda i, x: nn.tanh(model.apply({"params": jax.tree.map(lambda a: a[i], p)}, x))
    return jax.lax.fori_loop(0, 2, one, x)

  scanned = lambda p, x: jax.lax.scan(
    lambda x, p: (nn.tanh(model.apply({"params": p}, x)), None), x, p
  )[0]
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  put = lambda p: jax.lax.with_sharding_constraint(p, one)
  layer = lambda x, p: (nn.tanh(model.apply({"params": put(p)}, x)), None)
  placed = lambda p, x: jax.lax.scan(layer, x, p)[0]
  for of in (predict, looped, scanned, placed):  # an example has one row in each layer
    [block] = optim.kfac_blocks(of, params, x)
    assert (block.kind, block.stacked, block.tokens) == ("kronecker", (2,), 1)
    assert optim.stacked_axes(of, params, x) == {"kernel": 1, "bias": 1}


def test_a_kernel_that_is_changed_before_it_is_held_is_refused():
  x, model = np.ones((2, 5), np.float32), nn.Dense(5)
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  changed = lambda p: jax.lax.optimization_barrier({**p, "kernel": 3 * p["kernel"]})
  with pytest.raises(ValueError, match="the model changes kernel, bias before"):
    optim.kfac_blocks(lambda p, x: model.apply({"params": changed(p)}, x), params, x)


def test_a_tree_of_parameters_that_does_not_reach_apply_as_it_is():
  params, batch = problem()
  zeros = jax.tree.map(jnp.zeros_like, params)
  added = lambda p, b: predict(jax.tree.map(jnp.add, p, zeros), b)
  with pytest.raises(ValueError, match=r"predict fails \(ValueError: .*give the tree to apply as"):
    optim.kfac_blocks(added, params, batch)


@pytest.mark.parametrize("how", ["stop_gradient", "sharding"])
def test_parameters_may_pass_through_identities(how):
  params, batch = problem()
  expected = optim.kfac_factors(predict, params, batch, jax.random.key(0))
  whole = NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P())
  place = lambda p: jax.lax.with_sharding_constraint(p, whole)
  passed = {"stop_gradient": jax.lax.stop_gradient, "sharding": place}[how]
  if how == "stop_gradient":  # of parameters alone, as of a frozen part
    passed = lambda p: {
      **p,
      "one": {**p["one"], "kernel": jax.lax.stop_gradient(p["one"]["kernel"])},
    }
  found = optim.kfac_factors(lambda p, b: predict(passed(p), b), params, batch, jax.random.key(0))
  close(found, expected)
