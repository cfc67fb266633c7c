"""Options and calls of optimizers that are refused in one line."""

import functools
import re

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from tests.optim.small_net import first, loss, predict, problem


def test_mistakes_of_update_are_one_line():
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  tx = optim.scale_by_kfac(predict, params, batch)
  with pytest.raises(ValueError, match="update needs params"):
    tx.update(grads, tx.init(params), batch=batch)
  with pytest.raises(ValueError, match='"sampled" needs the argument rng'):
    tx.update(grads, tx.init(params), params, batch=batch)
  mixed = optax.multi_transform({"a": tx, "b": optax.identity()}, {"one": "a", "two": "b"})
  with pytest.raises(ValueError, match="two/bias is hidden; .*model_params"):
    mixed.update(grads, mixed.init(params), params, batch=batch, rng=jax.random.key(0))
  with pytest.raises(TypeError, match="no option 'dampng'; allowed: .*damping, damping_type"):
    optim.kfac(0.1, predict, params, batch, dampng=1)
  with pytest.raises(ValueError, match="plain is 'layers_2', which matches no parameter"):
    optim.kfac(0.1, predict, params, batch, plain="layers_2")


@pytest.mark.parametrize(
  "option, told",
  [
    (dict(factor_period=2.5), "factor_period is 2.5; allowed: an integer"),
    (dict(momentum=-0.5), "momentum is -0.5; allowed: 0 to 0.99999"),
    (dict(norm_constraint=-1.0), "norm_constraint is -1.0; allowed: 0 or more"),
    (dict(max_factor=-1), "max_factor is -1; allowed: 1 or more"),
    (dict(factor_fraction=2.0), "factor_fraction is 2.0; allowed: 1e-06 to 1"),
    (dict(factor_fraction=0.7), "factor_fraction is 0.7; allowed: 1/n, such as 1, 0.5, 0.33"),
    (dict(damping="0.1"), "damping is '0.1'; allowed: a finite number"),
    (dict(momentum=None), "momentum is None; allowed: a finite number"),
    (dict(identity_start=None), "identity_start is None; allowed: True or False"),
    (dict(mesh="x"), "mesh is 'x'; allowed: a jax.sharding.Mesh, or None"),
    (dict(refresh=("eigh",)), "refresh is ('eigh',); allowed: one of the texts eigh, qr"),
    (
      dict(eigenvalues=["batch"]),
      "eigenvalues is ['batch']; allowed: one of the texts factors, batch, examples",
    ),
    (dict(quadratic_model=[False]), "quadratic_model is [False]; allowed: True or False"),
    (dict(damping=[0.1]), "damping is [0.1]; allowed: a finite number"),
    (dict(damping=np.array([0.1, 0.2])), "damping is array([0.1, 0.2]); allowed: a finite number"),
    (dict(factor_period=(5,)), "factor_period is (5,); allowed: an integer"),
    (dict(damping_type=None), "damping_type is None; allowed: one of the texts exact, factored"),
    (dict(plain=b"one"), "plain is b'one'; allowed: a regular expression, or a list of them"),
    (dict(full_factors=None), "full_factors is None; allowed: a regular expression, or a list"),
    (
      dict(precondition_dtype=jnp.int32),
      "precondition_dtype is 'int32'; allowed: float32, bfloat16",
    ),
    (dict(precondition_dtype=np.dtype("f2")), "precondition_dtype is 'float16'; allowed: float32"),
    (dict(damping=float), "damping is <class 'float'>; allowed: a finite number"),
    (dict(damping=np.str_("0.1")), "damping is '0.1'; allowed: a finite number"),
    (dict(damping_type=np.str_("exat")), "damping_type is 'exat'; allowed: exact, factored"),
    (dict(refresh=jnp.zeros(())), "refresh is Array(0., dtype=float32); allowed: one of the texts"),
    (
      dict(plain=np.array([["a"], ["b"]])),
      "plain is array([['a'], ['b']], dtype='<U1'); allowed: a",
    ),
    (
      dict(full_factors=jnp.zeros(())),
      "full_factors is Array(0., dtype=float32); allowed: a regular",
    ),
    (dict(part="x"), "part is 'x'; allowed: a function of (batch, n), or None"),
  ],
)
def test_options_out_of_range_are_refused_when_made(option, told):
  with pytest.raises(ValueError, match=re.escape(told)):
    optim.kfac(0.1, predict, *problem(), **option)


@pytest.mark.parametrize("rate", [float("nan"), -1.0, "x", [0.1], True])
def test_the_rate_of_a_norm_constraint_is_checked(rate):
  with pytest.raises(ValueError, match=re.escape(f"learning_rate is {rate!r}; allowed")):
    optim.scale_by_kfac(predict, *problem(), norm_constraint=0.1, learning_rate=rate)


_RATE = "learning_rate is {}; allowed: a number of 0 or"
_MASK = "decay_mask is 'kernel'; allowed: None, a tree of bools"


@pytest.mark.parametrize(
  "rate, options, told",
  [
    *((rate, {}, _RATE.format(repr(rate))) for rate in (None, "0.1", -0.1, float("nan"))),
    *((rate, {}, _RATE.format(rate.item())) for rate in (np.float64(-0.1), np.bool_(True))),
    (np.array("x"), {}, re.escape(_RATE.format("array('x', dtype='<U1')"))),
    (np.array([[1.0], [2.0]]), {}, re.escape(_RATE.format("array([[1.], [2.]])"))),
    (np.array([0.1]), {}, re.escape(_RATE.format("array([0.1])"))),
    (0.1, dict(decay_mask="kernel"), _MASK),
  ],
)
def test_a_wrong_rate_or_mask_is_refused_by_every_optimizer(rate, options, told):
  params, batch = problem()
  makers = (optim.sgd, optim.adam, optim.adamw, optim.lamb, optim.adagrad, optim.muon)
  makers = (*makers, optim.soap, optim.shampoo)
  of_a_model = (optim.kfac, optim.kfac_adam, optim.kfac_muon)
  for make in (*makers, *(functools.partial(f, predict=predict) for f in of_a_model)):
    given = options if make in makers else dict(params=params, batch=batch, **options)
    with pytest.raises(ValueError, match=told):
      make(rate, **given)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.dtype("float32")])
def test_a_type_may_be_given_as_one_of_numpy(dtype):
  options = [dict(precondition_dtype=d) for d in (dtype, jnp.dtype(dtype).name)]
  steps = [first(optim.scale_by_kfac(predict, *problem(), **o), *problem()) for o in options]
  jax.tree.map(np.testing.assert_array_equal, *steps)


@pytest.mark.parametrize("wrong", [3, b"x", np.ones(3)])
def test_dimension_numbers_that_are_none_are_refused(wrong):
  told = re.escape(f"dimension_numbers is {wrong!r}; allowed: None, a tree of")
  with pytest.raises(ValueError, match=told):
    optim.muon(0.1, dimension_numbers=wrong)


def test_parameters_of_another_model_are_named():
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  for tx in (
    optim.kfac(0.1, predict, params, batch),
    optim.kfac_adam(0.1, predict, params, batch),
    optim.kfac_muon(0.1, predict, params, batch),
  ):
    with pytest.raises(ValueError, match="the parameters have params/one/bias, which the model"):
      tx.init({"params": params})
    for wrong, told in (
      ({"one": grads["one"]}, "the gradients lack two"),
      (jax.tree.map(jnp.transpose, grads), r"one/kernel has shape \(6, 5\); allowed: \(5, 6\)"),
    ):
      with pytest.raises(ValueError, match=told):
        tx.update(wrong, tx.init(params), params, batch=batch, rng=jax.random.key(0))


def test_outputs_without_gradients_are_refused():
  params, batch = problem()
  rounded = lambda params, batch: predict(params, batch)[0].astype(jnp.int32)
  with pytest.raises(ValueError, match="the outputs are int32; allowed: floats"):
    optim.scale_by_kfac(rounded, params, batch)


def test_a_predict_without_its_parameters_or_layers_is_told():
  params, batch = problem()
  with pytest.raises(ValueError, match="outputs of predict do not depend on params"):
    optim.kfac(0.1, lambda p, b: predict(params, b), params, batch)
  own = {"w": jnp.ones((5, 4)), "b": jnp.ones(4)}
  with pytest.raises(ValueError, match="predict calls no layer of Flax Linen .* or take soap"):
    optim.kfac(0.1, lambda p, b: b["x"] @ p["w"] + p["b"], own, batch)


@pytest.mark.parametrize("likelihood", ["normal", "bernoulli"])
def test_targets_that_would_broadcast_are_refused(likelihood):
  model, x, t = nn.Dense(1), jnp.ones((8, 3)), jnp.ones(8)
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  both = lambda p, b: (model.apply({"params": p}, b[0]), b[1])
  options = dict(likelihood=likelihood, estimation="empirical")
  with pytest.raises(ValueError, match=r"targets have shape \(8,\) for outputs \(8, 1\)"):
    optim.kfac_factors(both, params, (x, t), jax.random.key(0), **options)


def test_states_of_nnx_are_refused_by_name():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model)
  predict = lambda params, x: nnx.merge(graph, params)(x)
  with pytest.raises(ValueError, match="State of flax.nnx; K-FAC sees layers of Linen alone"):
    optim.kfac(0.1, predict, params, jnp.zeros((2, 3)))


def test_boxes_of_flax_are_refused_by_their_name():
  x, init = np.ones((2, 5), np.float32), nn.initializers.lecun_normal()
  model = nn.Dense(4, kernel_init=nn.with_partitioning(init, (None, "model")))
  params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
  predict = lambda p, x: model.apply({"params": p}, x)
  with pytest.raises(ValueError, match="boxes of Flax .*; pass nn.unbox"):
    optim.kfac_blocks(predict, params, x)
  [block] = optim.kfac_blocks(predict, nn.unbox(params), x)
  assert block.kind == "kronecker"
