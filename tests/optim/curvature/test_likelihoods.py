"""Distributions of outputs, weights of rows and several outputs, against NumPy in float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.curvature.brute_force import close, factors


class Linear(nn.Module):
  width: int = 3

  @nn.compact
  def __call__(self, x):
    return nn.Dense(self.width, name="head")(x)


def setup(shape=(6, 4), width=3, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape).astype(np.float32)
  params = jax.jit(Linear(width).init)(jax.random.key(seed), x)["params"]
  return (lambda p, x: Linear(width).apply({"params": p}, x)), params, x


def fisher_of_outputs(name, y):
  """The Fisher matrix of one row of outputs, in closed form."""
  y = np.float64(y)
  if name == "categorical":
    p = np.exp(y) / np.exp(y).sum()
    return np.diag(p) - np.outer(p, p)
  if name == "bernoulli":
    p = 1 / (1 + np.exp(-y))
    return np.diag(p * (1 - p))
  return 2.0 * np.eye(len(y))  # the Hessian of a sum of squares


@pytest.mark.parametrize("name", ["categorical", "normal", "bernoulli"])
@pytest.mark.parametrize("shape", [(6, 4), (3, 2, 4)], ids=["rows", "tokens"])
@pytest.mark.first(1)
def test_exact_factor_in_closed_form(name, shape):
  predict, params, x = setup(shape)
  options = dict(likelihood=name, token_averaging="expand")
  factor = factors(predict, params, x, None, estimation="exact", **options)["head"]
  rows = np.asarray(predict(params, x)).reshape(-1, 3)
  expected = np.mean([fisher_of_outputs(name, y) for y in rows], axis=0)
  np.testing.assert_allclose(factor.outputs, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["categorical", "normal", "bernoulli"])
@pytest.mark.thorough
def test_sampled_factors_average_to_the_exact_one(name):
  predict, params, x = setup((3, 2, 4))
  one = lambda key: factors(predict, params, x, key, likelihood=name)["head"].outputs
  mean = jax.jit(lambda keys: jax.lax.map(one, keys).mean(0))(
    jax.random.split(jax.random.key(0), 3000)
  )
  exact = factors(predict, params, x, None, likelihood=name, estimation="exact")["head"]
  assert np.linalg.norm(mean - exact.outputs) < 0.06 * np.linalg.norm(exact.outputs)


class Spread(nn.Module):
  """A mean and a variance for each output."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2, name="mean")(x), nn.softplus(nn.Dense(2, name="variance")(x)) + 0.1


def test_a_normal_of_its_own_variance():
  """The Fisher matrix is 1 / v for means and 1 / (2 v^2) for variances v."""
  x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
  params = jax.jit(Spread().init)(jax.random.key(0), x)["params"]
  predict = lambda p, x: Spread().apply({"params": p}, x)
  options = dict(likelihood="normal_variance", estimation="exact")
  found = factors(predict, params, x, None, **options)
  variance = np.float64(predict(params, x)[1])
  np.testing.assert_allclose(np.diag(found["mean"].outputs), (1 / variance).mean(axis=0), rtol=1e-4)
  slope = 1 - np.exp(-(variance - 0.1))  # of softplus, by its own value
  expected = (slope**2 / (2 * variance**2)).mean(axis=0)
  np.testing.assert_allclose(np.diag(found["variance"].outputs), expected, rtol=1e-4)


def _columns(y):
  return {"a": y[:, :1], "b": y[:, :1]}


_REFUSED = [  # outputs of logits y [6, 3], options, and what the message names
  (lambda y: y[:, 0], dict(likelihood="normal"), r"\[:, None\]"),
  (lambda y: y[:, :1], {}, "bernoulli"),
  (lambda y: [y, jnp.zeros(6)], {}, "tuple"),
  (lambda y: [y], {}, "list"),
  (lambda y: (y, {"batch_stats": {}}), {}, "mutable"),
  (lambda y: (y, None, jnp.ones(5)), dict(likelihood="normal"), r"\(5,\).*\(6,\), \(6, 3\)"),
  (lambda y: (y, None, jnp.ones((6, 3))), {}, r"\(6, 3\).*\(6,\)"),
  (lambda y: y, dict(likelihood="poisson"), "poisson.*categorical"),
  (lambda y: y, dict(estimation="empirical"), "targets"),
  (lambda y: y, dict(estimation="all"), "sampled"),
  (lambda y: y, dict(token_averaging="none"), "expand"),
  (lambda y: y.astype(int), {}, "int32"),
  (lambda y: jnp.fft.rfft(y), {}, "complex64"),
  (lambda y: {"a": y}, {}, "mapping"),
  (lambda y: {"a": y}, dict(likelihood={}), "{}"),
  (lambda y: {"a": y}, dict(likelihood={"b": "normal"}), "a; allowed: b"),
  (lambda y: y, dict(likelihood={"b": "normal"}), "none; allowed: b"),
  *((lambda y: y, dict(likelihood=w), "weight") for w in (("normal",), (-1.0, "normal"))),
  # A part of a mapping is as strict as it is alone.
  (_columns, dict(likelihood={"a": "normal", "b": "categorical"}), r"\['b'\].*bernoulli"),
  (
    lambda y: {"c": _columns(y)},
    dict(likelihood={"c": {"a": "normal", "b": "categorical"}}),
    r"\['c'\]\['b'\].*\(6, 1\)",
  ),
  (_columns, dict(likelihood={"a": "normal_variance", "b": "normal"}), r"\['a'\].*2"),
  (lambda y: (y[:, :1], y[:, 0]), dict(likelihood="normal"), r"\(6,\).*\(6, 1\)"),
  (lambda y: (y, jnp.zeros(6, int)), dict(likelihood="bernoulli"), r"\(6,\).*\(6, 3\)"),
]


@pytest.mark.parametrize("case", range(len(_REFUSED)))
def test_predictions_that_do_not_fit_are_refused(case):
  outputs, options, named = _REFUSED[case]
  predict, params, x = setup()
  with pytest.raises(ValueError, match=f"(?s){named}"):
    optim.Curvature(lambda p, x: outputs(predict(p, x)), params, x, **options)


def test_the_weight_of_a_likelihood_is_that_of_given_labels():
  model, rng = nn.Dense(2), np.random.default_rng(0)
  x, y = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32)
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  predict = lambda p, b: (model.apply({"params": p}, b[0]), b[1])
  found = factors(
    predict, params, (x, y), None, likelihood=(0.25, "normal"), estimation="empirical"
  )
  d = 2 * (np.float64(predict(params, (x, y))[0]) - y)  # of the sum of squares
  [factor] = found.values()
  np.testing.assert_allclose(factor.outputs, 0.25 * d.T @ d / 6, rtol=1e-5)


def test_labels_of_several_outputs_are_independent():
  model, x = (
    nn.Dense(3, use_bias=False),
    np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32),
  )
  params = {"kernel": jnp.zeros((2, 3))}
  both = lambda p, x: dict.fromkeys("ab", model.apply({"params": p}, x))
  options = dict(likelihood=dict.fromkeys("ab", "categorical"))
  one = lambda key: factors(both, params, x, key, **options)["kernel"].outputs
  mean = jax.jit(lambda keys: jax.lax.map(one, keys).mean(0))(
    jax.random.split(jax.random.key(0), 500)
  )
  wanted = 2 * (np.eye(3) / 3 - 1 / 9)  # diag(p) - p p^T of each
  assert np.linalg.norm(mean - wanted) < 0.1 * np.linalg.norm(wanted)


def test_targets_of_several_outputs_are_a_mapping_like_them():
  predict, params, x = setup()
  rng = np.random.default_rng(1)
  labels = {k: rng.integers(0, 3, 6) for k in "ab"}
  batch = {"x": x, "labels": labels}
  both = lambda p, b: (dict.fromkeys("ab", predict(p, b["x"])), b["labels"])
  options = dict(likelihood=dict.fromkeys("ab", "categorical"), estimation="empirical")
  [found] = factors(both, params, batch, **options).values()
  errors = 2 * np.float64(jax.nn.softmax(predict(params, x)))
  errors = errors - np.eye(3)[labels["a"]] - np.eye(3)[labels["b"]]
  close(found.outputs, errors.T @ errors / 6)
  with pytest.raises(ValueError, match="tuple"):
    factors(lambda p, b: (both(p, b)[0], {"a": 1}), params, batch, **options)


@pytest.mark.parametrize("weight", [0.0, 0.3, 2.0])
def test_exact_labels_of_outputs_of_several_lengths_add_up_in_the_mean(weight):
  """Each output has its own rows: the sum of the factors that each has alone."""
  predict, params, x = setup()
  both = lambda p, x: {"all": predict(p, x), "one": predict(p, x).reshape(-1, 1)}
  likelihood = {"all": "categorical", "one": (weight, "normal")}
  options = dict(likelihood=likelihood, token_averaging="expand", estimation="exact")
  curvature = optim.Curvature(both, params, x, **options)
  one = lambda key: curvature.estimate(params, x, key)["head"].outputs
  keys = jax.random.split(jax.random.key(0), 500)  # of the signs of an example's rows
  found = jax.jit(lambda keys: jax.lax.map(one, keys).mean(0))(keys)
  fisher = [fisher_of_outputs("categorical", y) for y in np.asarray(predict(params, x))]
  wanted = np.mean(fisher, axis=0) + weight * 2 * np.eye(3) / 3
  assert np.linalg.norm(found - wanted) < 0.1 * np.linalg.norm(wanted)
