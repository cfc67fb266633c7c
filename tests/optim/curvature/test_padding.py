"""Padding counts in no factor: examples and rows of weight 0, in whatever order a layer has them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.curvature.brute_force import close, factors, with_ones


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
    wider = np.concatenate([mask, np.zeros((6, 1), np.float32)], axis=1)
    padded = {"x": longer(padded["x"]), "y": longer(padded["y"]), "mask": wider, "weights": wider}
  found, expected = (factors(predict, params, b, estimation=estimation) for b in (padded, whole))
  close(found, expected)


def test_weights_are_those_of_the_loss():
  """The Fisher matrix of a weighted mean, in closed form."""
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(6, 4)).astype(np.float32), np.float32([1.0, 2.0, 0.5, 1.0, 0.0, 3.0])
  params = {"kernel": rng.normal(size=(4, 3)).astype(np.float32), "bias": np.zeros(3, np.float32)}
  apply = lambda p, x: x @ p["kernel"] + p["bias"]
  [factor] = factors(lambda p, b: (apply(p, b[0]), None, b[1]), params, (x, w)).values()
  p = np.asarray(jax.nn.softmax(apply(params, x)))
  fisher = [np.diag(q) - np.outer(q, q) for q in p]
  close(factor.outputs, sum(a * f for a, f in zip(w, fisher)) / w.sum())
  some = with_ones(x[w > 0])
  close(factor.inputs, some.T @ some / 5)


class Turned(nn.Module):
  """A layer over tokens; its rows are [batch, tokens], or [tokens, batch], or pairs stacked."""

  how: str = "first"

  @nn.compact
  def __call__(self, x):
    dense = lambda x: nn.tanh(nn.Dense(5, name="dense")(nn.LayerNorm(name="norm")(x)))
    if self.how == "turned":
      h = dense(x.swapaxes(0, 1)).swapaxes(0, 1)
    elif self.how == "stacked":
      h = jnp.stack(jnp.split(dense(jnp.concatenate([x[:, 0], x[:, 1]])), 2), axis=1)
    elif self.how == "flat":
      h = dense(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:2], 5)
    else:
      h = dense(x)
    return nn.Dense(3, name="head")(h.reshape(*h.shape[:-2], -1))


def turned(how):
  one = lambda p, x: Turned().apply({"params": p}, x)
  return {
    "mapped": lambda p, x: jax.vmap(lambda x: one(p, x))(x),
    "looped": lambda p, x: jax.lax.map(lambda x: one(p, x), x),
  }.get(how, lambda p, x: Turned(how).apply({"params": p}, x))


@functools.cache
def pairs(examples):
  x = np.random.default_rng(1).normal(size=(examples, 2, 4)) + np.arange(4)
  return x.astype(np.float32), jax.jit(Turned().init)(jax.random.key(0), x)["params"]


WAYS = ("first", "turned", "stacked", "flat", "mapped", "looped")


@pytest.mark.parametrize("examples", [2, 4])  # 2: as many tokens as examples
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.first(3)
def test_padded_examples_count_nowhere_in_whatever_order_rows_are(how, examples):
  """Also in the diagonals of normalisations, and in EK-FAC's moments of examples."""
  x, params = pairs(examples)
  padded = np.concatenate([x, 100 + x])
  weights = np.repeat(np.float32([1, 0]), examples)
  weighted = lambda p, b: (turned(how)(p, b["x"]), None, b["w"])
  plain = optim.Curvature(turned("first"), params, x, norms="diagonal", estimation="exact")
  batch = {"x": padded, "w": weights}
  curvature = optim.Curvature(weighted, params, batch, norms="diagonal", estimation="exact")
  close(curvature.factors(params, batch), plain.factors(params, x))
  if how == "first":
    moments = lambda c, b: scaled_moments(c, params, b)
    close(moments(curvature, batch), moments(plain, x))


def scaled_moments(curvature, params, batch):
  tx = optim.scale_by_ekfac(curvature, moments="examples", factor_period=1, inverse_period=1)
  state = tx.init(params)
  told = dict(batch=batch, rng=jax.random.key(0))
  return jax.jit(lambda s: tx.update(params, s, params, **told)[1])(state).second_moments


class Tagger(nn.Module):
  @nn.compact
  def __call__(self, x, lengths):
    return nn.Dense(3)(nn.RNN(nn.SimpleCell(4, name="cell"))(x, seq_lengths=lengths))


def test_padded_steps_of_a_recurrent_net_count_in_no_factor():
  """Also those of which every example is padding."""
  rng = np.random.default_rng(0)
  x, lengths = rng.normal(size=(3, 6, 2)).astype(np.float32), np.array([3, 2, 2])
  real = (np.arange(6) < lengths[:, None]).astype(np.float32)
  params = jax.jit(Tagger().init)(jax.random.key(0), x, lengths)["params"]
  tagged = lambda p, b: (
    Tagger().apply({"params": p}, b["x"], b["lengths"]),
    *(b["labels"], b["real"]),
  )
  batch = dict(x=x, labels=rng.integers(0, 3, (3, 6)), real=real, lengths=lengths)
  short = {k: v[:, :3] if v.ndim > 1 else v for k, v in batch.items()}
  found, expected = (factors(tagged, params, b, estimation="empirical") for b in (batch, short))
  close(found, expected)
  rows = with_ones(x[real > 0])
  close(found["cell/i"].inputs, rows.T @ rows / len(rows))


class Padded(nn.Module):
  """Mixing over tokens and over channels, as many of each, and the mean of the real tokens."""

  @nn.compact
  def __call__(self, x, real):
    x = x * real[..., None]
    x += jnp.swapaxes(nn.Dense(6, name="tokens")(jnp.swapaxes(x, 1, 2)), 1, 2) * real[..., None]
    x += jnp.tanh(nn.Dense(6, name="channels")(x)) * real[..., None]
    return nn.Dense(3, name="head")(x.sum(1) / real.sum(1, keepdims=True))


def test_a_head_of_zeros_hides_no_row():
  """The inputs' factors do not depend on the head: those of real tokens, and of all channels."""
  rng = np.random.default_rng(0)
  real = np.arange(6) < np.array([[6], [3], [2], [5]])
  batch = dict(x=rng.normal(size=(4, 6, 6)).astype(np.float32), real=real)
  batch |= dict(labels=np.zeros(4, int), weights=np.ones(4, np.float32))
  params = jax.jit(Padded().init)(jax.random.key(0), batch["x"], real)["params"]

  def predict(p, b):
    return Padded().apply({"params": p}, b["x"], b["real"]), b["labels"], b["weights"], b["real"]

  def of(head):
    p = {**params, "head": jax.tree.map(lambda x: head * x, params["head"])}
    return factors(predict, p, batch, estimation="empirical")

  at_zero, usual = of(0.0), of(1.0)
  for layer in ("tokens", "channels", "head"):
    close(at_zero[layer].inputs, usual[layer].inputs)
  assert not np.any(at_zero["tokens"].outputs) and np.any(usual["tokens"].outputs)
  rows = np.einsum("btc,bt->btc", batch["x"], real).swapaxes(1, 2).reshape(-1, 6)
  rows = with_ones(rows)
  close(at_zero["tokens"].inputs, rows.T @ rows / 24, atol=1e-5)


class Opposed(nn.Module):
  """Two logits z and -z, of the mean over tokens: ones as their gradients cancel."""

  @nn.compact
  def __call__(self, x):
    z = nn.Dense(1, name="out")(nn.tanh(nn.Dense(4, name="in")(x)).mean(axis=1))
    return jnp.concatenate([z, -z], axis=1)


def test_exact_factors_count_all_rows_where_outputs_cancel():
  x = np.random.default_rng(0).normal(size=(6, 3, 5)).astype(np.float32)
  params = jax.jit(Opposed().init)(jax.random.key(0), x)["params"]
  predict = lambda p, x: Opposed().apply({"params": p}, x)
  real = lambda x: jnp.ones(x.shape[:2], bool)
  close(
    factors(lambda p, x: (predict(p, x), None, None, real(x)), params, x),
    factors(predict, params, x),
  )
  two = lambda p, x: dict(zip("ab", jnp.split(predict(p, x), 2, axis=1)))
  apart = lambda p, x: (two(p, x), None, None, real(x))
  options = dict(likelihood={"a": "normal", "b": "normal"})
  close(factors(apart, params, x, **options), factors(two, params, x, **options))


class Sorted(nn.Module):
  """A layer that sees the examples in the order of their first numbers."""

  @nn.compact
  def __call__(self, x, order):
    y = nn.tanh(nn.Dense(4, name="in")(x[order]))
    return nn.Dense(3, name="head")(jnp.zeros_like(y).at[order].set(y))


@pytest.mark.parametrize("tokens", [(), (2,)])
def test_padding_counts_nowhere_where_a_batch_is_a_whole(tokens):
  rng, model = np.random.default_rng(0), Sorted()
  x = rng.normal(size=(6, *tokens, 3)).astype(np.float32)
  weights = np.float32([1, 0, 1, 1, 0, 1])
  params = jax.jit(model.init)(jax.random.key(0), x, np.arange(6))["params"]
  predict = lambda p, b: (model.apply({"params": p}, b["x"], b["order"]), None, b["weights"])
  batch = {"x": x, "weights": weights, "order": np.argsort(x.reshape(6, -1)[:, 0])}
  straight = lambda p, b: predict(p, b | {"order": jnp.arange(len(b["x"]))})
  sampled = lambda f, **options: factors(f, params, batch, jax.random.key(1), **options)
  close(sampled(predict, in_axes=None), sampled(straight))


class Normalised(nn.Module):
  @nn.compact
  def __call__(self, x):
    y = nn.BatchNorm(use_running_average=False)(nn.tanh(nn.Dense(8, name="in")(x)))
    return nn.Dense(3, name="head")(nn.relu(y))
