"""K-FAC as a stranger would use it: own models, own transformations, mistakes."""

import functools
import re

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

from mixer_jax import optim

P = PartitionSpec


class Net(nn.Module):
  """Two dense layers, 4 classes."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(4, name="two")(nn.tanh(nn.Dense(6, name="one")(x)))


def problem(batch_size=8):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(batch_size, 5)).astype(np.float32)
  batch = {"x": x, "y": rng.integers(0, 4, batch_size)}
  return jax.tree.map(lambda x: x, _params()), batch


@functools.cache
def _params():
  return jax.jit(Net().init)(jax.random.key(0), np.zeros((1, 5), np.float32))["params"]


def predict(params, batch):
  return Net().apply({"params": params}, batch["x"]), batch["y"]


def loss(params, batch):
  return optax.softmax_cross_entropy_with_integer_labels(*predict(params, batch)).mean()


def close(a, b, rtol=1e-5, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def first(tx, params, batch, **extra):
  def update(params, batch):
    grads = jax.grad(loss)(params, batch)
    return tx.update(grads, tx.init(params), params, batch=batch, **extra)[0]

  return jax.jit(update)(params, batch)


EXACT = dict(estimation="exact", damping=1e-2)


@pytest.mark.thorough
def test_an_example_batch_of_any_size_will_do():
  params, batch = problem()
  updates = [
    first(
      optim.kfac(0.1, predict, params, jax.tree.map(lambda x, n=n: x[:n], batch), **EXACT),
      params,
      batch,
    )
    for n in (1, 2, 8)
  ]
  close(updates[0], updates[2], rtol=0)
  close(updates[1], updates[2], rtol=0)


@pytest.mark.thorough
def test_a_ragged_last_batch_is_a_batch():
  params, batch = problem()
  last = jax.tree.map(lambda x: x[:3], batch)
  tx, own = (optim.kfac(0.1, predict, params, b, **EXACT) for b in (batch, last))
  close(first(tx, params, last), first(own, params, last), rtol=0)


@pytest.mark.thorough
def test_a_mesh_of_explicit_axes():
  params, batch = problem()
  tx = optim.kfac(0.1, predict, params, batch, **EXACT)
  expected = first(tx, params, batch)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
  spread = jax.device_put(batch, NamedSharding(mesh, P("data")))
  whole = jax.device_put(params, NamedSharding(mesh, P()))
  close(first(tx, whole, spread), expected, rtol=1e-4)
  with jax.set_mesh(mesh):
    close(first(tx, whole, spread), expected, rtol=1e-4)
  params["wide"] = jnp.ones((8, 2))
  split = params | {"wide": jax.device_put(params["wide"], NamedSharding(mesh, P("data")))}
  with pytest.raises(
    ValueError, match="wide is split over explicit axes of a mesh, float32.8@data"
  ):
    optim.soap(0.1).init(split)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  split = params | {"wide": jax.device_put(params["wide"], NamedSharding(mesh, P("data")))}
  soap = optim.soap(0.1)
  jax.jit(soap.update)(split, soap.init(split), split)


def mean_gradient(params, batch):
  """In a checked shard_map JAX adds up the gradients of parameters that all devices share."""
  grads = jax.grad(loss)(params, batch)
  share = lambda g: g / jax.lax.axis_size("data")
  varies = getattr(jax.typeof(jax.tree.leaves(grads)[0]), "vma", ()) or ()
  return jax.lax.pmean(grads, "data") if "data" in varies else jax.tree.map(share, grads)


MANUAL = {
  "kfac": EXACT,
  "kfac_adam": dict(estimation="exact", eps=1e-3),  # Adam's first step has signs of roundings
  "kfac_muon": dict(estimation="exact", eps=1e-3),
  "kfac ekfac of batches": dict(EXACT, eigenvalues="batch"),
  "kfac ekfac of examples": dict(EXACT, eigenvalues="examples"),
}


@pytest.mark.parametrize("how", ["checked", "unchecked", "pmap"])
@pytest.mark.parametrize("name", MANUAL)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.thorough
def test_manual_axes(how, name, weighted):
  weigh = lambda p, b: (*predict(p, b), b["weights"])
  make = getattr(optim, name.split()[0])
  make = functools.partial(make, 0.1, weigh if weighted else predict, **MANUAL[name])
  params, batch = problem()
  batch["weights"] = np.float32([1, 0, 0.5, 2, 1, 1, 0, 1])
  expected = first(make(params, batch), params, batch)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

  def update(axis_name):
    tx = make(params, batch, axis_name=axis_name)

    def step(params, state, batch):
      checked = how == "checked"
      grads = mean_gradient(params, batch) if checked else jax.lax.pmean(
        jax.grad(loss)(params, batch), "data"
      )  # fmt: skip
      return tx.update(grads, state, params, batch=batch)[0]

    if how == "pmap":
      shares = jax.tree.map(lambda x: x.reshape(8, 1, *x.shape[1:]), batch)
      found = jax.pmap(step, "data", in_axes=(None, None, 0))(params, tx.init(params), shares)
      return jax.tree.map(lambda x: x[5], found)
    specs = dict(in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=how == "checked")
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs))(params, tx.init(params), batch)

  close(update("data"), expected, rtol=1e-3, atol=5e-5)  # EK-FAC: 2e-5 on an AMD EPYC
  with pytest.raises(ValueError, match="inside shard_map or pmap over data; name the axes"):
    update(None)


@pytest.mark.parametrize("eigenvalues", ["factors", "batch"])
def test_copies_of_a_batch_on_a_second_axis_do_not_count(eigenvalues):
  params, batch = problem()
  make = functools.partial(
    optim.scale_by_kfac, predict, params, batch, **EXACT, eigenvalues=eigenvalues
  )
  expected = first(make(), params, batch)
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

  def update(axis_name, checked=True):
    tx, grads = make(axis_name=axis_name), jax.grad(loss)(params, batch)
    step = lambda batch: tx.update(grads, tx.init(params), params, batch=batch)[0]
    specs = dict(in_specs=P("data"), out_specs=P(), check_vma=checked)
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs))(batch)

  close(update("data"), expected, rtol=1e-3, atol=1e-5)
  both = ("data", "model")
  with pytest.raises(ValueError, match="axis_name has model, over which.*allowed: data"):
    update(both)
  if eigenvalues == "factors":
    close(update(both, checked=False), expected, rtol=1e-3, atol=1e-5)
  else:
    with pytest.raises(ValueError, match="over the axes data, model needs .*check_vma=True"):
      update(both, checked=False)


def test_a_batch_over_two_axes_of_vmap_counts_whole():
  params, batch = problem()
  options = dict(EXACT, eigenvalues="batch")
  expected = first(optim.scale_by_kfac(predict, params, batch, **options), params, batch)
  tx = optim.scale_by_kfac(predict, params, batch, **options, axis_name=("one", "two"))
  grads = jax.grad(loss)(params, batch)
  step = lambda batch: tx.update(grads, tx.init(params), params, batch=batch)[0]
  spread = jax.vmap(jax.vmap(step, axis_name="two"), axis_name="one")
  found = jax.jit(spread)(jax.tree.map(lambda x: x.reshape(4, 2, 1, *x.shape[1:]), batch))
  close(jax.tree.map(lambda x: x[3, 1], found), expected, rtol=1e-3, atol=1e-5)


def test_hyperparameters_may_be_traced_and_injected():
  params, batch = problem()
  plain = first(optim.kfac(0.1, predict, params, batch, **EXACT), params, batch)
  fixed = ("predict", "params", "batch")
  injected = optax.inject_hyperparams(optim.kfac, static_args=fixed)
  tx = injected(0.1, predict, params, batch, **EXACT)
  close(first(tx, params, batch), plain, rtol=1e-4)
  assert {"damping", "factor_decay", "momentum"} <= set(tx.init(params).hyperparams)


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
    (dict(plain=b"one"), "plain is b'one'; allowed: a text"),
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


def test_plain_is_one_pattern_or_several():
  params, batch = problem()
  listed = lambda plain: set(
    optim.scale_by_kfac(predict, params, batch, plain=plain).init(params).factors
  )
  assert listed("^one/") == listed(["^one/"]) == {"two"}
  assert listed(("^one/", "^two/")) == set()


@pytest.mark.thorough
def test_without_identity_the_average_is_of_the_estimates_alone():
  """Weights of age k are decay^k, in sum 1: NumPy in float64, at a decay of 0.9999."""
  params, batch = problem()
  decay, small = 0.9999, jax.tree.map(lambda x: 1e-3 * x, params)
  tx = optim.scale_by_kfac(
    predict, small, batch, factor_decay=decay, factor_period=1, identity_start=False, **EXACT
  )
  state, estimates = tx.init(small), []
  update = jax.jit(tx.update)
  for t in range(4):
    now = jax.tree.map(lambda x, t=t: (1 + t) * x, small)
    estimates.append(optim.kfac_factors(predict, now, batch, None, estimation="exact"))
    _, state = update(params, state, now, batch=batch)
  weights = decay ** np.arange(3, -1, -1)
  for name in ("one", "two"):
    for side in ("inputs", "outputs"):
      values = [np.float64(getattr(e[name], side)) for e in estimates]
      mean = np.tensordot(weights / weights.sum(), values, 1)
      found = getattr(state.factors[name], side)
      np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-9)


def test_without_identity_an_estimate_that_is_the_identity_counts():
  """The diagonal of A, of inputs +1 and -1, is 1 in every estimate; G is averaged all the same."""
  rng = np.random.default_rng(0)
  params, _ = problem()
  batches = [
    {"x": rng.choice([-1.0, 1.0], (4, 5)).astype(np.float32), "y": rng.integers(0, 4, 4)}
    for _ in range(4)
  ]
  options = dict(factor_period=1, inverse_period=1, identity_start=False, max_factor=4)
  tx = optim.scale_by_kfac(predict, params, batches[0], **options, **EXACT)
  state, estimates = tx.init(params), []
  for batch in batches:
    given = dict(estimation="exact", max_factor=4)
    fresh = optim.kfac_factors(predict, params, batch, None, **given)["one"]
    assert (fresh.inputs.values == 1).all()
    estimates.append(np.float64(fresh.outputs.values))
    _, state = tx.update(params, state, params, batch=batch)
  weights = 0.8 ** np.arange(3, -1, -1)
  mean = np.tensordot(weights / weights.sum(), estimates, 1)
  np.testing.assert_allclose(state.factors["one"].outputs.values, mean, rtol=1e-5)


@pytest.mark.parametrize("max_factor", [8192, 2], ids=["whole", "diagonal"])
def test_without_identity_padding_at_first_leaves_none(max_factor):
  net = nn.Dense(3)
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) / 10
  params = jax.jit(net.init)(jax.random.key(0), x)["params"]
  weighted = lambda params, batch: (net.apply({"params": params}, batch[0]), None, batch[1])
  options = dict(factor_period=1, inverse_period=4, identity_start=False, max_factor=max_factor)
  tx = optim.scale_by_kfac(weighted, params, (x, np.ones(8)), estimation="exact", **options)
  update = jax.jit(lambda state, weight: tx.update(params, state, params, batch=(x, weight))[1])
  seen = update(tx.init(params), np.ones(8))
  state = tx.init(params)
  for weight in (0.0, 0.0, 1.0):
    state = update(state, np.full(8, weight))
  close(state.factors, seen.factors, rtol=0, atol=0)
  close(update(state, np.ones(8)).factors, seen.factors)


def test_states_of_nnx_are_refused_by_name():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model)
  predict = lambda params, x: nnx.merge(graph, params)(x)
  with pytest.raises(ValueError, match="State of flax.nnx; K-FAC sees layers of Linen alone"):
    optim.kfac(0.1, predict, params, jnp.zeros((2, 3)))


@pytest.mark.parametrize("span, cosine", [(1, 0.9999), (2, 0.99)])
@pytest.mark.thorough
def test_exact_damping_of_badly_scaled_inputs(span, cosine):
  """Inputs of scales 10^-span to 10^span: docs/kfac.md says where float32 ends."""
  rng = np.random.default_rng(0)
  x = (rng.normal(size=(200, 8)) * np.logspace(-span, span, 8)).astype(np.float32)
  model = nn.Dense(4)
  params = jax.jit(model.init)(jax.random.key(0), 1e-3 * x)["params"]
  params = {**params, "kernel": params["kernel"] / np.logspace(-span, span, 8)[:, None]}
  apply = lambda p, x: model.apply({"params": p}, x)
  options = dict(estimation="exact", damping=1e-3, identity_start=False)
  factor = next(iter(optim.kfac_factors(apply, params, x, None, estimation="exact").values()))
  labels = rng.integers(0, 4, 200)
  losses = optax.softmax_cross_entropy_with_integer_labels
  grads = jax.grad(lambda p: losses(apply(p, x), labels).mean())(params)
  tx = optim.scale_by_kfac(apply, params, x, **options)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, batch=x)
  v = np.concatenate([grads["kernel"], grads["bias"][None]]).ravel()
  dense = np.kron(np.float64(factor.inputs), np.float64(factor.outputs))
  expected = np.linalg.solve(dense + 1e-3 * np.eye(len(dense)), v)
  found = np.concatenate([updates["kernel"], updates["bias"][None]]).ravel()
  assert found @ expected > cosine * np.linalg.norm(found) * np.linalg.norm(expected)


def test_boxes_of_flax_are_refused_by_their_name():
  x, init = np.ones((2, 5), np.float32), nn.initializers.lecun_normal()
  model = nn.Dense(4, kernel_init=nn.with_partitioning(init, (None, "model")))
  params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
  predict = lambda p, x: model.apply({"params": p}, x)
  with pytest.raises(ValueError, match="boxes of Flax .*; pass nn.unbox"):
    optim.kfac_blocks(predict, params, x)
  [block] = optim.kfac_blocks(predict, nn.unbox(params), x)
  assert block.kind == "kronecker"


def test_devices_draw_labels_of_their_own():
  model, x = nn.Dense(4, use_bias=False), np.ones((8, 3), np.float32)
  params = {"kernel": jnp.zeros((3, 4))}
  apply = lambda p, x: model.apply({"params": p}, x)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  one = lambda p, x, k: optim.kfac_factors(apply, p, x, k, axis_name="data")["kernel"].outputs
  specs = dict(in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=False)
  g = jax.shard_map(one, mesh=mesh, **specs)(params, x, jax.random.key(0))
  assert np.linalg.matrix_rank(np.asarray(g), tol=1e-3) > 1  # not one label on all devices
