"""Parameters on their way to a product: moved, cut, shared, masked, computed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.curvature.brute_force import close, factors, kinds, with_ones
from tests.optim.small_net import predict, problem

P = PartitionSpec
X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def dense(d_in=5, d_out=4, seed=0):
  rng = np.random.default_rng(seed)
  return 0.5 * rng.normal(size=(d_in, d_out)).astype(np.float32)


# How a kernel is kept, and how it is read.
MOVED = {
  "transposed": (lambda w: w.T, lambda w: w.T),
  "reversed": (lambda w: w[:, ::-1], lambda w: w[:, ::-1]),
  "four axes": (lambda w: w.reshape(5, 2, 2, 1), lambda w: w.reshape(5, 4)),
  "axes swapped": (
    lambda w: w.reshape(5, 2, 2).transpose(2, 0, 1),
    lambda w: w.transpose(1, 2, 0).reshape(5, 4),
  ),
  "barrier": (lambda w: w, jax.lax.optimization_barrier),
  "cast": (lambda w: w, lambda w: w.astype(jnp.float32)),
  "jitted": (lambda w: w, jax.jit(lambda w: w[:].astype(jnp.float32))),
}


@pytest.mark.parametrize("how", sorted(MOVED))  # "axes swapped" first
@pytest.mark.first(1)
def test_a_kernel_that_is_kept_in_another_layout_has_the_factors_and_steps_of_a_matrix(how):
  store, read = MOVED[how]
  wanted = {"w": dense(), "b": dense(1)[0], "head": dense(4, 3, 1)}
  net = lambda of: lambda p, x: jnp.tanh(x @ of(p["w"]) + p["b"]) @ p["head"]
  params = wanted | {"w": np.ascontiguousarray(store(wanted["w"]))}
  given, plain = net(read), net(lambda w: w)
  close(factors(given, params, X), factors(plain, wanted, X))

  def update(predict, params):
    tx = optim.scale_by_kfac(optim.Curvature(predict, params, X, estimation="exact"))
    grads = jax.grad(lambda p: jnp.sin(predict(p, X)).sum())(params)
    return jax.jit(tx.update)(grads, tx.init(params), params, batch=X)[0]

  moved, straight = update(given, params), update(plain, wanted)
  close(moved["w"], store(np.asarray(straight["w"])))
  close(moved["b"], straight["b"])


def test_slices_of_a_fused_kernel_are_layers_of_their_own():
  """As of q, k and v in one array, with or without their biases in one."""
  rng = np.random.default_rng(1)
  x = rng.normal(size=(4, 3, 5)).astype(np.float32)
  apart = {n: {"w": dense(5, 4, i), "b": dense(1, 4, 9 + i)[0]} for i, n in enumerate("qkv")}
  fused = {n: np.concatenate([p[n] for p in apart.values()], axis=-1) for n in "wb"}
  head = {"head": dense(4, 3, 5)}

  def attend(q, k, v, head):
    return (jax.nn.softmax(q @ k.mT) @ v).mean(axis=1) @ head

  def separate(p, x):
    return attend(*(x @ p[n]["w"] + p[n]["b"] for n in "qkv"), p["head"])

  def split_outputs(p, x):
    return attend(*jnp.split(x @ p["w"] + p["b"], 3, axis=-1), p["head"])

  def split_kernels(p, x):
    w, b = jnp.split(p["w"], 3, axis=-1), jnp.split(p["b"], 3)
    return attend(*(x @ w + b for w, b in zip(w, b)), p["head"])

  def sliced(p, x):
    own = lambda i: x @ p["w"][:, 4 * i : 4 * i + 4]
    return attend(*(own(i) for i in range(3)), p["head"])

  expected = factors(separate, apart | head, x)
  [whole] = [v for k, v in factors(split_outputs, fused | head, x).items() if k != "head"]
  close(whole.inputs, expected["q"].inputs)
  for i, n in enumerate("qkv"):
    part = slice(4 * i, 4 * i + 4)
    close(whole.outputs[part, part], expected[n].outputs)
  found = [v for k, v in factors(split_kernels, fused | head, x).items() if k != "head"]
  assert len(found) == 3
  for own, n in zip(found, "qkv"):
    close(own.inputs[:5, :5], expected[n].inputs[:5, :5])
    close(own.outputs, expected[n].outputs)
  bare = {n: {"w": p["w"], "b": 0 * p["b"]} for n, p in apart.items()}
  expected = factors(separate, bare | head, x)
  found = factors(sliced, {"w": fused["w"]} | head, x)
  for name, n in zip(sorted(k for k in found if k != "head"), "qkv"):
    close(found[name].inputs, expected[n].inputs[:5, :5])
    close(found[name].outputs, expected[n].outputs)


def test_the_leading_part_of_a_matrix_has_the_factors_of_zeros_for_the_rest():
  """As in models for sequences of several lengths."""

  def leading(p, x):
    n = x.shape[-1]
    y = nn.tanh(x @ p["w"][:n, :n] + p["b"][:n]).mean(axis=1)
    return y @ p["head"][:n]

  def whole(p, x):
    n = x.shape[-1]
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, 7 - n)))
    y = nn.tanh((padded @ p["w"] + p["b"])[..., :n]).mean(axis=1)
    return jnp.pad(y, ((0, 0), (0, 7 - n))) @ p["head"]

  params = {"w": dense(7, 7), "b": dense(1, 7)[0], "head": dense(7, 3)}
  rng = np.random.default_rng(0)
  long, short = (rng.normal(size=(6, 3, n)).astype(np.float32) for n in (7, 5))
  for example, x in ((long, short), (short, long)):
    curvature = optim.Curvature(leading, params, example, estimation="exact")
    close(curvature.factors(params, x), factors(whole, params, x))


class Tied(nn.Module):
  """Words whose matrix is the head, too."""

  tied: bool = True

  @nn.compact
  def __call__(self, ids):
    words = nn.Embed(7, 3, name="words")
    x = nn.tanh(words(ids)).mean(axis=1)
    return words.attend(x) if self.tied else nn.Dense(7, use_bias=False, name="head")(x)


def mixed(uses):
  """The product of mixed factors: each of trace 1, in the proportion of the products' traces."""
  t = np.array([np.trace(a) * np.trace(g) for a, g in uses])
  inputs = sum(p * a / np.trace(a) for p, (a, _) in zip(t / t.sum(), uses))
  outputs = sum(p * g / np.trace(g) for p, (_, g) in zip(t / t.sum(), uses))
  return np.kron(inputs, outputs) * t.sum()


def test_a_tied_embedding_mixes_the_factors_of_both_uses():
  ids = np.random.default_rng(0).integers(0, 7, (6, 4))
  params = jax.jit(Tied().init)(jax.random.key(0), ids)["params"]
  params = {"words": {"embedding": params["words"]["embedding"] + 0.2}}
  untied = {**params, "head": {"kernel": params["words"]["embedding"].T}}
  of = lambda tied, p: factors(lambda p, ids: Tied(tied).apply({"params": p}, ids), p, ids)
  apart, together = of(False, untied), of(True, params)["words"]
  uses = [
    (np.diag(apart["words"].inputs.values), np.asarray(apart["words"].outputs)),
    # The head's outputs are words: only the diagonal of their factor is kept.
    (np.diag(np.diag(apart["head"].outputs)), np.asarray(apart["head"].inputs)),
  ]
  product = np.kron(np.diag(together.inputs.values), together.outputs)
  np.testing.assert_allclose(product, mixed(uses), rtol=1e-4, atol=1e-8)


TABLES = {
  "word by word": lambda table, ids: jax.vmap(jax.vmap(lambda i: table[i]))(ids),
  "columns": lambda table, ids: jnp.moveaxis(table.T[:, ids], 0, -1),
  "take": lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"),
  "two axes": lambda table, ids: table.reshape(7, 2, 2)[ids].reshape(*ids.shape, 4),
}


@pytest.mark.parametrize("how", TABLES)
@pytest.mark.first(2)
def test_a_table_may_be_looked_up_in_any_layout(how):
  ids = np.random.default_rng(0).integers(0, 7, (6, 3))
  params = {"table": dense(7, 4), "head": dense(4, 3, 1)}
  net = lambda read: lambda p, x: jnp.tanh(read(p["table"], x)).mean(1) @ p["head"]
  found = factors(net(TABLES[how]), params, ids)
  wanted = factors(net(lambda table, x: x @ table), params, np.eye(7, dtype=np.float32)[ids])
  close(found["table"].inputs.values, np.bincount(ids.ravel(), minlength=7) / ids.size)
  close(found["table"].outputs, wanted["table"].outputs)
  close(found["head"], wanted["head"])


def test_a_kernel_and_its_transpose_are_one_layer():
  """An autoencoder with tied weights; the bias of the first use has no row in the second."""
  params = {"one": {"kernel": dense(), "bias": dense(1)[0]}}

  def tied(p, x):
    w, b = p["one"]["kernel"], p["one"]["bias"]
    return nn.tanh(x @ w + b) @ w.T

  apart = {"one": params["one"], "two": {"kernel": params["one"]["kernel"].T}}
  untied = lambda p, x: nn.tanh(x @ p["one"]["kernel"] + p["one"]["bias"]) @ p["two"]["kernel"]
  each, [both] = factors(untied, apart, X), factors(tied, params, X).values()
  outer = np.zeros((6, 6))
  outer[:5, :5] = each["two"].outputs
  uses = [each["one"], (outer, np.asarray(each["two"].inputs))]
  uses = [tuple(map(np.asarray, use)) for use in uses]
  np.testing.assert_allclose(np.kron(*both), mixed(uses), rtol=1e-4, atol=1e-7)


MASKS = {
  "where": lambda w, mask: jnp.where(mask, w, 0),
  "product": lambda w, mask: w * mask,
  "tril": lambda w, mask: jnp.tril(w),
  "array of JAX": lambda w, mask: jax.jit(jnp.where)(jnp.asarray(mask), w, 0),
}


@pytest.mark.parametrize("how", MASKS)
@pytest.mark.first(2)
def test_a_kernel_under_a_constant_mask_has_the_factors_of_its_product_and_masked_steps(how):
  mask = np.tril(np.ones((5, 5), bool))
  params = {"w": dense(5, 5), "b": dense(1, 5)[0], "head": dense(5, 3)}
  masked = lambda p, x: jnp.tanh(x @ MASKS[how](p["w"], mask) + p["b"]) @ p["head"]
  plain = lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["head"]
  held = params | {"w": params["w"] * mask}
  expected = factors(plain, held, X)
  close(factors(masked, params, X), expected)
  tx = optim.scale_by_kfac(optim.Curvature(masked, params, X, estimation="exact"))
  grads = jax.grad(lambda p: jnp.sin(masked(p, X)).sum())(params)
  update = jax.jit(tx.update)(grads, tx.init(params), params, batch=X)[0]
  a, g = (0.8 * np.eye(len(f)) + 0.2 * np.float64(f) for f in expected["w"])
  v = np.concatenate([grads["w"], grads["b"][None]])
  solved = np.linalg.solve(np.kron(a, g) + 1e-2 * np.eye(30), v.ravel()).reshape(6, 5)
  close(update["w"], solved[:5] * mask, rtol=1e-3, atol=1e-5)
  close(update["b"], solved[5], rtol=1e-3, atol=1e-5)


COMPUTED = {
  "threefold": lambda k: 3 * k,
  "clip": lambda k: jnp.clip(k, -0.1, 0.1),
  "roll": lambda k: jnp.roll(k, 1, axis=0),
  "set": lambda k: k.at[0].set(0.0),
  "jitted": jax.jit(jnp.cos),
  "behind a barrier": lambda k: jax.lax.optimization_barrier(2 * k),
  "standardised": lambda k: (k - k.mean(axis=0)) / k.std(axis=0),
}


@pytest.mark.parametrize("change", COMPUTED)
def test_a_kernel_that_is_computed_has_no_layer_but_a_reason(change):
  params = jax.jit(nn.Dense(5).init)(jax.random.key(0), X)["params"]
  apply = lambda p, x: nn.Dense(5).apply({"params": p}, x)
  predict = lambda p, x: apply({**p, "kernel": COMPUTED[change](p["kernel"])}, x)
  curvature = optim.Curvature(predict, params, X)
  blocks = {b.name: b for b in curvature.blocks}
  assert {b.kind for b in blocks.values()} == {"gradient"} and blocks["kernel"].reason


def test_a_layer_with_one_parameter_elsewhere_keeps_the_other():
  params, batch = problem()
  whole = factors(predict, params, batch)
  for trained, kind in (("kernel", "kronecker"), ("bias", "gradient")):
    own = {"one": {trained: params["one"][trained]}, "two": params["two"]}
    merged = lambda own, b: predict(own | {"one": params["one"] | own["one"]}, b)
    blocks = kinds(merged, own, batch)
    assert set(blocks.values()) == {kind, "kronecker"}
  kernel = {"one": {"kernel": params["one"]["kernel"]}, "two": params["two"]}
  found = factors(merged_with(params), kernel, batch)
  close(found["one"].inputs, whole["one"].inputs[:5, :5])
  close(found["one"].outputs, whole["one"].outputs)


def merged_with(params):
  return lambda own, b: predict(own | {"one": params["one"] | own["one"]}, b)


def test_a_layer_that_is_used_with_and_without_its_bias_has_a_row_for_it_in_one():
  params = {"w": dense(5, 4), "b": dense(1)[0]}
  both = lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) + jnp.tanh(2 * x @ p["w"])
  [found] = factors(both, params, X, likelihood="normal").values()
  rows = np.concatenate([with_ones(X), np.pad(2 * X, ((0, 0), (0, 1)))])
  close(found.inputs, rows.T @ rows / 12)


@pytest.mark.parametrize("how", ["stop_gradient", "sharding", "bfloat16"])
def test_parameters_may_pass_through_identities(how):
  params, batch = problem()
  expected = factors(predict, params, batch)
  whole = NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P())
  change = {
    "sharding": lambda p: jax.lax.with_sharding_constraint(p, whole),
    "bfloat16": lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p),
    "stop_gradient": lambda p: p | {"one": jax.lax.stop_gradient(p["one"])},
  }[how]
  passed = lambda p, b: predict(change(p), b)
  if how == "stop_gradient":  # a frozen part has no curvature
    found = kinds(passed, params, batch)
    assert found.pop("two") == "kronecker" and set(found.values()) == {"gradient"}
  rtol, atol = (0.1, 0.02) if how == "bfloat16" else (1e-4, 1e-6)
  close(factors(passed, params, batch)["two"], expected["two"], rtol=rtol, atol=atol)
