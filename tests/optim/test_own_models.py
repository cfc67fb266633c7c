"""K-FAC as a stranger would use it: own models, own transformations, mistakes."""

import functools
import re

import flax
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


def mean_gradient(params, batch):
  """In a checked shard_map JAX adds up the gradients of parameters that all devices share."""
  grads = jax.grad(loss)(params, batch)
  share = lambda g: g / jax.lax.axis_size("data")
  varies = getattr(jax.typeof(jax.tree.leaves(grads)[0]), "vma", ()) or ()
  return jax.lax.pmean(grads, "data") if "data" in varies else jax.tree.map(share, grads)


@pytest.mark.parametrize("how", ["checked", "unchecked", "pmap"])
@pytest.mark.thorough
def test_manual_axes(how):
  params, batch = problem()
  expected = first(optim.kfac(0.1, predict, params, batch, **EXACT), params, batch)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

  def update(axis_name):
    tx = optim.kfac(0.1, predict, params, batch, axis_name=axis_name, **EXACT)

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

  close(update("data"), expected, rtol=1e-4, atol=1e-5)
  with pytest.raises(ValueError, match="inside shard_map or pmap over data; name the axes"):
    update(None)


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
    (dict(damping="0.1"), "damping is '0.1'; allowed: a finite number"),
    (dict(decay_mask="kernel"), "decay_mask is 'kernel'; allowed: None, a tree of bools"),
  ],
)
def test_options_out_of_range_are_refused_when_made(option, told):
  with pytest.raises(ValueError, match=re.escape(told)):
    optim.kfac(0.1, predict, *problem(), **option)


@pytest.mark.parametrize("likelihood", ["normal", "bernoulli"])
def test_targets_that_would_broadcast_are_refused(likelihood):
  model, x, t = nn.Dense(1), jnp.ones((8, 3)), jnp.ones(8)
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  both = lambda p, b: (model.apply({"params": p}, b[0]), b[1])
  options = dict(likelihood=likelihood, estimation="empirical")
  with pytest.raises(ValueError, match=r"targets have shape \(8,\) for outputs \(8, 1\)"):
    optim.kfac_factors(both, params, (x, t), jax.random.key(0), **options)


@pytest.mark.thorough
def test_padded_steps_of_a_recurrent_net_count_in_no_factor():
  """Also those of which every example is padding."""

  class Tagger(nn.Module):
    @nn.compact
    def __call__(self, x, lengths):
      return nn.Dense(3)(nn.RNN(nn.SimpleCell(4, name="cell"))(x, seq_lengths=lengths))

  rng = np.random.default_rng(0)
  x, lengths = rng.normal(size=(3, 6, 2)).astype(np.float32), np.array([3, 2, 2])
  real = (np.arange(6) < lengths[:, None]).astype(np.float32)
  params = jax.jit(Tagger().init)(jax.random.key(0), x, lengths)["params"]

  def tagged(p, b):
    return Tagger().apply({"params": p}, b["x"], lengths), b["labels"], b["real"]

  batch = dict(x=x, labels=rng.integers(0, 3, (3, 6)), real=real)
  short = {k: v[:, :3] for k, v in batch.items()}
  options = dict(estimation="empirical")
  found, expected = (
    optim.kfac_factors(tagged, params, b, jax.random.key(0), **options) for b in (batch, short)
  )
  jax.tree.map(close, found, expected)
  rows = x[real > 0]
  inputs = np.concatenate([rows, np.ones((len(rows), 1))], 1)
  np.testing.assert_allclose(found["cell/i"][0], inputs.T @ inputs / len(rows), rtol=1e-5)


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


def test_a_wide_side_is_diagonal():
  params, batch = problem()
  tx = optim.scale_by_kfac(predict, params, batch, max_factor=5, **EXACT)
  [one, two] = [
    b for b in optim.kfac_blocks(predict, params, batch, max_factor=5) if b.kind == "kronecker"
  ]
  assert (one.name, one.diagonal, two.diagonal) == ("one", (True, True), (True, False))
  state = tx.init(params)
  assert [x.shape for x in jax.tree.leaves(state.factors["two"])] == [(7,), (4, 4)]
  full = optim.kfac_factors(predict, params, batch, None, estimation="exact")["two"]
  grads = jax.jit(jax.grad(loss))(params, batch)
  updates, state = jax.jit(tx.update)(grads, state, params, batch=batch)
  a = 0.95 + 0.05 * np.diag(full.inputs)
  g = 0.95 * np.eye(4) + 0.05 * np.float64(full.outputs)
  close(state.factors["two"].inputs.values, a, rtol=1e-5)
  v = np.concatenate([grads["two"]["kernel"], grads["two"]["bias"][None]])
  dense = np.kron(np.diag(a), g) + 1e-2 * np.eye(28)
  expected = np.linalg.solve(dense, v.ravel()).reshape(7, 4)
  close(updates["two"]["kernel"], expected[:6], rtol=1e-4)
  close(updates["two"]["bias"], expected[6], rtol=1e-4)


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


class Subclass(nn.Dense):
  def __call__(self, x):
    return 2.0 * super().__call__(x)


class Wrapped(nn.Module):
  """A layer behind jax.jit, jax.checkpoint or a class of its own; and one that is not used."""

  how: str

  @nn.compact
  def __call__(self, x):
    layer = (Subclass if self.how == "subclass" else nn.Dense)(6, name="one")
    if self.is_initializing():
      nn.Dense(3, name="unused")(x)
    x = layer(x)
    return nn.Dense(4, name="two")(nn.tanh(x))


@pytest.mark.parametrize("how", ["plain", "subclass", "jit", "checkpoint", "vmap", "frozen"])
@pytest.mark.thorough
def test_transformations_around_layers(how):
  params, batch = problem()
  model = Wrapped(how)
  params = jax.jit(model.init)(jax.random.key(0), batch["x"])["params"]
  apply = lambda p, x: model.apply({"params": p}, x)
  if how == "jit":
    apply = jax.jit(apply)
    apply(params, batch["x"])  # a trace in its cache, without K-FAC
  elif how == "checkpoint":
    apply = jax.checkpoint(apply)
  elif how == "vmap":
    inner = apply
    apply = lambda p, x: jax.vmap(lambda x: inner(p, x))(x)
  if how == "frozen":
    params = flax.core.freeze(params)
  blocks = optim.kfac_blocks(apply, params, batch["x"])
  assert {b.name for b in blocks if b.kind == "kronecker"} == {"one", "two"}
  factors = optim.kfac_factors(apply, params, batch["x"], None, estimation="exact")
  scale = 2.0 if how == "subclass" else 1.0
  params = flax.core.unfreeze(params)
  wide = {"one": jax.tree.map(lambda x: scale * x, params["one"]), "two": params["two"]}
  plain = lambda p, x: Net().apply({"params": p}, x)
  expected = optim.kfac_factors(plain, wide, batch["x"], None, estimation="exact")
  close(factors["one"].inputs, expected["one"].inputs)
  close(factors["one"].outputs, scale**2 * expected["one"].outputs, rtol=1e-4)
  close(factors["two"], expected["two"], rtol=1e-4)


@pytest.mark.thorough
def test_layers_side_by_side():
  """nn.vmap makes an ensemble: each member has factors of its own."""

  class Members(nn.Module):
    @nn.compact
    def __call__(self, x):
      many = nn.vmap(Net, in_axes=None, out_axes=1, axis_size=3,
                     variable_axes={"params": 0}, split_rngs={"params": True})  # fmt: skip
      return many(name="net")(x).mean(axis=1)

  _, batch = problem()
  params = jax.jit(Members().init)(jax.random.key(0), batch["x"])["params"]
  members = lambda p, x: Members().apply({"params": p}, x)
  factors = optim.kfac_factors(members, params, batch["x"], None, estimation="exact")
  tx = optim.scale_by_kfac(members, params, batch["x"], **EXACT)
  grads = jax.tree.map(jnp.ones_like, params)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, batch=batch["x"])
  assert factors["net/one"].outputs.shape == (3, 6, 6)

  def outputs(biases):
    one = {**params["net"]["one"], "bias": biases}
    return members({"net": {**params["net"], "one": one}}, batch["x"])

  jacobians = jax.jit(jax.jacobian(outputs))(params["net"]["one"]["bias"])  # [8, 4, 3, 6]
  p = np.asarray(jax.nn.softmax(outputs(params["net"]["one"]["bias"])))
  hessian = np.stack([np.diag(q) - np.outer(q, q) for q in p])
  h = np.concatenate([batch["x"], np.ones((8, 1))], axis=1)
  for i in range(3):
    close(factors["net/one"].inputs[i], h.T @ h / 8, rtol=1e-5)
    jacobian = jacobians[:, :, i]
    expected = np.einsum("bio,bij,bjp->op", jacobian, hessian, jacobian) / 8
    close(factors["net/one"].outputs[i], expected, rtol=1e-4)
    a, g = (0.95 * np.eye(n) + 0.05 * np.float64(f[i]) for n, f in zip((6, 6), factors["net/one"]))
    solved = np.linalg.solve(np.kron(a, g) + 1e-2 * np.eye(36), np.ones(36)).reshape(6, 6)
    close(updates["net"]["one"]["bias"][i], solved[5], rtol=1e-3)


NORMS = {
  "layer": lambda: nn.LayerNorm(name="norm"),
  "rms": lambda: nn.RMSNorm(name="norm"),
  "group": lambda: nn.GroupNorm(num_groups=2, name="norm"),
  "batch": lambda: nn.BatchNorm(use_running_average=True, name="norm"),
}


class Normalised(nn.Module):
  kind: str

  @nn.compact
  def __call__(self, x):
    x = NORMS[self.kind]()(x)
    return nn.Dense(3, name="head")(nn.tanh(x).mean(axis=1))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.thorough
def test_diagonals_of_normalisations_equal_brute_force(kind):
  x = np.random.default_rng(0).normal(size=(5, 2, 4)).astype(np.float32)
  variables = jax.jit(Normalised(kind).init)(jax.random.key(0), x)
  params = jax.tree.map(lambda p: p + 0.2, variables["params"])
  rest = {k: v for k, v in variables.items() if k != "params"}
  apply = lambda p, x: Normalised(kind).apply({"params": p, **rest}, x)
  kinds = {b.name: b.kind for b in optim.kfac_blocks(apply, params, x)}
  assert kinds == {"norm": "gradient", "head": "kronecker"}
  found = optim.kfac_factors(apply, params, x, None, estimation="exact", norms="diagonal")["norm"]
  log_loss = lambda p, x, y: -jax.nn.log_softmax(apply(p, x[None])[0])[y]
  every = jax.vmap(jax.vmap(jax.grad(log_loss), (None, None, 0)), (None, 0, None))
  grads = jax.jit(every)(params, x, jnp.arange(3))["norm"]
  weights = jax.nn.softmax(apply(params, x))
  names = [name for name in ("scale", "bias") if name in grads]
  for name, values in zip(names, found.values, strict=True):
    close(values, np.einsum("iy,iyc->c", weights, np.square(grads[name])) / 5, rtol=1e-4)


class Recurrent(nn.Module):
  """The last state of a recurrent cell, by `nn.RNN` or in a loop of Python."""

  lifted: bool

  @nn.compact
  def __call__(self, x):
    cell = nn.SimpleCell(4, name="cell")
    if self.lifted:
      return nn.Dense(3)(nn.RNN(cell)(x)[:, -1])
    carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
    for t in range(x.shape[1]):
      carry, y = cell(carry, x[:, t])
    return nn.Dense(3)(y)


@pytest.mark.thorough
def test_a_recurrent_cell_has_the_factors_of_a_loop_over_time():
  x = jax.random.normal(jax.random.key(0), (6, 5, 3))
  params = jax.jit(Recurrent(True).init)(jax.random.key(1), x)["params"]
  found = []
  for lifted in (True, False):
    predict = lambda p, b: Recurrent(lifted).apply({"params": p}, b)
    found.append(optim.kfac_factors(predict, params, x, jax.random.key(2)))
  assert {"cell/h", "cell/i"} <= found[0].keys()
  jax.tree.map(close, *found)


def test_states_of_nnx_are_refused_by_name():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model)
  predict = lambda params, x: nnx.merge(graph, params)(x)
  with pytest.raises(ValueError, match="State of flax.nnx; K-FAC sees layers of Linen alone"):
    optim.kfac(0.1, predict, params, jnp.zeros((2, 3)))


def test_parameters_cast_inside_predict_are_refused():
  params, batch = problem()
  half = lambda p, b: predict(jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), b)
  tx = optim.scale_by_kfac(half, params, batch)
  with pytest.raises(ValueError, match="are cast to bfloat16 inside predict"):
    tx.update(params, tx.init(params), params, batch=batch, rng=jax.random.key(0))


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


class OwnDense(nn.Module):
  """A layer of one's own, y = x @ kernel + bias."""

  curvature = "dense"

  @nn.compact
  def __call__(self, x):
    kernel = self.param("kernel", nn.initializers.normal(), (x.shape[-1], 6))
    return x @ kernel + self.param("bias", nn.initializers.zeros, (6,))


def test_a_dense_layer_of_ones_own():
  class Own(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(4, name="two")(nn.tanh(OwnDense(name="one")(x)))

  params, batch = problem()
  own = lambda p, b: Own().apply({"params": p}, b["x"])
  found = optim.kfac_factors(own, params, batch, None, estimation="exact")
  close(found, optim.kfac_factors(predict, params, batch, None, estimation="exact"))


@pytest.mark.thorough
def test_the_leading_part_of_a_matrix_has_the_factors_of_zeros_for_the_rest():
  class Leading(nn.Module):
    curvature = "dense"

    @nn.compact
    def __call__(self, x):
      n = x.shape[-1]
      kernel = self.param("kernel", nn.initializers.normal(), (7, 7))[:n, :n]
      return x @ kernel + self.param("bias", nn.initializers.normal(), (7,))[:n]

  class Model(nn.Module):
    whole: bool

    @nn.compact
    def __call__(self, x):
      if self.whole:
        zeros = jnp.zeros((*x.shape[:-1], 7 - x.shape[-1]))
        x = nn.Dense(7, name="one")(jnp.concatenate([x, zeros], axis=-1))[..., : x.shape[-1]]
      else:
        x = Leading(name="one")(x)
      return nn.Dense(4, name="two")(nn.tanh(x).mean(axis=1))

  x = np.random.default_rng(0).normal(size=(6, 3, 5)).astype(np.float32)
  params = jax.jit(Model(False).init)(jax.random.key(0), x)["params"]
  factors = lambda whole: optim.kfac_factors(
    lambda p, x: Model(whole).apply({"params": p}, x), params, x, None, estimation="exact"
  )
  found, expected = factors(False), factors(True)
  assert found["one"].inputs.shape == (8, 8) and found["one"].outputs.shape == (7, 7)
  close(found, expected)


REFUSED = {
  "an nn.DenseGeneral with batch_dims": nn.DenseGeneral(3, axis=-1, batch_dims=0),
  "which is no matrix product": nn.Einsum((2, 4, 3), "btc,tcd->btd", use_bias=False),
  "an nn.ConvLocal": nn.ConvLocal(3, (2,)),
  "an nn.Conv with a mask": nn.Conv(3, (1,), mask=jnp.ones((1, 4, 3))),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.first(1)
def test_layers_that_are_no_matrix_over_rows_are_refused(reason):
  x = jnp.ones((2, 2, 4))
  params = jax.jit(REFUSED[reason].init)(jax.random.key(0), x)["params"]
  apply = lambda p, x: REFUSED[reason].apply({"params": p}, x)
  with pytest.raises(ValueError, match=f"kernel .*{reason}.*list them in `plain`"):
    optim.kfac_blocks(apply, params, x)


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
