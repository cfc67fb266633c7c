"""Distributions of outputs, weights of rows and several outputs, against NumPy in float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim


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
  factor = optim.kfac_factors(predict, params, x, None, estimation="exact", **options)["head"]
  rows = np.asarray(predict(params, x)).reshape(-1, 3)
  expected = np.mean([fisher_of_outputs(name, y) for y in rows], axis=0)
  np.testing.assert_allclose(factor.outputs, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["categorical", "normal", "bernoulli"])
@pytest.mark.thorough
def test_sampled_factors_average_to_the_exact_one(name):
  predict, params, x = setup((3, 2, 4))
  one = lambda key: optim.kfac_factors(predict, params, x, key, likelihood=name)["head"].outputs
  mean = jax.jit(lambda keys: jax.lax.map(one, keys).mean(0))(
    jax.random.split(jax.random.key(0), 3000)
  )
  exact = optim.kfac_factors(predict, params, x, None, likelihood=name, estimation="exact")["head"]
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
  factors = optim.kfac_factors(predict, params, x, None, **options)
  variance = np.float64(predict(params, x)[1])
  np.testing.assert_allclose(
    np.diag(factors["mean"].outputs), (1 / variance).mean(axis=0), rtol=1e-4
  )
  slope = 1 - np.exp(-(variance - 0.1))  # of softplus, by its own value
  expected = (slope**2 / (2 * variance**2)).mean(axis=0)
  np.testing.assert_allclose(np.diag(factors["variance"].outputs), expected, rtol=1e-4)


class Two(nn.Module):
  @nn.compact
  def __call__(self, x):
    return {"class": nn.Dense(3, name="one")(x), "box": nn.Dense(2, name="two")(x)}


def test_several_outputs_with_weights():
  x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
  params = jax.jit(Two().init)(jax.random.key(0), x)["params"]
  predict = lambda p, x: Two().apply({"params": p}, x)
  likelihood = {"class": "categorical", "box": (0.25, "normal")}
  for estimation, rng in (("exact", None), ("sampled", jax.random.key(0))):
    factors = optim.kfac_factors(
      predict, params, x, rng, likelihood=likelihood, estimation=estimation
    )
    assert factors["two"].outputs.shape == (2, 2)
    if estimation == "exact":
      np.testing.assert_allclose(factors["two"].outputs, 0.25 * 2 * np.eye(2), atol=1e-6)
      logits = np.asarray(predict(params, x)["class"])
      expected = np.mean([fisher_of_outputs("categorical", y) for y in logits], axis=0)
      np.testing.assert_allclose(factors["one"].outputs, expected, rtol=1e-4, atol=1e-6)


def test_a_likelihood_of_ones_own():
  """Poisson with log rates: the Fisher matrix is the rate."""
  poisson = optim.Likelihood(
    sample=lambda key, y: jax.random.poisson(key, jnp.exp(y)),
    gradient=lambda y, n: jnp.exp(y) - n,
    factor=lambda y, v: jnp.exp(0.5 * y) * v,
  )
  predict, params, x = setup()
  exact = optim.kfac_factors(predict, params, x, None, likelihood=poisson, estimation="exact")
  rates = np.exp(np.float64(predict(params, x)))
  np.testing.assert_allclose(np.diag(exact["head"].outputs), rates.mean(axis=0), rtol=1e-4)
  one = lambda key: optim.kfac_factors(predict, params, x, key, likelihood=poisson)["head"].outputs
  mean = jax.jit(lambda k: jax.lax.map(one, k).mean(0))(jax.random.split(jax.random.key(0), 3000))
  assert np.linalg.norm(mean - exact["head"].outputs) < 0.06 * np.linalg.norm(mean)


class Hidden(nn.Module):
  """A hidden layer over tokens, and a class for each token or for their mean."""

  per_token: bool

  @nn.compact
  def __call__(self, x, mask):
    h = nn.tanh(nn.Dense(5, name="hidden")(x)) * mask[..., None]
    h = h if self.per_token else h.sum(axis=1) / mask.sum(axis=1)[:, None].clip(1)
    return nn.Dense(3, name="head")(h)


@pytest.mark.parametrize("estimation", ["exact", "empirical"])
@pytest.mark.parametrize("per_token", [False, True], ids=["examples", "tokens"])
@pytest.mark.first(1)
def test_padding_counts_nowhere(per_token, estimation):
  """A padded batch gives the factors of the one without padding."""
  rng = np.random.default_rng(0)
  model = Hidden(per_token)
  x = rng.normal(size=(4, 3, 2)).astype(np.float32)
  y = rng.integers(0, 3, (4, 3) if per_token else 4)
  ones = np.ones((4, 3), np.float32)
  params = jax.jit(model.init)(jax.random.key(0), x, ones)["params"]

  def predict(p, batch):
    outputs = model.apply({"params": p}, batch["x"], batch["mask"])
    return outputs, batch["y"], batch.get("weights")

  whole = {"x": x, "y": y, "mask": ones}
  more = np.concatenate([x, 100 + x[:2]]), np.concatenate([y, y[:2]])
  mask = np.concatenate([ones, np.zeros((2, 3), np.float32)])
  padded = {"x": more[0], "y": more[1], "mask": mask, "weights": mask if per_token else mask[:, 0]}
  if per_token:  # and each example is longer
    longer = lambda a: np.concatenate([a, np.ones_like(a[:, :1])], axis=1)
    empty = np.zeros((6, 1), np.float32)
    padded = {"x": longer(padded["x"]), "y": longer(padded["y"]),
              "mask": np.concatenate([mask, empty], axis=1),
              "weights": np.concatenate([mask, empty], axis=1)}  # fmt: skip
  found, expected = (
    optim.kfac_factors(predict, params, b, None, estimation=estimation) for b in (padded, whole)
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


def test_weights_are_those_of_the_loss():
  """The Fisher matrix of a weighted mean, in closed form."""
  predict, params, x = setup()
  w = np.array([1.0, 2.0, 0.5, 1.0, 0.0, 3.0], np.float32)
  weighted = lambda p, x: (predict(p, x), None, jnp.asarray(w))
  factor = optim.kfac_factors(weighted, params, x, None, estimation="exact")["head"]
  rows = np.asarray(predict(params, x))
  expected = sum(a * fisher_of_outputs("categorical", y) for a, y in zip(w, rows)) / w.sum()
  np.testing.assert_allclose(factor.outputs, expected, rtol=1e-4, atol=1e-6)
  some = np.concatenate([x[w > 0], np.ones((5, 1))], axis=1)
  np.testing.assert_allclose(factor.inputs, some.T @ some / 5, rtol=1e-4, atol=1e-6)


def test_predictions_that_do_not_fit_are_refused():
  predict, params, x = setup()
  blocks = lambda predict, **kw: optim.kfac_blocks(predict, params, x, **kw)
  with pytest.raises(ValueError, match=r"shape \(6,\); allowed: \[batch, n\].*\[:, None\]$"):
    blocks(lambda p, x: predict(p, x)[:, 0], likelihood="normal")
  with pytest.raises(ValueError, match=r"shape \(6, 1\); .* n of 2 or more; for one .*bernoulli"):
    blocks(lambda p, x: predict(p, x)[:, :1])
  with pytest.raises(ValueError, match="the outputs are 2 arrays; .* stand in a tuple"):
    blocks(lambda p, x: [predict(p, x), jnp.zeros(6)])
  with pytest.raises(ValueError, match="the outputs are a list; allowed: the one array in it"):
    blocks(lambda p, x: [predict(p, x)])
  with pytest.raises(ValueError, match="depends on the parameters, so it is no targets"):
    blocks(lambda p, x: (predict(p, x), predict(p, x)), likelihood="normal")
  with pytest.raises(ValueError, match="leave them out"):
    blocks(lambda p, x: (predict(p, x), {"batch_stats": {}}))
  with pytest.raises(ValueError, match=r"weights have shape \(5,\); allowed .*\(6,\), \(6, 3\)"):
    blocks(lambda p, x: (predict(p, x), None, jnp.ones(5)), likelihood="normal")
  with pytest.raises(ValueError, match="likelihood is 'poisson'; allowed: categorical, normal"):
    blocks(predict, likelihood="poisson")
  by_class = lambda p, x: (predict(p, x), None, jnp.ones((6, 3)))
  with pytest.raises(ValueError, match=r"weights have shape \(6, 3\); .*\(6, 3\): \(6,\)$"):
    blocks(by_class)
  blocks(by_class, likelihood="bernoulli")
  with pytest.raises(ValueError, match="likelihood is {}; allowed: a likelihood for each key"):
    blocks(lambda p, x: {"a": predict(p, x)}, likelihood={})
  for wrong in (("normal",), ("normal", 0.5), (-1.0, "normal"), (float("nan"), "normal")):
    with pytest.raises(
      ValueError, match=r"allowed as a tuple: \(weight, likelihood\), a weight of 0"
    ):
      blocks(predict, likelihood=wrong)
  with pytest.raises(ValueError, match="outputs have the keys a; allowed: b"):
    blocks(lambda p, x: {"a": predict(p, x)}, likelihood={"b": "normal"})
  with pytest.raises(ValueError, match="outputs have the keys none; allowed: b"):
    blocks(predict, likelihood={"b": "normal"})
  with pytest.raises(ValueError, match="outputs have the keys 0; allowed: 1"):
    blocks(lambda p, x: {0: predict(p, x)}, likelihood={1: "normal"})
  # A part of a mapping is as strict as it is alone.
  one_column = lambda p, x: {"a": predict(p, x)[:, :1], "b": predict(p, x)[:, :1]}
  with pytest.raises(
    ValueError, match=r"outputs\['b'\] have shape \(6, 1\); .* of 2 or more; .*bern"
  ):
    blocks(one_column, likelihood={"a": "normal", "b": "categorical"})
  blocks(one_column, likelihood=dict.fromkeys("ab", "normal"))
  nested = lambda p, x: {"c": one_column(p, x)}
  with pytest.raises(
    ValueError, match=r"outputs\['c'\]\['b'\] have shape \(6, 1\); .* of 2 or more"
  ):
    blocks(nested, likelihood={"c": {"a": "normal", "b": "categorical"}})
  with pytest.raises(ValueError, match=r"outputs\['c'\] have the keys a, b; allowed: a, d"):
    blocks(nested, likelihood={"c": {"a": "normal", "d": "normal"}})
  with pytest.raises(ValueError, match=r"outputs\['a'\] are 1 arrays; the likelihood has 2"):
    blocks(one_column, likelihood={"a": "normal_variance", "b": "normal"})
  with pytest.raises(ValueError, match=r"outputs\['a'\] are a list; allowed: the one array"):
    blocks(lambda p, x: {"a": [predict(p, x)]}, likelihood={"a": "normal"})
  with pytest.raises(ValueError, match=r"weights have shape \(6, 3\); .*\(6, 3\): \(6,\)$"):
    blocks(
      lambda p, x: ({"a": predict(p, x)}, None, jnp.ones((6, 3))), likelihood={"a": "categorical"}
    )
  with pytest.raises(ValueError, match='"empirical" needs predict to return'):
    blocks(predict, estimation="empirical")


def test_parts_of_a_mapping_are_allowed_what_they_are_allowed_alone():
  """Weights of numbers beside logits, and a pair of arrays as one output."""
  predict, params, x = setup()
  y = predict(params, x)
  tokens = lambda p, x: jnp.stack([predict(p, x)] * y.shape[1], axis=1)
  both = lambda p, x: ({"class": tokens(p, x), "number": predict(p, x)}, None, jnp.ones(y.shape))
  assert optim.kfac_blocks(both, params, x, likelihood={"class": "categorical", "number": "normal"})
  pair = optim.Likelihood(lambda key, y: y, lambda y, t: y, parts=2)
  two = lambda p, x: {"a": (predict(p, x), predict(p, x))}
  assert optim.kfac_blocks(two, params, x, likelihood={"a": pair})


class Positions(nn.Module):
  """Words and their places, whose ids have no batch axis unless `spread`."""

  spread: bool

  @nn.compact
  def __call__(self, ids):
    places = jnp.arange(ids.shape[1])
    places = jnp.broadcast_to(places, ids.shape) if self.spread else places
    x = nn.Embed(7, 4, name="words")(inputs=ids) + nn.Embed(6, 4, name="places")(places)
    return nn.Dense(3, name="head")(inputs=nn.tanh(x))


@pytest.mark.thorough
def test_positions_without_a_batch_axis():
  """In the mean over labels their factors are those of positions given for each example."""
  ids = np.random.default_rng(0).integers(0, 7, (5, 6))
  params = jax.jit(Positions(True).init)(jax.random.key(0), ids)["params"]
  weights = (np.arange(6) < np.array([[6], [4], [5], [6], [3]])).astype(np.float32)
  predict = lambda spread: lambda p, b: (Positions(spread).apply({"params": p}, b), None, weights)
  one = lambda s: lambda k: optim.kfac_factors(predict(s), params, ids, k)["places"].outputs
  keys = jax.random.split(jax.random.key(0), 2000)
  shared, spread = (jax.jit(lambda k, s=s: jax.lax.map(one(s), k).mean(0))(keys) for s in (0, 1))
  # Of 24 rows that count 5 examples have 4.8 each; a place without the batch axis has 6.
  assert np.linalg.norm(shared / 6 - spread / 4.8) < 0.06 * np.linalg.norm(spread / 4.8)
  with pytest.raises(ValueError, match="places has rows without the batch axis"):
    optim.kfac_blocks(predict(False), params, ids, estimation="exact")


def test_the_weight_of_a_likelihood_is_that_of_given_labels():
  model, rng = nn.Dense(2), np.random.default_rng(0)
  x, y = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32)
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  predict = lambda p, b: (model.apply({"params": p}, b[0]), b[1])
  found = optim.kfac_factors(
    predict, params, (x, y), None, likelihood=(0.25, "normal"), estimation="empirical"
  )
  d = 2 * (np.float64(predict(params, (x, y))[0]) - y)  # of the sum of squares
  [factor] = found.values()
  np.testing.assert_allclose(factor.outputs, 0.25 * d.T @ d / 6, rtol=1e-5)


@pytest.mark.parametrize("kind", [bool, np.uint8, np.float32])
def test_labels_of_two_classes_may_have_any_type(kind):
  model, rng = nn.Dense(2), np.random.default_rng(0)
  x, y = rng.normal(size=(6, 3)).astype(np.float32), np.array([0, 1, 1, 0, 0, 1])
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  predict = lambda p, b: (model.apply({"params": p}, b[0]), b[1])
  found = optim.kfac_factors(predict, params, (x, y.astype(kind)), None, estimation="empirical")
  d = np.float64(jax.nn.softmax(predict(params, (x, y))[0])) - np.eye(2)[y]
  [factor] = found.values()
  np.testing.assert_allclose(factor.outputs, d.T @ d / 6, rtol=1e-5)


def test_labels_of_several_outputs_are_independent():
  model, x = (
    nn.Dense(3, use_bias=False),
    np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32),
  )
  params = {"kernel": jnp.zeros((2, 3))}
  both = lambda p, x: dict.fromkeys("ab", model.apply({"params": p}, x))
  options = dict(likelihood=dict.fromkeys("ab", "categorical"))
  one = lambda key: optim.kfac_factors(both, params, x, key, **options)["kernel"].outputs
  mean = jax.jit(lambda keys: jax.lax.map(one, keys).mean(0))(
    jax.random.split(jax.random.key(0), 500)
  )
  wanted = 2 * (np.eye(3) / 3 - 1 / 9)  # diag(p) - p p^T of each
  assert np.linalg.norm(mean - wanted) < 0.1 * np.linalg.norm(wanted)
