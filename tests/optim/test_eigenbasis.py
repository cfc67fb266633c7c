"""Optimizers in an eigenbasis against NumPy in float64, over 25 steps of changing gradients."""

import functools

import jax
import numpy as np
import optax
import pytest

from mixer_jax import optim
from tests.optim import small_net
from tests.optim.two_layers import (
  assert_steps,
  averages,
  kernels,
  matrix,
  predict,
  sequence,
  updates_of,
)


@pytest.mark.parametrize("given", [{}, {"max_factor": 4}, {"products": "bfloat16"}], ids=str)
def test_adam_in_the_basis_of_kfac(given):
  """With max_factor=4 the sides of 5 inputs have no basis."""
  options = dict(factor_decay=0.7, factor_period=3, basis_period=6, b1=0.8, b2=0.9, eps=1e-3)
  options["decomposition"] = optim.Decomposition(products=given.get("products", "float32"))
  of = dict(estimation="empirical", token_averaging="expand", max_factor=given.get("max_factor"))
  curvature = optim.Curvature(predict, *sequence()[0][:2], **of)
  turned = lambda factor: len(factor) <= given.get("max_factor", 5)
  tx = optim.scale_by_kfac_adam(curvature, **options)
  wanted, state = [], {}
  for t, factors in averages(0.7, 3):
    wanted.append({})
    for name, factor in factors.items():
      v = matrix(sequence()[t][2][name])
      own = state.setdefault(name, {"mean": np.zeros_like(v), "squares": np.zeros_like(v)})
      if t % 6 == 0:
        new = [np.linalg.eigh(f)[1] if turned(f) else np.eye(len(f)) for f in factor]
        if t:
          turns = [n.T @ o for n, o in zip(new, own["basis"])]
          own["squares"] = turns[0] ** 2 @ own["squares"] @ turns[1].T ** 2
        own["basis"] = new
      qa, qg = own["basis"]
      own["mean"] = 0.8 * own["mean"] + 0.2 * v  # outside of the basis
      own["squares"] = 0.9 * own["squares"] + 0.1 * (qa.T @ v @ qg) ** 2
      mean = qa.T @ own["mean"] @ qg / (1 - 0.8 ** (t + 1))
      root = np.sqrt(own["squares"] / (1 - 0.9 ** (t + 1)))
      wanted[-1][name] = qa @ (mean / (root + 1e-3)) @ qg.T
  found = updates_of(tx)[0]
  if "products" not in given:
    return assert_steps(found, wanted)
  assert_steps(found, wanted, rtol=0.05)  # products keep eight bits
  with pytest.raises(AssertionError):
    assert_steps(found, wanted)


@pytest.mark.parametrize(
  "name, nesterov, first",
  [
    ("kfac_adam", False, 0),
    ("kfac_muon", True, 0),
    ("soap", False, 1),
    ("shampoo", False, 1),
    ("corrected", False, 1),
  ],
)
def test_parameters_without_a_basis_take_adam(name, nesterov, first):
  """With Nesterov's momentum by default under Muon, without momentum under Shampoo."""
  b1 = 0.0 if name in ("shampoo", "corrected") else 0.8
  options = dict(b2=0.9, eps=1e-3)
  paths = [("one", "bias"), ("two", "bias")]  # of SOAP and Shampoo: arrays of one axis
  if name.startswith("kfac"):
    paths = [("one", "kernel"), ("one", "bias")]
    curvature = optim.Curvature(predict, *sequence()[0][:2], unpreconditioned="^one/")
  tx = {
    "kfac_adam": lambda: optim.scale_by_kfac_adam(curvature, b1=b1, **options),
    "kfac_muon": lambda: optim.scale_by_kfac_muon(
      curvature, others=optax.scale_by_adam(b1, **options, nesterov=True)
    ),
    "soap": lambda: optim.scale_by_soap(b1=b1, **options),
    "shampoo": lambda: optim.scale_by_shampoo(**options),
    "corrected": lambda: optim.scale_by_shampoo(corrected=True, **options),
  }[name]()
  found = updates_of(tx)[0]
  for layer, name in paths:
    mean, squares = 0.0, 0.0
    for t, (update, (*_, grads)) in enumerate(zip(found[first:], sequence()[first:]), 1):
      g = np.float64(grads[layer][name])
      mean, squares = b1 * mean + (1 - b1) * g, 0.9 * squares + 0.1 * g**2
      hat = mean / (1 - b1**t)
      if nesterov:  # Dozat, 2016, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ
        hat = b1 * mean / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
      wanted = hat / (np.sqrt(squares / (1 - 0.9**t)) + 1e-3)
      np.testing.assert_allclose(update[layer][name], wanted, rtol=1e-4, atol=1e-6)


def test_in_coordinates_it_is_adam_to_the_bit():
  params, batch, _ = sequence()[0]
  adam = updates_of(optax.with_extra_args_support(optax.scale_by_adam(0.9, 0.95)))[0]
  kfac = optim.scale_by_kfac_adam(optim.Curvature(predict, params, batch, max_factor=1))
  jax.tree.map(np.testing.assert_array_equal, updates_of(kfac)[0], adam)
  tx = optim.scale_by_soap(b1=0.9, max_factor=1)
  gradients, found, _ = kernels(tx)
  rule = optax.scale_by_adam(0.9, 0.95)
  state, step = rule.init(found[0]), jax.jit(rule.update)
  assert not found[0].any()
  for g, update in zip(gradients[1:], found[1:]):
    wanted, state = step(g.astype(np.float32), state)
    np.testing.assert_array_equal(update, wanted)


def made(name, max_factor=None, **options):
  make = getattr(optim, f"scale_by_{name}")
  if not name.startswith("kfac"):
    return make(max_factor=max_factor, **options)
  return make(optim.Curvature(predict, *sequence()[0][:2], max_factor=max_factor), **options)


NAMES = ["soap", "shampoo", "kfac_adam", "kfac_muon"]


@pytest.mark.parametrize("name", ["soap", "kfac_muon"])
def test_the_largest_factor_may_be_one_by_path(name):
  """Each on one of two layers: that layer's updates are those without a largest size."""
  free, cut = updates_of(made(name))[0], updates_of(made(name, 1))[0]
  some = updates_of(made(name, {"^one/": None, "": 1}))[0]
  for t, update in enumerate(some):
    jax.tree.map(np.testing.assert_array_equal, update["one"], free[t]["one"])
    jax.tree.map(np.testing.assert_array_equal, update["two"], cut[t]["two"])
  assert np.abs(free[-1]["one"]["kernel"] - cut[-1]["one"]["kernel"]).max() > 1e-3


@pytest.mark.parametrize("refresh", ["eigh", "qr"])
def test_moments_turn_with_the_basis(refresh):
  how = optim.Decomposition(refresh)
  _, _, states = kernels(optim.scale_by_soap(b1=0.8, basis_period=5, decomposition=how))
  gradients, mean = [g for _, _, g in sequence()], 0.0
  for t, state in enumerate(states[1:], 1):
    mean = 0.8 * mean + 0.2 * gradients[t]["one"]["kernel"]
    left, right = state.basis[""]
    outside = left.vectors @ state.inner.mu[""] @ right.vectors.T
    np.testing.assert_allclose(outside, mean, rtol=1e-4, atol=1e-5)
    eye = left.vectors.T @ left.vectors
    np.testing.assert_allclose(eye, np.eye(4), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.first(1)
def test_devices_that_share_renewals_make_the_same_steps(name):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
  options = dict(eps=1e-3) if name != "kfac_muon" else dict(normuon=True)
  alone = updates_of(made(name, **options))[0]
  how = optim.Decomposition("qr" if name == "soap" else "eigh", mesh=mesh)
  shared = updates_of(made(name, decomposition=how, **options))[0]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), shared, alone)


def test_kfac_adam_takes_a_part_of_the_batch():
  params, batch = small_net.problem()
  half = jax.tree.map(lambda x: x[::2], batch)
  curvature = small_net.curvature(params, batch, estimation="exact", token_averaging="expand")
  tx = optim.scale_by_kfac_adam(curvature, factor_fraction=0.5)
  state = tx.update(params, tx.init(params), params, batch=batch)[1]
  wanted = curvature.factors(params, half)
  small_net.close(state.factors, wanted, rtol=1e-5, atol=1e-6)
