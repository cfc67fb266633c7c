"""Layers under transformations: jit, vmap, remat, scan, loops, branches and devices."""

import functools

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.curvature.brute_force import close, factors, kinds, with_ones
from tests.optim.small_net import Net, predict, problem

P = PartitionSpec


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    return nn.tanh(nn.Dense(4, name="inner")(x)), None


class Stack(nn.Module):
  """Two equal layers: in a loop of Python, scanned, rematerialised, or side by side."""

  lift: str
  axis: int = 0

  @nn.compact
  def __call__(self, x):
    if "scan" in self.lift:
      block = nn.remat(Block) if self.lift == "remat scan" else Block
      axes = dict(variable_axes={"params": self.axis}, split_rngs={"params": True})
      x, _ = nn.scan(block, length=2, **axes)(name="blocks")(x, None)
    else:
      block = nn.remat(Block) if self.lift == "remat" else Block
      for i in range(2):
        x, _ = block(name=f"block_{i}")(x)
    return nn.Dense(3, name="head")(x)


@pytest.mark.parametrize("lift", ["scan", "remat scan", "remat", "scan over axis 1"])
@pytest.mark.first(2)
def test_lifted_layers_have_the_steps_of_a_loop(lift):
  x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
  plain = jax.jit(Stack("loop").init)(jax.random.key(0), x)["params"]
  params, axis = plain, int(lift[-1] == "1")
  if "scan" in lift:
    both = jax.tree.map(lambda *z: jnp.stack(z, axis), plain["block_0"], plain["block_1"])
    params = {"blocks": both, "head": plain["head"]}

  def update(model, params):
    of = lambda p, x: model.apply({"params": p}, x)
    curvature = optim.Curvature(of, params, x, estimation="exact")
    assert "gradient" not in {b.kind for b in curvature.blocks}
    tx = optim.scale_by_kfac(curvature, factor_decay=0.5)
    grads = jax.tree.map(jnp.ones_like, params)
    return jax.jit(lambda g: tx.update(g, tx.init(params), params, batch=x)[0])(grads)

  found, expected = update(Stack(lift, axis), params), update(Stack("loop"), plain)
  if "scan" in lift:
    one = lambda i: jax.tree.map(lambda z: jnp.take(z, i, axis), found["blocks"]["inner"])
    found = {f"block_{i}": {"inner": one(i)} for i in (0, 1)} | {"head": found["head"]}
  close(found, expected, atol=1e-5)


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    return nn.LayerNorm(name="norm")(nn.tanh(nn.Dense(5, name="dense")(x))), None


class Deep(nn.Module):
  """Three layers: a stack, or for None one layer three times; then a recurrent one."""

  axis: int | None = 0
  wrap: str = ""

  @nn.compact
  def __call__(self, x):  # [batch, 6, 5]
    layer = {"": Layer, "remat": nn.remat(Layer), "jit": nn.jit(Layer)}[self.wrap]
    shared = dict(variable_broadcast="params", split_rngs={"params": False})
    stacked = dict(variable_axes={"params": self.axis}, split_rngs={"params": True})
    repeated = nn.scan(layer, length=3, **(shared if self.axis is None else stacked))
    x, _ = repeated(name="net")(x, None)
    x = nn.RNN(nn.SimpleCell(4), name="loop")(x[:, :, None].sum(2))
    return nn.Dense(3, name="head")(x)


def predict_of(net, how):
  """The same function of one batch, mapped over its examples in several ways."""
  whole = lambda params, batch: net.apply({"params": params}, batch)
  one = lambda params, x: whole(params, x[None])[0]
  return {
    "whole": whole,
    "jit": jax.jit(whole),
    "vmap": lambda params, batch: jax.vmap(lambda x: one(params, x))(batch),
    "map": lambda params, batch: jax.lax.map(lambda x: one(params, x), batch),
  }[how]


@functools.cache
def deep(net):
  x = np.random.default_rng(0).normal(size=(8, 6, 5)).astype(np.float32)
  return jax.jit(net.init)(jax.random.key(0), x)["params"], x


def test_scales_of_a_stack_have_the_diagonals_of_single_layers():
  """Also in a function of one's own, with a scan over an axis that is not the first."""
  rng = np.random.default_rng(0)
  params = {n: rng.normal(size=(2, 5)).astype(np.float32) for n in ("scale", "shift")}
  x = rng.normal(size=(6, 3, 5)).astype(np.float32)
  layer = lambda x, p: (jnp.tanh(x * p["scale"] + p["shift"]), None)
  scanned = lambda p, x: jax.lax.scan(layer, x, p)[0].mean(1)
  single = lambda p, x: layer(layer(x, p[0])[0], p[1])[0].mean(1)
  options = dict(norms="diagonal", likelihood="normal")
  found = factors(scanned, params, x, **options)
  apart = [{n: v[i] for n, v in params.items()} for i in range(2)]
  wanted = factors(single, apart, x, **options)
  for name in params:
    close(found[name].values[0], np.stack([wanted[f"{i}/{name}"].values[0] for i in range(2)]))
  turned = lambda p, x: scanned({"scale": p["scale"].T, "shift": p["shift"]}, x)
  held = params | {"scale": np.ascontiguousarray(params["scale"].T)}
  assert kinds(turned, held, x, **options) == {"scale": "gradient", "shift": "diagonal"}


@pytest.mark.parametrize("how", ["whole", "jit", "vmap", "map"])
@pytest.mark.parametrize("net", [Deep(), Deep(None), Deep(wrap="remat"), Deep(None, wrap="jit")])
@pytest.mark.first(2)
def test_tokens_are_those_that_the_factors_count(net, how):
  """ "published" multiplies the outputs' factor by them; they scale EK-FAC's moments of batches."""
  params, x = deep(net)
  of = predict_of(net, how)
  curvature = optim.Curvature(of, params, x)
  tokens = {b.name: b.tokens for b in curvature.blocks if b.tokens}
  repeats = 3 if net.axis is None else 1
  assert tokens == {"net/dense": 6 * repeats, "SimpleCell_0/h": 6, "SimpleCell_0/i": 6, "head": 6}
  published = curvature.factors(params, x, jax.random.key(1))
  expand = factors(of, params, x, jax.random.key(1), token_averaging="expand")
  for name, count in tokens.items():
    close(published[name].outputs, count * expand[name].outputs)
  if how != "whole":
    wanted = factors(predict_of(net, "whole"), params, x, jax.random.key(1))
    close(published, wanted, rtol=1e-3, atol=1e-5)


CELLS = {
  "simple": lambda: nn.SimpleCell(4, name="cell"),
  "gru": lambda: nn.GRUCell(4, name="cell"),
  "lstm": lambda: nn.LSTMCell(4, name="cell"),
}


class Recurrent(nn.Module):
  """The last state of a recurrent cell, by `nn.RNN` or in a loop of Python."""

  cell: str
  lifted: bool

  @nn.compact
  def __call__(self, x):
    cell = CELLS[self.cell]()
    if self.lifted:
      return nn.Dense(3)(nn.RNN(cell)(x)[:, -1])
    carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
    for t in range(x.shape[1]):
      carry, y = cell(carry, x[:, t])
    return nn.Dense(3)(y)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.first(2)
def test_a_recurrent_cell_has_the_factors_of_a_loop_over_time(cell):
  x = jax.random.normal(jax.random.key(0), (6, 5, 3))
  params = jax.jit(Recurrent(cell, True).init)(jax.random.key(1), x)["params"]
  of = lambda lifted: lambda p, b: Recurrent(cell, lifted).apply({"params": p}, b)
  found, expected = (factors(of(lifted), params, x) for lifted in (True, False))
  close(found, expected)
  kernels = [k for k, v in flax.traverse_util.flatten_dict(params, sep="/").items() if v.ndim > 1]
  assert len(found) == len(kernels)
  rows = np.reshape(x, (-1, 3))  # all time steps
  inputs = next(f.inputs for name, f in found.items() if name.startswith("cell/i"))
  close(inputs[:3, :3], rows.T @ rows / 30)


class Subclass(nn.Dense):
  def __call__(self, x):
    return 2.0 * super().__call__(x)


class Wrapped(nn.Module):
  """A layer behind jax.jit, jax.checkpoint or a class of its own; and one that is not used."""

  how: str

  @nn.compact
  def __call__(self, x):
    kind = {"subclass": Subclass, "vmap of remat": nn.remat(nn.Dense)}.get(self.how, nn.Dense)
    layer = kind(6, name="one")
    if self.is_initializing():
      nn.Dense(3, name="unused")(x)
    return nn.Dense(4, name="two")(nn.tanh(layer(x)))


AROUND = {
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "vmap": lambda f: lambda p, x: jax.vmap(lambda x: f(p, x))(x),
  "vmap of one": lambda f: lambda p, x: jax.vmap(lambda x: f(p, x[None])[0])(x),
  "shard_map": lambda f: jax.shard_map(
    f,
    mesh=jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]),
    in_specs=(P(), P("d")),
    out_specs=P("d"),
  ),
  "cond": lambda f: lambda p, x: jax.lax.cond(x.sum() > -1e9, f, lambda p, x: 0 * f(p, x), p, x),
}
WRAPS = "checkpoint frozen jit-of-vmap shard_map cond vmap-of-remat vmap-of-vmap-of-jit jit"


@pytest.mark.parametrize("how", WRAPS.split())
@pytest.mark.first(5)
def test_transformations_around_layers(how):
  params, batch = problem()
  model = Wrapped(how.replace("-", " "))
  params = jax.jit(model.init)(jax.random.key(0), batch["x"])["params"]
  apply = lambda p, x: model.apply({"params": p}, x)
  for name in reversed(how.split("-of-")):
    apply = AROUND.get(name, lambda f: f)(apply)
    if name == "jit":
      apply(params, batch["x"])  # a trace in its cache
  if how.startswith("vmap-of-vmap"):  # each example has a batch of one
    inner = apply
    apply = lambda p, x: inner(p, x[:, None])[:, 0]
  if how == "frozen":
    params = flax.core.freeze(params)
  blocks = kinds(apply, params, batch["x"])
  assert {name for name, kind in blocks.items() if kind == "kronecker"} == {"one", "two"}
  found = factors(apply, params, batch["x"])
  scale = 2.0 if how == "subclass" else 1.0
  params = flax.core.unfreeze(params)
  wide = {"one": jax.tree.map(lambda x: scale * x, params["one"]), "two": params["two"]}
  expected = factors(lambda p, x: Net().apply({"params": p}, x), wide, batch["x"])
  close(found["one"].inputs, expected["one"].inputs)
  close(found["one"].outputs, scale**2 * expected["one"].outputs)
  close(found["two"], expected["two"])


def test_layers_that_are_taken_from_a_stack_have_factors_each():
  """By hand, by scan, or by the index of a loop; with a bias where it is seen as one."""
  rng = np.random.default_rng(0)
  x, params = rng.normal(size=(3, 5)).astype(np.float32), {"w": rng.normal(size=(2, 5, 5)) / 2}
  params = jax.tree.map(np.float32, params)
  biased = params | {"b": rng.normal(size=(2, 5)).astype(np.float32)}
  own = lambda p, i: jax.tree.map(lambda a: a[i], p)
  layer = lambda p, x: nn.tanh(x @ p["w"] + p.get("b", 0.0))
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  put = lambda p: jax.lax.with_sharding_constraint(p, device)
  scan = lambda body: lambda p, x: jax.lax.scan(lambda x, p: (body(p, x), None), x, p)[0]
  fori = lambda p, x: jax.lax.fori_loop(0, 2, lambda i, x: layer(own(p, i), x), x)
  ways = {
    "by hand": (lambda p, x: layer(own(p, 1), layer(own(p, 0), x)), biased),
    "scan": (scan(layer), biased),
    "placed": (scan(lambda p, x: layer(put(p), x)), biased),
    "loop": (fori, params),
    "jitted loop": (jax.jit(fori), params),
  }
  plain = lambda p, x: layer(p[1], layer(p[0], x))
  for name, (of, p) in ways.items():
    wanted = [jax.tree.leaves(f) for f in factors(plain, [own(p, 0), own(p, 1)], x).values()]
    found = [jax.tree.leaves(f) for f in factors(of, p, x).values()]
    for side in (0, 1):
      d = 6 if (side == 0 and name == "scan") or (name == "placed" and side == 0) else 5
      matrices = np.concatenate([f[side].reshape(-1, *f[side].shape[-2:]) for f in found])
      cut = lambda z, d=d: z[..., :d, :d]
      close(cut(matrices), cut(np.stack([w[side] for w in wanted])))
  [block] = optim.Curvature(ways["scan"][0], biased, x).blocks
  assert (block.kind, block.stacked, block.tokens) == ("kronecker", (2,), 1)


def test_a_kernel_in_a_while_loop_takes_the_plain_gradient():
  """It cannot be seen there; forward mode may have differentiated it."""
  params = {"w": 0.3 * np.eye(4, dtype=np.float32), "head": np.ones((4, 3), np.float32)}

  def until(p, x):
    go = lambda c: c[1] < 3
    h = jax.lax.while_loop(go, lambda c: (jnp.tanh(c[0] @ p["w"]), c[1] + 1), (x, 0))[0]
    return jax.lax.stop_gradient(h) @ p["head"]

  x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
  assert kinds(until, params, x) == {"w": "gradient", "head": "kronecker"}


def test_examples_that_choose_a_branch_are_the_rows_of_its_layers():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(6, 4)).astype(np.float32)
  params = {n: rng.normal(size=s).astype(np.float32) for n, s in {"a": (4, 3), "b": (4, 3)}.items()}
  branch = lambda name: lambda p, x: jnp.tanh(x @ p[name])
  of = lambda p, x: jax.lax.cond(x[0, 0] > 0, branch("a"), branch("b"), p, x)  # of one example
  options = dict(likelihood="normal", estimation="exact", token_averaging="expand")
  curvature = optim.Curvature(of, params, jax.ShapeDtypeStruct(x.shape, x.dtype), **options)
  found = curvature.factors(params, x)
  for name, chosen in (("a", x[:, 0] > 0), ("b", x[:, 0] <= 0)):
    rows, slope = x[chosen], 1 - np.tanh(x[chosen] @ params[name]) ** 2
    close(found[name].inputs, rows.T @ rows / len(rows))
    close(found[name].outputs, 2 * np.diag((slope**2).sum(axis=0)) / 6)


class Members(nn.Module):
  """An ensemble of three by nn.vmap."""

  @nn.compact
  def __call__(self, x):
    axes = dict(variable_axes={"params": 0}, split_rngs={"params": True})
    many = nn.vmap(Net, in_axes=None, out_axes=1, axis_size=3, **axes)
    return many(name="net")(x).mean(axis=1)


@pytest.mark.parametrize("examples", [8, 3])  # also as many as members
def test_an_ensemble_may_be_mapped_over_examples(examples):
  x = problem()[1]["x"][:examples]
  params = jax.jit(Members().init)(jax.random.key(0), x)["params"]
  plain = lambda p, x: Members().apply({"params": p}, x)
  close(factors(AROUND["vmap of one"](plain), params, x), factors(plain, params, x))


def test_layers_side_by_side():
  """Members that read the same inputs are one matrix, those behind them have factors each."""
  _, batch = problem()
  params = jax.jit(Members().init)(jax.random.key(0), batch["x"])["params"]
  members = lambda p, x: Members().apply({"params": p}, x)
  curvature = optim.Curvature(members, params, batch["x"], estimation="exact")
  found = curvature.factors(params, batch["x"])
  tx = optim.scale_by_kfac(curvature)
  grads = jax.tree.map(jnp.ones_like, params)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, batch=batch["x"])

  def outputs(biases, name):
    own = {name: {**params["net"][name], "bias": biases}}
    return members({"net": params["net"] | own}, batch["x"])

  p = np.asarray(jax.nn.softmax(members(params, batch["x"])))
  hessian = np.stack([np.diag(q) - np.outer(q, q) for q in p])
  for name, d in (("one", 6), ("two", 4)):
    jacobian = jax.jit(jax.jacobian(outputs), static_argnums=1)(params["net"][name]["bias"], name)
    expected = np.einsum("bimo,bij,bjnp->monp", jacobian, hessian, jacobian) / 8
    if name == "one":
      close(found["net/one"].outputs, expected.reshape(3 * d, 3 * d))
    else:
      close(found["net/two"].outputs, np.stack([expected[i, :, i] for i in range(3)]))
  h = with_ones(batch["x"])
  close(found["net/one"].inputs, h.T @ h / 8)
  w, b = (params["net"]["one"][k] for k in ("kernel", "bias"))
  hidden = with_ones(np.tanh(np.einsum("bi,mio->mbo", batch["x"], w) + b[:, None]))
  close(found["net/two"].inputs, np.einsum("mbi,mbj->mij", hidden, hidden) / 8)
  for i in range(3):
    a, g = (0.8 * np.eye(f.shape[-1]) + 0.2 * np.float64(f[i]) for f in found["net/two"])
    solved = np.linalg.solve(np.kron(a, g) + 1e-2 * np.eye(28), np.ones(28)).reshape(7, 4)
    close(updates["net"]["two"]["bias"][i], solved[6], rtol=1e-3)


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX 0.8 cannot vmap a psum in shard_map")
def test_a_batch_that_predict_itself_spreads_over_devices_has_the_same_factors():
  """In a `shard_map` inside of the function, which takes no batch of one: in_axes=None."""
  params, batch = problem()
  mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  for check_vma in (True, False):
    spread = jax.shard_map(
      lambda p, b: predict(p, b)[0],
      mesh=mesh,
      in_specs=(P(), P("d")),
      out_specs=P("d"),
      check_vma=check_vma,
    )
    found = factors(
      spread, params, batch, in_axes=None, estimation="sampled", rng=jax.random.key(0)
    )
    close(found, factors(predict, params, batch, jax.random.key(0)))
  split = jax.shard_map(
    lambda w, x: jax.lax.psum(x @ w, "d"), mesh=mesh, in_specs=(P("d"), P(None, "d")), out_specs=P()
  )
  two = lambda p, x: jnp.tanh(split(p["w"], x)) @ p["head"]
  params = {"w": np.ones((8, 4), np.float32), "head": np.eye(4, 3, dtype=np.float32)}
  assert kinds(two, params, np.ones((6, 8), np.float32)) == {"w": "gradient", "head": "kronecker"}


def test_no_array_of_a_trace_is_kept():
  """JAX itself looks for them: such a mode blames the model of a user who has it on."""

  class Kinds(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.GroupNorm(2)(nn.Conv(4, (2, 2))(x))
      x = nn.ConvTranspose(4, (2, 2))(x).reshape(len(x), -1, 4)
      return nn.Dense(3)(nn.LayerNorm()(nn.MultiHeadDotProductAttention(2)(x)).mean(axis=1))

  x = np.ones((4, 3, 3, 2), np.float32)
  params = Kinds().init(jax.random.key(0), x)["params"]
  of = lambda params, x: Kinds().apply({"params": params}, x)
  with jax.checking_leaks():
    tx = optim.scale_by_kfac(optim.Curvature(of, params, x, norms="diagonal"))
    jax.eval_shape(tx.update, params, tx.init(params), params, batch=x, rng=jax.random.key(0))


def test_a_batch_of_numpy_may_be_closed_over_by_jit():
  """Rows mapped over their second axis: the constant has to be moved there."""
  params, batch = problem()
  x = np.stack([batch["x"], -batch["x"]], axis=1)
  mapped = jax.vmap(lambda params, x: predict(params, {"x": x, "y": 0})[0], (None, 1), 1)
  mean = lambda params, x: mapped(params, x).mean(axis=1)
  tx = optim.kfac(0.1, optim.Curvature(mean, params, x))
  step = lambda g, x: tx.update(g, tx.init(params), params, batch=x, rng=jax.random.key(0))[0]
  close(jax.jit(lambda g: step(g, x))(params), jax.jit(step)(params, x))
