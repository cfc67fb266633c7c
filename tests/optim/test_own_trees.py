"""Trees of parameters, targets and numbers of other types than a stranger's tutorial has."""

import collections
from typing import Any, NamedTuple

from flax import nnx, struct
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from tests.optim.small_net import Net, close, loss, predict, problem
from tests.optim.test_own_layers import OwnDense


class Pair(NamedTuple):
  one: Any
  two: Any


@pytest.mark.thorough
def test_parameters_in_a_named_tuple_have_the_blocks_of_a_dictionary():
  params, batch = problem()

  def apply(p, b):
    x = nn.Dense(6).apply({"params": p.one}, b["x"])
    return nn.Dense(4).apply({"params": p.two}, nn.tanh(x)), b["y"]

  options, pair = dict(estimation="exact"), Pair(**params)
  found = optim.kfac_factors(apply, pair, batch, None, **options)
  close(found, optim.kfac_factors(predict, params, batch, None, **options))
  tx = optim.kfac(0.1, apply, pair, batch, **options)
  updates, _ = jax.jit(tx.update)(pair, tx.init(pair), pair, batch=batch)
  tx = optim.kfac(0.1, predict, params, batch, **options)
  expected, _ = jax.jit(tx.update)(params, tx.init(params), params, batch=batch)
  close(updates, Pair(**expected))


def test_parameters_may_be_a_dataclass():
  @struct.dataclass
  class Params:
    net: dict
    scale: jax.Array
    name: str = struct.field(pytree_node=False, default="")

  net = nn.Dense(3)
  x = jnp.cos(jnp.arange(20.0)).reshape(5, 4)
  inner = net.init(jax.random.key(0), x)["params"]
  params = Params({"layer": inner}, jnp.ones(()), "mine")
  predict = lambda p, x: net.apply({"params": p.net["layer"]}, x) * p.scale
  tx = optim.scale_by_kfac(predict, params, x, plain="scale", estimation="exact")
  updates, _ = tx.update(params, tx.init(params), params, batch=x, rng=jax.random.key(1))
  alone = lambda p, x: net.apply({"params": p}, x)
  tx = optim.scale_by_kfac(alone, inner, x, estimation="exact")
  wanted, _ = tx.update(inner, tx.init(inner), inner, batch=x, rng=jax.random.key(1))
  assert isinstance(updates, Params) and updates.name == "mine"
  jax.tree.map(np.testing.assert_array_equal, updates.net["layer"], wanted)


def test_targets_of_several_outputs_are_a_mapping_like_them():
  params, batch = problem()
  both = lambda p, b: dict.fromkeys("ab", predict(p, b)[0])
  labels = {"a": batch["y"], "b": (batch["y"] + 1) % 4}
  options = dict(likelihood=dict.fromkeys("ab", "categorical"), estimation="empirical")
  found = optim.kfac_factors(lambda p, b: (both(p, b), labels), params, batch, None, **options)
  errors = 2 * jax.nn.softmax(predict(params, batch)[0])
  errors = np.float64(errors) - np.eye(4)[labels["a"]] - np.eye(4)[labels["b"]]
  np.testing.assert_allclose(found["two"].outputs, errors.T @ errors / 8, rtol=1e-5)
  with pytest.raises(ValueError, match="predict returned a tuple that is not"):
    optim.kfac_factors(lambda p, b: (both(p, b), {"a": 1}), params, batch, None, **options)


def test_a_layer_of_ones_own_may_take_more_than_its_input():
  class Switched(OwnDense):
    @nn.compact
    def __call__(self, x, train, scale=1.0):
      return super().__call__(x)

  class Own(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(4, name="two")(nn.tanh(Switched(name="one")(x, True, scale=2.0)))

  params, batch = problem()
  own = lambda p, b: (Own().apply({"params": p}, b["x"]), b["y"])
  found, expected = (
    optim.kfac_factors(f, params, batch, None, estimation="exact") for f in (own, predict)
  )
  close(found, expected)


@pytest.mark.parametrize("make", [optim.soap, optim.shampoo, optim.kfac, optim.kfac_adam])
def test_complex_and_whole_numbers_are_named(make):
  params, batch = problem()
  given = () if make in (optim.soap, optim.shampoo) else (predict, params, batch)
  tx = make(0.1, *given)
  wave = params | {"wave": jnp.ones(3, jnp.complex64)}
  with pytest.raises(ValueError, match="wave is complex64; allowed: real numbers, such as its"):
    tx.init(wave)
  if given:
    with pytest.raises(ValueError, match="wave is complex64"):
      make(0.1, predict, wave, batch)
    with pytest.raises(ValueError, match="seen is int32, which has no gradient; leave it out"):
      make(0.1, predict, params | {"seen": jnp.ones(3, jnp.int32)}, batch)


def test_grafting_takes_the_length_of_complex_steps():
  tx = optim.graft(optax.sgd(1.0), optax.sgd(2.0))
  grads = {"w": jnp.complex64([3j, 4.0])}
  updates, state = tx.update(grads, tx.init(grads))
  close(updates["w"], -grads["w"])
  assert [float(norm["w"]) for norm in state.norms] == [5.0, 10.0]


_MODEL = dict(quadratic_model=True, damping_type="factored", factor_damping_period=5)
OPTIMIZERS = {
  "kfac by its model": lambda *model: optim.kfac(1.0, *model, inverse_period=5, **_MODEL),
  "adaptive kfac": lambda *model: optim.kfac(0.1, *model, adaptive_damping=True),
  "ekfac": lambda *model: optim.kfac(0.1, *model, eigenvalues="batch"),
  "kfac_adam": lambda *model: optim.kfac_adam(0.1, *model),
  "soap": lambda *model: optim.soap(0.1),
  "shampoo": lambda *model: optim.shampoo(0.1),
  "corrected shampoo": lambda *model: optim.shampoo(0.1, corrected=True),
  "grafted": lambda *model: optim.graft(optim.adam(0.1), optim.shampoo(0.1)),
  "muon": lambda *model: optim.muon(0.1),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.thorough
def test_types_stay_where_64_bits_are_on(name, dtype):
  params, batch = problem()
  with jax.enable_x64(True):
    params, batch["x"] = jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, batch["x"]))
    tx = optax.with_extra_args_support(OPTIMIZERS[name](predict, params, batch))
    value = lambda p: loss(p, batch)
    update = jax.jit(
      lambda s: tx.update(
        params, s, params, batch=batch, rng=jax.random.key(0), value_fn=value, value=value(params)
      )
    )
    state = tx.init(params)
    types = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    for _ in range(2):
      updates, new = update(state)
      assert types(updates) == types(params) and types(new) == types(state)
      state = new


def test_a_whole_fraction_needs_no_leading_axes():
  params, batch = problem()
  scaled = lambda p, b: (b["scale"] * Net().apply({"params": p}, b["x"]), b["y"])
  batch["scale"] = np.float32(2)
  whole, none = (
    optim.kfac(0.1, scaled, params, batch, estimation="exact", factor_fraction=f)
    for f in (1.0, None)
  )
  step = lambda tx: jax.jit(tx.update)(params, tx.init(params), params, batch=batch)[0]
  close(step(whole), step(none), rtol=0, atol=0)


def kernels():
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {"one": {"kernel": draw(4, 6), "bias": draw(6)}, "two": {"kernel": draw(6, 3)}}


@pytest.mark.parametrize("make", [optim.muon, optim.soap, optim.shampoo])
@pytest.mark.parametrize("box", [nnx.Param, lambda x: nn.Partitioned(x, (None,) * x.ndim)])
def test_boxes_of_flax_are_no_part_of_a_path(make, box):
  params, tx = kernels(), make(0.1)

  def steps(grads):
    state = tx.init(grads)
    for _ in range(2):
      updates, state = tx.update(grads, state, grads)
    return jax.tree.leaves(updates)

  boxed = jax.tree.map(box, params)
  boxed = nnx.State(boxed) if box is nnx.Param else boxed
  for found, expected in zip(steps(boxed), steps(params), strict=True):
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("make", [optim.muon, optim.soap, optim.shampoo])
def test_an_optimizer_of_nnx_takes_them(make):
  net = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(net, make(0.1), wrt=nnx.Param)
  before = np.asarray(net.kernel)
  for _ in range(2):  # the first update of SOAP and Shampoo is zero
    optimizer.update(net, nnx.grad(lambda net: net(jnp.ones((2, 4))).sum())(net))
  assert np.abs(np.asarray(net.kernel) - before).max() > 1e-3


def test_muon_needs_a_kernel():
  own = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
  with pytest.raises(ValueError, match="no kernel is left for Muon; the parameters are b, w: pass"):
    optim.muon(0.1).init(own)
  groups = optax.partition({"m": optim.muon(0.1), "a": optax.adam(0.1)}, {"w": "a", "b": "a"})
  groups.init(own)  # a group of none has none


@pytest.mark.parametrize("make", [optim.muon, optim.soap, optim.shampoo])
def test_stacks_that_are_none_are_told(make):
  params = {"net": {"kernel": jnp.ones((3, 4, 5))}}
  for stacked, told in (
    ({"kernel": 1}, "stacked has 'kernel', which is no parameter; they are net/kernel"),
    ({"net/kernel": 2}, r"stacked is 2 for net/kernel, of shape \(3, 4, 5\); allowed: axes before"),
    ([1], r"stacked is \[1\]; allowed: a mapping"),
  ):
    with pytest.raises(ValueError, match=told):
      make(0.1, stacked=stacked).init(params)
  hidden = optax.masked(make(0.1, stacked={"net/kernel": 1}), {"net": False, "own": True})
  hidden.init(params | {"own": {"kernel": jnp.ones((3, 4))}})


def test_two_parameters_of_one_path_are_refused():
  params = {"a": {"kernel": jnp.ones((3, 4))}, "a/kernel": jnp.ones((3, 4))}
  with pytest.raises(ValueError, match="two parameters have the path a/kernel; allowed: one"):
    optim.soap(0.1).init(params)


def test_exact_factors_of_examples_that_mix_are_right_in_the_mean():
  """Outputs of one node of a graph depend on its neighbours' rows."""
  params, batch = problem(4)
  adjacent = np.random.default_rng(1).uniform(size=(4, 4)).astype(np.float32)
  mixed = lambda p, b: adjacent @ predict(p, b)[0]
  options = dict(likelihood="normal", estimation="exact")
  one = lambda key: optim.kfac_factors(mixed, params, batch, key, **options)["two"]
  keys = jax.random.split(jax.random.key(0), 400)
  found = jax.jit(lambda keys: jax.tree.map(lambda x: x.mean(0), jax.lax.map(one, keys)))(keys)
  # An output of example r has the gradient adjacent[r, i] at row i, and the Fisher matrix 2 I.
  expected = 2 * np.square(adjacent, dtype=np.float64).sum() / 4 * np.eye(4)
  assert np.linalg.norm(found.outputs - expected) < 0.1 * np.linalg.norm(expected)
  hidden = np.tanh(batch["x"] @ params["one"]["kernel"] + params["one"]["bias"])
  rows = np.float64(np.concatenate([hidden, np.ones((4, 1))], axis=1))
  np.testing.assert_allclose(found.inputs, rows.T @ rows / 4, rtol=1e-4, atol=1e-6)


def test_a_batch_of_numpy_may_be_closed_over_by_jit():
  """Rows mapped over their second axis: the constant has to be moved there."""
  params, batch = problem()
  x = np.stack([batch["x"], -batch["x"]], axis=1)
  mapped = jax.vmap(lambda params, x: predict(params, batch | {"x": x})[0], (None, 1), 1)
  mean = lambda params, x: mapped(params, x).mean(axis=1)
  tx = optim.kfac(0.1, mean, params, x)
  step = lambda g, x: tx.update(g, tx.init(params), params, batch=x, rng=jax.random.key(0))[0]
  close(jax.jit(lambda g: step(g, x))(params), jax.jit(step)(params, x), rtol=1e-6)


def test_a_mask_may_part_the_parameters_of_a_normalisation():
  class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(3, name="head")(nn.LayerNorm(name="norm")(x))

  x = np.cos(np.arange(20, dtype=np.float32)).reshape(5, 4)
  params = Normed().init(jax.random.key(0), x)["params"]
  tx = optim.scale_by_kfac(lambda p, x: Normed().apply({"params": p}, x), params, x)
  mask = jax.tree.map(lambda _: True, params)
  mask["norm"]["bias"] = False
  tell = dict(batch=x, rng=jax.random.key(0), model_params=params)
  whole, _ = tx.update(params, tx.init(params), params, **tell)
  tx = optax.masked(tx, mask)
  parted, _ = tx.update(params, tx.init(params), params, **tell)
  close(parted, whole, rtol=1e-6)


def test_parameters_may_be_in_a_defaultdict():
  params, batch = problem()
  given = collections.defaultdict(dict, params)
  options = dict(estimation="exact")
  found = optim.kfac_factors(predict, given, batch, None, **options)
  close(found, optim.kfac_factors(predict, params, batch, None, **options))


@pytest.mark.parametrize("make", [optim.soap, optim.shampoo, optim.muon])
def test_a_parameter_may_be_a_number(make):
  params = {"kernel": jnp.ones((3, 2)), "temperature": 1.0}
  tx = make(0.1)
  updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
  assert jnp.shape(updates["temperature"]) == ()


@pytest.mark.parametrize("wrong", [dict(damping=1), dict(max_factor="8"), dict(plain=None)])
def test_a_look_at_blocks_and_factors_checks_its_options(wrong):
  params, batch = problem()
  allowed = (
    rf"kfac_\w+ has no option 'damping'; allowed: likelihood|{next(iter(wrong))} is .*; allowed"
  )
  with pytest.raises((TypeError, ValueError), match=allowed):
    optim.kfac_blocks(predict, params, batch, **wrong)
  with pytest.raises((TypeError, ValueError), match=allowed):
    optim.kfac_factors(predict, params, batch, None, **wrong)


def test_exact_labels_need_outputs_of_one_length():
  params, batch = problem()
  logits = lambda params, batch: predict(params, batch)[0]
  both = lambda *args: {"all": logits(*args), "half": logits(*args)[:4]}
  kinds = dict(likelihood=dict.fromkeys(("all", "half"), "categorical"), estimation="exact")
  with pytest.raises(ValueError, match=r"needs outputs of one length; they have \[4, 8\]"):
    optim.kfac_blocks(both, params, batch, **kinds)


@pytest.mark.parametrize(
  "name",
  [
    "kfac_muon",
    "ekfac batch",
    "kfac",
    "ekfac examples",
    "adaptive",
    "kfac_adam",
    "soap",
    "shampoo",
  ],
)
@pytest.mark.first(3)
def test_injected_numbers_of_float64_parameters_leave_the_state_s_types(name):
  """`optax.inject_hyperparams` makes all numbers as wide as the parameters."""
  with jax.enable_x64(True):
    params, batch = jax.tree.map(jnp.float64, problem()[0]), problem()[1]
    model = dict(predict=predict, params=params, batch=batch)
    options = {} if name in ("soap", "shampoo") else model
    extra = dict(batch=batch, rng=jax.random.key(0)) if options else {}
    options |= dict(eigenvalues=name.removeprefix("ekfac ")) if name.startswith("ek") else {}
    if name == "adaptive":
      options |= dict(quadratic_model=True, adaptive_damping=True)
      extra["value_fn"] = lambda params: loss(params, batch)
    make = getattr(optim, name, optim.kfac)
    tx = optax.inject_hyperparams(make, static_args=tuple(options))(0.1, **options)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(lambda s: tx.update(params, s, params, **extra), state)
  types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert types(after) == types(state) and types(updates) == types(params)
