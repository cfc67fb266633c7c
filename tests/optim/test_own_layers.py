"""Layers as strangers have them, under any transformation, against brute force; others refused."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.small_net import Net, close, loss, predict, problem


@pytest.mark.thorough
def test_padded_steps_of_a_recurrent_net_count_in_no_factor():
  """Also those of which every example is padding."""

  class Tagger(nn.Module):
    @nn.compact
    def __call__(self, x, lengths):
      return nn.Dense(3)(nn.RNN(nn.SimpleCell(4, name="cell"))(x, seq_lengths=lengths))

  rng = np.random.default_rng(0)
  x, lengths = rng.normal(size=(3, 6, 2)).astype(np.float32), np.array([3, 2, 2])
  real = (np.arange(6) < lengths[:, None]).astype(np.float32)
  params = jax.jit(Tagger().init)(jax.random.key(0), x, lengths)["params"]

  def tagged(p, b):
    return Tagger().apply({"params": p}, b["x"], lengths), b["labels"], b["real"]

  batch = dict(x=x, labels=rng.integers(0, 3, (3, 6)), real=real)
  short = {k: v[:, :3] for k, v in batch.items()}
  options = dict(estimation="empirical")
  found, expected = (
    optim.kfac_factors(tagged, params, b, jax.random.key(0), **options) for b in (batch, short)
  )
  jax.tree.map(close, found, expected)
  rows = x[real > 0]
  inputs = np.concatenate([rows, np.ones((len(rows), 1))], 1)
  np.testing.assert_allclose(found["cell/i"][0], inputs.T @ inputs / len(rows), rtol=1e-5)


def test_a_wide_side_is_diagonal():
  params, batch = problem()
  tx = optim.scale_by_kfac(predict, params, batch, max_factor=5, estimation="exact")
  [one, two] = [
    b for b in optim.kfac_blocks(predict, params, batch, max_factor=5) if b.kind == "kronecker"
  ]
  assert (one.name, one.diagonal, two.diagonal) == ("one", (True, True), (True, False))
  state = tx.init(params)
  assert [x.shape for x in jax.tree.leaves(state.factors["two"])] == [(7,), (4, 4)]
  full = optim.kfac_factors(predict, params, batch, None, estimation="exact")["two"]
  grads = jax.jit(jax.grad(loss))(params, batch)
  updates, state = jax.jit(tx.update)(grads, state, params, batch=batch)
  a = 0.8 + 0.2 * np.diag(full.inputs)
  g = 0.8 * np.eye(4) + 0.2 * np.float64(full.outputs)
  close(state.factors["two"].inputs.values, a, rtol=1e-5)
  v = np.concatenate([grads["two"]["kernel"], grads["two"]["bias"][None]])
  dense = np.kron(np.diag(a), g) + 1e-2 * np.eye(28)
  expected = np.linalg.solve(dense, v.ravel()).reshape(7, 4)
  close(updates["two"]["kernel"], expected[:6], rtol=1e-4)
  close(updates["two"]["bias"], expected[6], rtol=1e-4)


def test_factors_that_are_listed_are_full_at_any_size():
  params, batch = problem()
  grads = jax.jit(jax.grad(loss))(params, batch)

  def update(**options):
    tx = optim.scale_by_kfac(predict, params, batch, **options, estimation="exact")
    return jax.jit(tx.update)(grads, tx.init(params), params, batch=batch)[0]

  cut, some = update(max_factor=5), update(max_factor=5, full_factors="^two/")
  close(some["two"], update()["two"], rtol=1e-6)
  close(some["one"], cut["one"], rtol=1e-6)
  assert np.abs(some["two"]["kernel"] - cut["two"]["kernel"]).max() > 1e-3
  blocks = optim.kfac_blocks(predict, params, batch, max_factor=5, full_factors=["^two/kernel"])
  assert [b.diagonal for b in blocks if b.kind == "kronecker"] == [(True, True), (False, False)]


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
    x = layer(x)
    return nn.Dense(4, name="two")(nn.tanh(x))


AROUND = {
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "vmap": lambda f: lambda p, x: jax.vmap(lambda x: f(p, x))(x),
}
WRAPS = "plain subclass jit checkpoint vmap frozen jit-of-vmap".split()
WRAPS += ["vmap-of-jit", "vmap-of-checkpoint", "vmap-of-remat", "vmap-of-vmap-of-jit"]


@pytest.mark.parametrize("how", [how.replace("-", " ") for how in WRAPS])
@pytest.mark.thorough
def test_transformations_around_layers(how):
  params, batch = problem()
  model = Wrapped(how)
  params = jax.jit(model.init)(jax.random.key(0), batch["x"])["params"]
  apply = lambda p, x: model.apply({"params": p}, x)
  apply(params, batch["x"])
  for name in reversed(how.split(" of ")):
    apply = AROUND.get(name, lambda f: f)(apply)
    if name == "jit":
      apply(params, batch["x"])  # a trace in its cache, without K-FAC
  if how.startswith("vmap of vmap"):  # each example has a batch of one
    inner = apply
    apply = lambda p, x: inner(p, x[:, None])[:, 0]
  if how == "frozen":
    params = flax.core.freeze(params)
  blocks = optim.kfac_blocks(apply, params, batch["x"])
  assert {b.name for b in blocks if b.kind == "kronecker"} == {"one", "two"}
  factors = optim.kfac_factors(apply, params, batch["x"], None, estimation="exact")
  scale = 2.0 if how == "subclass" else 1.0
  params = flax.core.unfreeze(params)
  wide = {"one": jax.tree.map(lambda x: scale * x, params["one"]), "two": params["two"]}
  plain = lambda p, x: Net().apply({"params": p}, x)
  expected = optim.kfac_factors(plain, wide, batch["x"], None, estimation="exact")
  close(factors["one"].inputs, expected["one"].inputs)
  close(factors["one"].outputs, scale**2 * expected["one"].outputs, rtol=1e-4)
  close(factors["two"], expected["two"], rtol=1e-4)


@pytest.mark.parametrize("around", ["jit", "checkpoint"])
@pytest.mark.thorough
def test_padding_counts_in_no_factor_of_a_mapped_program(around):
  params, batch = problem()
  real = np.float32([1, 1, 0, 1, 0, 1, 1, 1])
  one = AROUND[around](lambda p, x: Net().apply({"params": p}, x))
  mapped = lambda p, x: (AROUND["vmap"](one)(p, x), None, real)
  plain = lambda p, x: (Net().apply({"params": p}, x), None, real)
  found, expected = (
    optim.kfac_factors(f, params, batch["x"], None, estimation="exact") for f in (mapped, plain)
  )
  jax.tree.map(lambda a, b: close(a, b, rtol=1e-4), found, expected)


class Members(nn.Module):
  """An ensemble of three by nn.vmap."""

  @nn.compact
  def __call__(self, x):
    many = nn.vmap(Net, in_axes=None, out_axes=1, axis_size=3,
                   variable_axes={"params": 0}, split_rngs={"params": True})  # fmt: skip
    return many(name="net")(x).mean(axis=1)


@pytest.mark.parametrize("examples", [8, 3])  # also as many as members
@pytest.mark.thorough
def test_an_ensemble_may_be_mapped_over_examples(examples):
  x = problem()[1]["x"][:examples]
  params = jax.jit(Members().init)(jax.random.key(0), x)["params"]
  plain = lambda p, x: Members().apply({"params": p}, x)
  found, expected = (
    optim.kfac_factors(f, params, x, None, estimation="exact")
    for f in (AROUND["vmap"](plain), plain)
  )
  jax.tree.map(lambda a, b: close(a, b, rtol=1e-4), found, expected)


@pytest.mark.thorough
def test_layers_side_by_side():
  """Each member of an ensemble has factors of its own."""
  _, batch = problem()
  params = jax.jit(Members().init)(jax.random.key(0), batch["x"])["params"]
  members = lambda p, x: Members().apply({"params": p}, x)
  factors = optim.kfac_factors(members, params, batch["x"], None, estimation="exact")
  tx = optim.scale_by_kfac(members, params, batch["x"], estimation="exact")
  grads = jax.tree.map(jnp.ones_like, params)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, batch=batch["x"])
  assert factors["net/one"].outputs.shape == (3, 6, 6)

  def outputs(biases):
    one = {**params["net"]["one"], "bias": biases}
    return members({"net": {**params["net"], "one": one}}, batch["x"])

  jacobians = jax.jit(jax.jacobian(outputs))(params["net"]["one"]["bias"])  # [8, 4, 3, 6]
  p = np.asarray(jax.nn.softmax(outputs(params["net"]["one"]["bias"])))
  hessian = np.stack([np.diag(q) - np.outer(q, q) for q in p])
  h = np.concatenate([batch["x"], np.ones((8, 1))], axis=1)
  for i in range(3):
    close(factors["net/one"].inputs[i], h.T @ h / 8, rtol=1e-5)
    jacobian = jacobians[:, :, i]
    expected = np.einsum("bio,bij,bjp->op", jacobian, hessian, jacobian) / 8
    close(factors["net/one"].outputs[i], expected, rtol=1e-4)
    a, g = (0.8 * np.eye(n) + 0.2 * np.float64(f[i]) for n, f in zip((6, 6), factors["net/one"]))
    solved = np.linalg.solve(np.kron(a, g) + 1e-2 * np.eye(36), np.ones(36)).reshape(6, 6)
    close(updates["net"]["one"]["bias"][i], solved[5], rtol=1e-3)


NORMS = {
  "layer": lambda: nn.LayerNorm(name="norm"),
  "rms": lambda: nn.RMSNorm(name="norm"),
  "group": lambda: nn.GroupNorm(num_groups=2, name="norm"),
  "batch": lambda: nn.BatchNorm(use_running_average=True, name="norm"),
}


class Normalised(nn.Module):
  kind: str

  @nn.compact
  def __call__(self, x):
    x = NORMS[self.kind]()(x)
    return nn.Dense(3, name="head")(nn.tanh(x).mean(axis=1))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.thorough
def test_diagonals_of_normalisations_equal_brute_force(kind):
  x = np.random.default_rng(0).normal(size=(5, 2, 4)).astype(np.float32)
  variables = jax.jit(Normalised(kind).init)(jax.random.key(0), x)
  params = jax.tree.map(lambda p: p + 0.2, variables["params"])
  rest = {k: v for k, v in variables.items() if k != "params"}
  apply = lambda p, x: Normalised(kind).apply({"params": p, **rest}, x)
  kinds = {b.name: b.kind for b in optim.kfac_blocks(apply, params, x)}
  assert kinds == {"norm": "gradient", "head": "kronecker"}
  found = optim.kfac_factors(apply, params, x, None, estimation="exact", norms="diagonal")["norm"]
  log_loss = lambda p, x, y: -jax.nn.log_softmax(apply(p, x[None])[0])[y]
  every = jax.vmap(jax.vmap(jax.grad(log_loss), (None, None, 0)), (None, 0, None))
  grads = jax.jit(every)(params, x, jnp.arange(3))["norm"]
  weights = jax.nn.softmax(apply(params, x))
  names = [name for name in ("scale", "bias") if name in grads]
  for name, values in zip(names, found.values, strict=True):
    close(values, np.einsum("iy,iyc->c", weights, np.square(grads[name])) / 5, rtol=1e-4)


class Recurrent(nn.Module):
  """The last state of a recurrent cell, by `nn.RNN` or in a loop of Python."""

  lifted: bool

  @nn.compact
  def __call__(self, x):
    cell = nn.SimpleCell(4, name="cell")
    if self.lifted:
      return nn.Dense(3)(nn.RNN(cell)(x)[:, -1])
    carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
    for t in range(x.shape[1]):
      carry, y = cell(carry, x[:, t])
    return nn.Dense(3)(y)


@pytest.mark.thorough
def test_a_recurrent_cell_has_the_factors_of_a_loop_over_time():
  x = jax.random.normal(jax.random.key(0), (6, 5, 3))
  params = jax.jit(Recurrent(True).init)(jax.random.key(1), x)["params"]
  found = []
  for lifted in (True, False):
    predict = lambda p, b: Recurrent(lifted).apply({"params": p}, b)
    found.append(optim.kfac_factors(predict, params, x, jax.random.key(2)))
  assert {"cell/h", "cell/i"} <= found[0].keys()
  jax.tree.map(close, *found)


class OwnDense(nn.Module):
  """A layer of one's own, y = x @ kernel + bias."""

  curvature = "dense"
  use_bias: bool | None = None  # False alone says that a layer leaves its bias out

  @nn.compact
  def __call__(self, x):
    kernel = self.param("kernel", nn.initializers.normal(), (x.shape[-1], 6))
    return x @ kernel + self.param("bias", nn.initializers.zeros, (6,))


def test_a_dense_layer_of_ones_own():
  class Own(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(4, name="two")(nn.tanh(OwnDense(name="one")(x)))

  params, batch = problem()
  own = lambda p, b: Own().apply({"params": p}, b["x"])
  found = optim.kfac_factors(own, params, batch, None, estimation="exact")
  close(found, optim.kfac_factors(predict, params, batch, None, estimation="exact"))


@pytest.mark.thorough
def test_the_leading_part_of_a_matrix_has_the_factors_of_zeros_for_the_rest():
  class Leading(nn.Module):
    curvature = "dense"

    @nn.compact
    def __call__(self, x):
      n = x.shape[-1]
      kernel = self.param("kernel", nn.initializers.normal(), (7, 7))[:n, :n]
      return x @ kernel + self.param("bias", nn.initializers.normal(), (7,))[:n]

  class Model(nn.Module):
    whole: bool

    @nn.compact
    def __call__(self, x):
      if self.whole:
        zeros = jnp.zeros((*x.shape[:-1], 7 - x.shape[-1]))
        x = nn.Dense(7, name="one")(jnp.concatenate([x, zeros], axis=-1))[..., : x.shape[-1]]
      else:
        x = Leading(name="one")(x)
      return nn.Dense(4, name="two")(nn.tanh(x).mean(axis=1))

  x = np.random.default_rng(0).normal(size=(6, 3, 5)).astype(np.float32)
  params = jax.jit(Model(False).init)(jax.random.key(0), x)["params"]
  factors = lambda whole: optim.kfac_factors(
    lambda p, x: Model(whole).apply({"params": p}, x), params, x, None, estimation="exact"
  )
  found, expected = factors(False), factors(True)
  assert found["one"].inputs.shape == (8, 8) and found["one"].outputs.shape == (7, 7)
  close(found, expected)


REFUSED = {
  "an nn.DenseGeneral with batch_dims": nn.DenseGeneral(3, axis=-1, batch_dims=0),
  "which is no matrix product": nn.Einsum((2, 4, 3), "btc,tcd->btd", use_bias=False),
  "an nn.ConvLocal": nn.ConvLocal(3, (2,)),
  "an nn.Conv with a mask": nn.Conv(3, (1,), mask=jnp.ones((1, 4, 3))),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.first(1)
def test_layers_that_are_no_matrix_over_rows_are_refused(reason):
  x = jnp.ones((2, 2, 4))
  params = jax.jit(REFUSED[reason].init)(jax.random.key(0), x)["params"]
  apply = lambda p, x: REFUSED[reason].apply({"params": p}, x)
  with pytest.raises(ValueError, match=f"kernel .*{reason}.*list them in `plain`"):
    optim.kfac_blocks(apply, params, x)


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
  model = Padded()
  params = jax.jit(model.init)(jax.random.key(0), batch["x"], real)["params"]

  def predict(p, b):
    outputs = model.apply({"params": p}, b["x"], b["real"])
    return outputs, jnp.zeros(4, jnp.int32), jnp.ones(4), b["real"]

  def factors(head):
    p = {**params, "head": jax.tree.map(lambda x: head * x, params["head"])}
    return optim.kfac_factors(predict, p, batch, jax.random.key(0), estimation="empirical")

  at_zero, usual = factors(0.0), factors(1.0)
  for layer in ("tokens", "channels", "head"):
    np.testing.assert_allclose(at_zero[layer].inputs, usual[layer].inputs, rtol=1e-5, atol=1e-6)
  assert not np.any(at_zero["tokens"].outputs) and np.any(usual["tokens"].outputs)
  rows = np.einsum("btc,bt->btc", batch["x"], real).swapaxes(1, 2).reshape(-1, 6)
  rows = np.concatenate([rows, np.ones((24, 1))], axis=1)
  np.testing.assert_allclose(at_zero["tokens"].inputs, rows.T @ rows / 24, rtol=1e-4, atol=1e-5)


def test_normalisations_whose_features_are_not_last_take_the_plain_gradient():
  class FeaturesFirst(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.LayerNorm(feature_axes=1, reduction_axes=1, name="norm")(x)
      return nn.Dense(3, name="head")(x.reshape(len(x), -1))

  x = np.random.default_rng(0).normal(size=(5, 3, 3)).astype(np.float32)
  params = FeaturesFirst().init(jax.random.key(0), x)["params"]
  predict = lambda params, x: FeaturesFirst().apply({"params": params}, x)
  assert {*optim.kfac_factors(predict, params, x, jax.random.key(0), norms="diagonal")} == {"head"}


@pytest.mark.parametrize("trained, held", [("kernel", "bias"), ("bias", "kernel")])
def test_a_layer_with_one_parameter_elsewhere_is_refused_unless_it_is_plain(trained, held):
  params, batch = problem()
  own = {"one": {trained: params["one"][trained]}, "two": params["two"]}
  merged = lambda own, batch: predict(own | {"one": params["one"] | own["one"]}, batch)
  with pytest.raises(ValueError, match=f"one/{held} is not among the parameters; list one in"):
    optim.kfac_blocks(merged, own, batch)
  kinds = {b.name: b.kind for b in optim.kfac_blocks(merged, own, batch, plain="^one/")}
  assert kinds == {"one": "gradient", "two": "kronecker"}
