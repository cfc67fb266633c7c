"""Trees of parameters: blocks and factors whatever holds them, and what has no block, with reasons."""

import collections
from typing import Any, NamedTuple

from flax import nnx, struct
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.curvature.brute_force import close, factors
from tests.optim.small_net import curvature, predict, problem

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


class Pair(NamedTuple):
  one: Any
  two: Any


@struct.dataclass
class Params:
  one: Any
  two: Any
  name: str = struct.field(pytree_node=False, default="")


@pytest.mark.parametrize("make", [Pair, Params, lambda **p: collections.defaultdict(dict, p)])
def test_parameters_in_another_container_have_the_steps_of_a_dictionary(make):
  params, batch = problem()

  def of(p, b):
    one, two = (p["one"], p["two"]) if isinstance(p, dict) else (p.one, p.two)
    return predict({"one": one, "two": two}, b)

  held, options = make(**params), dict(estimation="exact")
  step = lambda tx, p: jax.jit(tx.update)(p, tx.init(p), p, batch=batch)[0]
  found = step(optim.kfac(0.1, optim.Curvature(of, held, batch, **options)), held)
  expected = step(optim.kfac(0.1, curvature(params, batch, **options)), params)
  assert jax.tree.structure(found) == jax.tree.structure(held)
  close(jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.parametrize("box", ["nnx state", "partitioned", "list"])
def test_boxes_of_flax_and_lists_have_the_factors_of_bare_arrays(box):
  params, batch = problem()
  if box == "nnx state":
    held = nnx.State(jax.tree.map(nnx.Param, params))
    of = lambda p, b: predict(nnx.to_pure_dict(p), b)
  elif box == "partitioned":
    held = jax.tree.map(lambda x: nn.Partitioned(x, (None,) * x.ndim), params)
    of = lambda p, b: predict(nn.unbox(p), b)
  else:
    held = [params["one"], params["two"]]
    of = lambda p, b: predict({"one": p[0], "two": p[1]}, b)
  found, expected = factors(of, held, batch), factors(predict, params, batch)
  assert list(found) == (["0", "1"] if box == "list" else ["one", "two"])
  close(list(found.values()), list(expected.values()))


@pytest.mark.parametrize("pattern", ["^one/", ["^one/"], ("^one/kernel", "^one/bias")])
def test_parameters_that_are_left_out_take_the_plain_gradient(pattern):
  params, batch = problem()
  found = curvature(params, batch, unpreconditioned=pattern)
  blocks = {b.name: b.kind for b in found.blocks}
  assert blocks == {"one/bias": "gradient", "one/kernel": "gradient", "two": "kronecker"}
  tx = optim.scale_by_kfac(found)
  updates, _ = tx.update(params, tx.init(params), params, batch=batch, rng=jax.random.key(0))
  close(updates["one"], params["one"], rtol=0, atol=0)


REASONS = {
  "scale": lambda p, x: x * p["w"][0] @ p["head"],
  "read twice": lambda p, x: (
    (x @ p["w"])[:, :4] @ p["head"][:4] + (x @ p["w"][:4].reshape(5, 4)).mean(1, keepdims=True)
  ),
  "loss": lambda p, x: x @ p["w"] @ p["head"] + jnp.sum(p["w"]),
  "diagonal": lambda p, x: jnp.einsum("bi,ii->bi", x, p["w"]) @ p["head"],
  "custom_vjp": lambda p, x: _product(x, p["w"]) @ p["head"],
  "unused": lambda p, x: x @ p["head"],
}


@jax.custom_vjp
def _product(x, w):
  return x @ w


_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@pytest.mark.parametrize("how", REASONS)
def test_what_has_no_layer_is_told_with_its_reason(how):
  rng = np.random.default_rng(0)
  params = {n: rng.normal(size=(5, d)).astype(np.float32) for n, d in (("w", 5), ("head", 3))}
  found = optim.Curvature(REASONS[how], params, X)
  blocks = {b.name: b for b in found.blocks}
  assert blocks["head"].kind == "kronecker" and blocks["w"].kind == "gradient"
  assert blocks["w"].reason and f"w  {blocks['w'].reason}" in str(found)


def test_layers_without_elements_hinder_none():
  class Empty(nn.Module):
    @nn.compact
    def __call__(self, x):
      other = nn.Dense(0, kernel_init=nn.initializers.zeros, name="empty")(x)
      return jnp.concatenate([nn.Dense(2, name="full")(x), other], axis=-1)

  params = jax.jit(Empty().init)(jax.random.key(0), X)["params"]
  of = lambda p, x: Empty().apply({"params": p}, x)
  found = optim.Curvature(of, params, X, estimation="exact")
  alone = lambda p, x: x @ p["kernel"] + p["bias"]
  [wanted] = factors(alone, params["full"], X).values()
  close(found.factors(params, X)["full"], wanted)
  tx = optim.scale_by_kfac(found)
  updates, _ = tx.update(params, tx.init(params), params, batch=X)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("unused", [False, None])
def test_a_bias_that_its_layer_does_not_use_has_no_influence(unused):
  """Flax ignores entries of a tree that no module asks for."""
  model = nn.Sequential([nn.Dense(4, use_bias=bool(unused)), nn.Dense(3)])
  without = model.init(jax.random.key(0), X)["params"]
  held = without | {"layers_0": without["layers_0"] | {"bias": jnp.ones(4)}}
  of = lambda params, x: model.apply({"params": params}, x)
  updates = []
  for params in (without, held):
    tx = optim.scale_by_kfac(optim.Curvature(of, params, X, estimation="exact"))
    grads = jax.grad(lambda params: jnp.sum(jnp.sin(of(params, X))))(params)
    updates.append(jax.jit(tx.update)(grads, tx.init(params), params, batch=X)[0])
  assert not updates[1]["layers_0"].pop("bias").any()
  jax.tree.map(np.testing.assert_array_equal, *updates)
