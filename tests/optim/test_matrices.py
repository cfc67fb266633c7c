"""Kernels in any layout make the steps of the plain matrices that they stand for."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim.curvature import report

STEPS = 6
# Square matrices: of others the first factors have no full rank, and no basis of their own.
SHAPES = {
  "conv": (8, 2, 2, 2),  # PyTorch's [outputs, inputs, height, width]
  "linear": (8, 8),  # [outputs, inputs]
  "qkv": (24, 8),  # three layers in one, [outputs, inputs]
  "heads": (8, 2, 4),  # [inputs, heads, features]: one matrix
  "each": (2, 4, 4),  # a matrix of each head, [heads, outputs, inputs]
  "layers": (3, 8, 8),  # of a loop, [layers, inputs, outputs]
}
BIASES = {"linear": (8,), "layers": (3, 8)}


def tree_of(rng, *leading):
  normal = lambda shape: rng.normal(size=(*leading, *shape)).astype(np.float32)
  return {
    name: {"kernel": normal(shape)} | ({"bias": normal(BIASES[name])} if name in BIASES else {})
    for name, shape in SHAPES.items()
  }


def predict(params, x):
  """From images [batch, 4, 4, 2] to outputs [batch, 8], with each kind of kernel."""
  w = {name: layer["kernel"] for name, layer in params.items()}
  x = jax.lax.conv_general_dilated(
    x, w["conv"], (2, 2), "VALID", None, None, ("NHWC", "OIHW", "NHWC")
  )
  x = x.reshape(len(x), -1, 8)  # [batch, tokens, 8]
  x = jnp.tanh(x @ w["linear"].T + params["linear"]["bias"])
  q, k, v = (x @ part.T for part in jnp.split(w["qkv"], 3))
  x = jax.nn.softmax(jnp.einsum("bti,bsi->bts", q, k)) @ v
  x = jnp.einsum("bti,ihk->bthk", x, w["heads"])
  x = jnp.einsum("bthi,hoi->btho", jnp.tanh(x), w["each"]).reshape(x.shape[0], -1, 8)
  step = lambda x, layer: (jnp.tanh(x @ layer["kernel"] + layer["bias"]), None)
  return jax.lax.scan(step, x, params["layers"])[0].mean(axis=1)


def apart(tree):
  """The plain matrices [inputs, outputs] and vectors of a tree."""
  w = {name: np.asarray(layer["kernel"]) for name, layer in tree.items()}
  found = {"conv": w["conv"].transpose(2, 3, 1, 0).reshape(8, 8), "linear": w["linear"].T}
  found |= {f"qkv_{i}": part.T for i, part in enumerate(np.split(w["qkv"], 3))}
  found["heads"] = w["heads"].reshape(8, 8)
  found |= {f"each_{i}": part.T for i, part in enumerate(w["each"])}
  found |= {f"layers_{i}": part for i, part in enumerate(w["layers"])}
  found = {name: {"kernel": x} for name, x in found.items()}
  found["linear"]["bias"] = tree["linear"]["bias"]
  for i in range(3):
    found[f"layers_{i}"]["bias"] = tree["layers"]["bias"][i]
  return found


_RNG = np.random.default_rng(0)
PARAMS, GRADIENTS, X = tree_of(_RNG), tree_of(_RNG, STEPS), _RNG.normal(size=(2, 4, 4, 2))
MATRICES = optim.matrix_axes(predict, PARAMS, np.float32(X))


def shampoo(matrices):
  return optim.shampoo(0.1, matrices=matrices, basis_period=2, corrected=True, eps=1e-3)


MAKES = {
  "soap": lambda m: optim.soap(0.1, matrices=m, basis_period=2, eps=1e-3),
  "shampoo": shampoo,
  "shampoo by eigenvalues": lambda m: optim.scale_by_shampoo(matrices=m, ridge=1e-2),
  "muon": lambda m: optim.muon(0.1, matrices=m),
  "normuon": lambda m: optim.muon(0.1, matrices=m, normuon=True),
  "lamb": lambda m: optim.lamb(0.1, weight_decay=0.1, matrices=m),
  "graft": lambda m: optim.graft(optim.adam(0.1), shampoo(m), matrices=m),
}


def run(tx, params, gradients):
  tx = optax.with_extra_args_support(tx)

  def step(state, g):
    updates, state = tx.update(g, state, params)
    return state, updates

  return jax.jit(lambda state: jax.lax.scan(step, state, gradients)[1])(tx.init(params))


def step_of(tree, t):
  return jax.tree.map(lambda x: np.asarray(x[t]), tree)


_FIRST = ("soap", "shampoo by eigenvalues", "muon", "normuon", "lamb")


@pytest.mark.parametrize("name", sorted(MAKES, key=lambda name: name not in _FIRST))
@pytest.mark.first(len(_FIRST))
def test_steps_are_those_of_plain_matrices(name):
  found = run(MAKES[name](MATRICES), PARAMS, GRADIENTS)
  stacks = [apart(step_of(GRADIENTS, t)) for t in range(STEPS)]
  plain = jax.tree.map(lambda *x: np.stack(x), *stacks)
  wanted = run(MAKES[name](None), apart(PARAMS), plain)
  for t in range(STEPS):
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4, err_msg=str(t))
    jax.tree.map(same, apart(step_of(found, t)), step_of(wanted, t))
  assert any(np.any(x) for x in jax.tree.leaves(found))


def axes(path, shape):
  """What `matrix_axes` finds, said by hand; of the fused layers one matrix."""
  known = {
    "conv/kernel": optim.Axes((), (2, 3, 1), (0,)),
    "linear/kernel": optim.Axes((), (1,), (0,)),
    "qkv/kernel": optim.Axes((), (1,), (0,)),
    "heads/kernel": optim.Axes((), (0,), (1, 2)),
    "each/kernel": optim.Axes((0,), (2,), (1,)),
    "layers/kernel": optim.Axes((0,), (1,), (2,)),
    "layers/bias": optim.Axes((0,)),
  }
  return known.get(path)


@pytest.mark.parametrize("name", ["muon", "soap"])
@pytest.mark.first(1)
def test_axes_may_be_given_by_a_function(name):
  found = run(MAKES[name](optim.Matrices(axes=axes)), PARAMS, GRADIENTS)
  wanted = run(MAKES[name](MATRICES), PARAMS, GRADIENTS)
  fused = found.pop("qkv"), wanted.pop("qkv")
  same = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
  jax.tree.map(same, found, wanted)
  assert np.abs(fused[0]["kernel"] - fused[1]["kernel"]).max() > 1e-3


def test_a_guess_is_told_once(caplog):
  report.say.cache_clear()
  params = {"heads": {"kernel": jnp.ones((4, 2, 3))}}
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      optim.soap(0.1).init(params)
  [told] = [r.getMessage() for r in caplog.records if "guessed" in r.getMessage()]
  assert "heads/kernel" in told and "matrix_axes" in told
  with caplog.at_level(logging.WARNING):
    optim.soap(0.1, matrices=MATRICES).init(PARAMS)
  assert len([r for r in caplog.records if "guessed" in r.getMessage()]) == 1


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return x + nn.tanh(nn.Dense(4, name="dense")(nn.LayerNorm(name="norm")(x))), None


class Loop(nn.Module):
  """Five layers in a loop: arrays [5, ...]."""

  @nn.compact
  def __call__(self, x):
    loop = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=5)
    return nn.Dense(3, name="head")(loop(name="blocks")(x, None)[0])


def test_lamb_has_a_norm_for_each_layer_of_a_loop():
  """Steps of a rate of 0.1 have 0.1 times the length of what they move, in every layer."""
  x = np.ones((2, 4), np.float32)
  params = jax.jit(Loop().init)(jax.random.key(0), x)["params"]
  keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(params)))
  keys = jax.tree.unflatten(jax.tree.structure(params), list(keys))
  params = jax.tree.map(lambda p, k: p + jax.random.normal(k, p.shape), params, keys)
  apply = lambda params, x: Loop().apply({"params": params}, x)
  tx = optim.lamb(0.1, matrices=optim.matrix_axes(apply, params, x))
  updates, _ = tx.update(jax.tree.map(jnp.cos, params), tx.init(params), params)
  norms = lambda tree: jax.tree.map(lambda x: np.linalg.norm(np.reshape(x, (5, -1)), axis=1), tree)
  same = lambda a, b: np.testing.assert_allclose(a, 0.1 * b, rtol=1e-5)
  jax.tree.map(same, norms(updates["blocks"]), norms(params["blocks"]))
  whole = lambda tree: jax.tree.map(np.linalg.norm, tree["head"])
  jax.tree.map(same, whole(updates), whole(params))


@pytest.mark.parametrize("how", ["split", "reshaped"])
def test_outputs_that_are_sliced_are_matrices_of_their_own(how):
  """Fused heads, as in one product for queries, keys and values."""

  def predict(params, x):
    y = x @ params["qkv"]
    if how == "split":
      q, k, v = jnp.split(y, 3, axis=-1)
    else:
      q, k, v = y.reshape(*y.shape[:2], 3, 8).transpose(2, 0, 1, 3)
    return (jax.nn.softmax(jnp.einsum("bti,bsi->bts", q, k)) @ v).mean(axis=1)

  rng = np.random.default_rng(0)
  params = {"qkv": rng.normal(size=(8, 24)).astype(np.float32)}
  grads = {"qkv": rng.normal(size=(8, 24)).astype(np.float32)}
  matrices = optim.matrix_axes(predict, params, np.zeros((2, 5, 8), np.float32))
  tx = optim.muon(0.1, matrices=matrices)
  step = tx.update(grads, tx.init(params), params)[0]["qkv"]
  plain = optim.muon(0.1)
  for i, (g, w) in enumerate(zip(np.split(grads["qkv"], 3, 1), np.split(params["qkv"], 3, 1))):
    alone = {"kernel": w}
    wanted = plain.update({"kernel": g}, plain.init(alone), alone)[0]["kernel"]
    np.testing.assert_allclose(step[:, 8 * i : 8 * i + 8], wanted, rtol=1e-4, atol=1e-6)
