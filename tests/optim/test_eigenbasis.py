"""Optimizers in an eigenbasis against NumPy in float64, over 25 steps of changing gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import eigenbasis
from mixer_jax.optim.curvature_blocks import Kronecker
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


@pytest.mark.parametrize(
  "given", [{}, {"max_factor": 4}, {"precondition_dtype": "bfloat16"}], ids=str
)
def test_adam_in_the_basis_of_kfac(given):
  """With max_factor=4 the sides of 5 inputs have no basis."""
  options = dict(estimation="empirical", factor_decay=0.7, factor_period=3, basis_period=6, **given)
  params, batch, _ = sequence()[0]
  turned = lambda factor: len(factor) <= given.get("max_factor", 5)
  tx = optim.scale_by_kfac_adam(predict, params, batch, b1=0.8, b2=0.9, eps=1e-3, **options)
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
  if "precondition_dtype" not in given:
    return assert_steps(found, wanted)
  assert_steps(found, wanted, rtol=0.05)  # products keep eight bits
  with pytest.raises(AssertionError):
    assert_steps(found, wanted)


@pytest.mark.parametrize(
  "make, b1, nesterov, first",
  [
    (functools.partial(optim.scale_by_kfac_adam, predict, *sequence()[0][:2]), 0.8, False, 0),
    (functools.partial(optim.scale_by_kfac_muon, predict, *sequence()[0][:2]), 0.8, True, 0),
    (optim.scale_by_soap, 0.8, False, 1),
    (optim.scale_by_shampoo, None, False, 1),
    (functools.partial(optim.scale_by_shampoo, corrected=True), None, False, 1),
  ],
  ids=["kfac_adam", "kfac_muon", "soap", "shampoo", "corrected"],
)
def test_parameters_without_a_basis_take_adam(make, b1, nesterov, first):
  """With Nesterov's momentum by default under Muon, without momentum under Shampoo."""
  options = dict(b2=0.9, eps=1e-3) | (dict(b1=b1) if b1 else {})
  paths = [("one", "bias"), ("two", "bias")]  # of SOAP and Shampoo: arrays of one axis
  if make not in (optim.scale_by_soap, optim.scale_by_shampoo) and make.args:
    options, paths = options | dict(plain="^one/"), [("one", "kernel"), ("one", "bias")]
  found = updates_of(make(**options))[0]
  for layer, name in paths:
    mean, squares, b1 = 0.0, 0.0, b1 or 0.0
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
  kfac = optim.scale_by_kfac_adam(predict, params, batch, max_factor=1)
  jax.tree.map(np.testing.assert_array_equal, updates_of(kfac)[0], adam)
  tx = optim.scale_by_soap(b1=0.9, max_factor=1)
  gradients, found, _ = kernels(tx)
  rule = optax.scale_by_adam(0.9, 0.95)
  state, step = rule.init(found[0]), jax.jit(rule.update)
  assert not found[0].any()
  for g, update in zip(gradients[1:], found[1:]):
    wanted, state = step(g.astype(np.float32), state)
    np.testing.assert_array_equal(update, wanted)


def test_in_a_basis_of_unit_vectors_it_is_adam_to_the_bit():
  """The gradient is turned by identity matrices, which are renewed every four updates."""
  rule = optax.scale_by_adam(0.9, 0.95)
  ordered = lambda b: Kronecker(*(jnp.diag(jnp.arange(1.0, d + 1)) for d in b.factor_sizes))
  estimate = lambda blocks, *_: {b.name: ordered(b) for b in blocks}
  source = eigenbasis.Source(eigenbasis.gradient_source(None).blocks, estimate, after=False)
  found, states = updates_of(eigenbasis.in_basis(rule, rule, source, basis_period=4))
  for eigen in states[-1].basis["one/kernel"]:
    np.testing.assert_array_equal(eigen.vectors, np.eye(len(eigen.values)))
  adam = updates_of(optax.with_extra_args_support(rule))[0]
  jax.tree.map(np.testing.assert_array_equal, found, adam)


MAKES = [
  optim.scale_by_soap,
  optim.scale_by_shampoo,
  functools.partial(optim.scale_by_kfac_adam, predict, *sequence()[0][:2]),
  functools.partial(optim.scale_by_kfac_muon, predict, *sequence()[0][:2]),
]


@pytest.mark.parametrize("make", MAKES)
def test_full_factors_have_a_basis_at_any_size(make):
  """Each on one of two layers: that layer's updates are those without a largest size."""
  free, cut = updates_of(make())[0], updates_of(make(max_factor=1))[0]
  some = updates_of(make(max_factor=1, full_factors="^one/"))[0]
  for t, update in enumerate(some):
    jax.tree.map(np.testing.assert_array_equal, update["one"], free[t]["one"])
    jax.tree.map(np.testing.assert_array_equal, update["two"], cut[t]["two"])
  assert np.abs(free[-1]["one"]["kernel"] - cut[-1]["one"]["kernel"]).max() > 1e-3
  with pytest.raises(ValueError, match="full_factors is 'three', which matches no parameter"):
    updates_of(make(full_factors="three"))


@pytest.mark.parametrize("refresh", ["eigh", "qr"])
def test_moments_turn_with_the_basis(refresh):
  _, _, states = kernels(optim.scale_by_soap(b1=0.8, basis_period=5, refresh=refresh))
  gradients, mean = [g for _, _, g in sequence()], 0.0
  for t, state in enumerate(states[1:], 1):
    mean = 0.8 * mean + 0.2 * gradients[t]["one"]["kernel"]
    left, right = state.basis[""]
    outside = left.vectors @ state.inner.mu[""] @ right.vectors.T
    np.testing.assert_allclose(outside, mean, rtol=1e-4, atol=1e-5)
    eye = left.vectors.T @ left.vectors
    np.testing.assert_allclose(eye, np.eye(4), atol=1e-5)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.first(1)
def test_devices_that_share_renewals_make_the_same_steps(make):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
  alone, shared = updates_of(make(eps=1e-3))[0], updates_of(make(eps=1e-3, mesh=mesh))[0]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), shared, alone)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(refresh="QR"), "refresh is 'QR'; allowed: eigh, qr"),
    (dict(precondition_dtype="float16"), "precondition_dtype is 'float16'"),
    (dict(factor_decay=1.0), "factor_decay is 1.0; allowed: 0 to 0.9999999"),
    (dict(basis_period=0), "basis_period is 0; allowed: 1 or more"),
    (dict(basis_period=2.5), "basis_period is 2.5; allowed: an integer"),
    (dict(b1=1.5), "b1 is 1.5; allowed: 0 to"),
    (dict(refresh="eigh", tolerance=0.1), 'tolerance is 0.1; it needs refresh="qr"'),
  ],
)
def test_mistakes_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    optim.scale_by_soap(**options)


def test_unknown_options_are_told_with_those_that_there_are():
  with pytest.raises(
    TypeError, match="scale_by_soap has no option 'basis_periods'; allowed: b1, b2"
  ):
    optim.scale_by_soap(basis_periods=2)
  with pytest.raises(TypeError, match="kfac_adam has no option 'inverse_period'; .*basis_period"):
    optim.kfac_adam(1e-3, predict, *sequence()[0][:2], inverse_period=2)


def test_mistakes_of_kfac_s_relatives_are_named():
  params, batch, grads = sequence()[0]
  make = functools.partial(optim.scale_by_kfac, predict, params, batch)
  with pytest.raises(ValueError, match="inverse_period is 15; .* a multiple of factor_period, 10"):
    make(eigenvalues="examples", inverse_period=15)
  with pytest.raises(ValueError, match="moment_decay is 1.5; allowed: 0 to 1"):
    make(eigenvalues="batch", moment_decay=1.5)
  with pytest.raises(ValueError, match="moment_decay is 0.5; it needs eigenvalues='batch' or"):
    make(moment_decay=0.5)
  with pytest.raises(ValueError, match="factor_fraction is 2.0; allowed: 1e-06 to 1"):
    make(factor_fraction=2.0)
  tx = optim.scale_by_kfac_adam(predict, params, batch)
  with pytest.raises(ValueError, match="the update needs batch: tx.update"):
    tx.update(grads, tx.init(params), params)


@pytest.mark.thorough
def test_each_optimizer_may_have_its_part_of_the_parameters():
  params, batch, _ = sequence()[0]
  parts = {"soap": optim.scale_by_soap(), "kfac": optim.scale_by_kfac_adam(predict, params, batch)}
  labels = {"one": "soap", "two": "kfac"}
  tx = optax.multi_transform(parts, labels)
  state, both = tx.init(params), []
  for params, batch, grads in sequence()[:3]:
    extra = dict(batch=batch, rng=jax.random.key(0), model_params=params)
    update, state = tx.update(grads, state, params, **extra)
    both.append(update)
  alone = updates_of(optim.scale_by_kfac_adam(predict, *sequence()[0][:2]))[0]
  for update, whole in zip(both, alone):
    np.testing.assert_allclose(
      update["two"]["kernel"], whole["two"]["kernel"], rtol=1e-4, atol=1e-6
    )


def test_kfac_adam_takes_a_part_of_the_batch():
  params, batch = small_net.problem()
  half = jax.tree.map(lambda x: x[::2], batch)
  options = dict(estimation="exact")
  tx = optim.scale_by_kfac_adam(small_net.predict, params, batch, factor_fraction=0.5, **options)
  state = tx.update(params, tx.init(params), params, batch=batch)[1]
  wanted = optim.kfac_factors(
    small_net.predict, params, half, None, token_averaging="expand", **options
  )
  small_net.close(state.factors, wanted, rtol=1e-5, atol=1e-6)
