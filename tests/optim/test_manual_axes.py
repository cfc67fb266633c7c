"""Batches spread over devices by explicit meshes, shard_map, pmap and vmap."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.small_net import close, curvature, first, loss, predict, problem

P = PartitionSpec


@pytest.mark.thorough
def test_a_mesh_of_explicit_axes():
  params, batch = problem()
  tx = optim.kfac(0.1, curvature(params, batch, estimation="exact"))
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


MANUAL = {
  "kfac": {},
  "kfac_adam": dict(eps=1e-3),  # Adam's first step has signs of roundings
  "kfac_muon": {},
  "ekfac of batches": dict(moments="batch"),
  "ekfac of examples": dict(moments="examples"),
}


@pytest.mark.parametrize("how", ["checked", "unchecked", "pmap"])
@pytest.mark.parametrize("name", MANUAL)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.thorough
def test_manual_axes(how, name, weighted):
  weigh = lambda p, b: (*predict(p, b), b["weights"])
  make = getattr(optim, name.split()[0])
  given = functools.partial(optim.Curvature, weigh if weighted else predict, estimation="exact")
  params, batch = problem()
  batch["weights"] = np.float32([1, 0, 0.5, 2, 1, 1, 0, 1])
  built = lambda axis_name: make(0.1, given(params, batch, axis_name=axis_name), **MANUAL[name])
  expected = first(built(None), params, batch)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

  def update(axis_name):
    tx = built(axis_name)

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


class Turned(nn.Module):
  """A dense layer whose rows begin with the tokens."""

  @nn.compact
  def __call__(self, x):
    h = nn.Dense(3, name="turned")(x.swapaxes(0, 1)).swapaxes(0, 1)
    return nn.Dense(4, name="head")(nn.tanh(h))


def test_a_device_with_padding_alone_adds_nothing():
  """The factors are those of the examples that count, also where rows begin with the tokens."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 5, 2)).astype(np.float32)
  params = jax.jit(Turned().init)(jax.random.key(0), x)["params"]
  weights = np.array([1, 1, 0, 0], np.float32)[:, None] * np.ones((4, 5), np.float32)
  apply = lambda params, batch: (Turned().apply({"params": params}, batch["x"]), None, batch["w"])
  batch = dict(x=x * weights[..., None], w=weights)
  make = lambda axis_name: optim.Curvature(
    apply, params, batch, estimation="exact", axis_name=axis_name
  )
  found = lambda batch, axis_name=None: make(axis_name).estimate(params, batch, jax.random.key(0))
  expected = jax.jit(found)(jax.tree.map(lambda x: x[:2], batch))
  mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
  spread = lambda batch: found(batch, "data")
  specs = dict(in_specs=P("data"), out_specs=P(), check_vma=False)
  close(jax.jit(jax.shard_map(spread, mesh=mesh, **specs))(batch), expected, rtol=1e-4)


@pytest.mark.parametrize("eigenvalues", ["factors", "batch"])
@pytest.mark.thorough
def test_copies_of_a_batch_on_a_second_axis_do_not_count(eigenvalues):
  params, batch = problem()
  of = functools.partial(curvature, params, batch, estimation="exact")
  scale_by = optim.scale_by_kfac if eigenvalues == "factors" else optim.scale_by_ekfac
  make = lambda **options: scale_by(of(**options))
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


@pytest.mark.thorough
def test_a_batch_over_two_axes_of_vmap_counts_whole():
  params, batch = problem()
  of = functools.partial(curvature, params, batch, estimation="exact")
  expected = first(optim.scale_by_ekfac(of()), params, batch)
  tx = optim.scale_by_ekfac(of(axis_name=("one", "two")))
  grads = jax.grad(loss)(params, batch)
  step = lambda batch: tx.update(grads, tx.init(params), params, batch=batch)[0]
  spread = jax.vmap(jax.vmap(step, axis_name="two"), axis_name="one")
  found = jax.jit(spread)(jax.tree.map(lambda x: x.reshape(4, 2, 1, *x.shape[1:]), batch))
  close(jax.tree.map(lambda x: x[3, 1], found), expected, rtol=1e-3, atol=1e-5)


def test_devices_draw_labels_of_their_own():
  model, x = nn.Dense(4, use_bias=False), np.ones((8, 3), np.float32)
  params = {"kernel": jnp.zeros((3, 4))}
  apply = lambda p, x: model.apply({"params": p}, x)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  of = optim.Curvature(apply, params, x, axis_name="data")
  one = lambda p, x, k: of.estimate(p, x, k)["kernel"].outputs
  specs = dict(in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=False)
  g = jax.jit(jax.shard_map(one, mesh=mesh, **specs))(params, x, jax.random.key(0))
  assert np.linalg.matrix_rank(np.asarray(g), tol=1e-3) > 1  # not one label on all devices
