"""All optimizers through optax's conventions: wrappers, loops, ensembles, devices, and 16 bits.

Each wrapper is compared with the optimizer alone, on what the wrapper says that it does.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from mixer_jax import optim

STEPS = 6
SIZES = {"one": (4, 4), "two": (4, 4)}


def layers(rng, scale, *leading):
  """A tree like the parameters, with axes in front."""
  normal = lambda *shape: (scale * rng.normal(size=(*leading, *shape))).astype(np.float32)
  return {k: {"kernel": normal(*size), "bias": normal(size[1])} for k, size in SIZES.items()}


_RNG = np.random.default_rng(0)
PARAMS, GRADIENTS = layers(_RNG, 0.7), layers(_RNG, 0.3, STEPS)
BATCH = {"x": np.float32(_RNG.normal(size=(8, 4))), "y": np.int32(_RNG.integers(0, 4, 8))}


def predict(params, batch):
  dense = lambda layer, x: x @ layer["kernel"] + layer["bias"]
  return dense(params["two"], jnp.tanh(dense(params["one"], batch["x"]))), batch["y"]


def loss(params, batch):
  logits, labels = predict(params, batch)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.cache
def curvature(dtype="float32", axis_name=None):
  params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
  return optim.Curvature(predict, params, BATCH, estimation="exact", axis_name=axis_name)


def by_model(learning_rate, curvature, damping=0.1):
  """Steps of the quadratic model, with the damping of Levenberg and Marquardt."""
  first = optim.scale_by_kfac(curvature, factor_period=2, inverse_period=4)
  tx = optim.by_quadratic_model(first, curvature, learning_rate=learning_rate, damping=damping)
  return optim.levenberg_marquardt(tx, curvature, damping, damping_period=2)


def gauss_newton(learning_rate, curvature):
  return optim.gauss_newton(curvature, learning_rate=learning_rate, damping=0.1, momentum=0.5)


def hessian_free(learning_rate, curvature):
  """Without the loss: it would not be less along these gradients, and no step would be made."""
  options = dict(learning_rate=learning_rate, damping=0.1, max_iterations=9)
  tx = optim.hessian_free(curvature, **options)
  blind = lambda *given, value_fn=None, **told: tx.update(*given, **told)
  return optax.GradientTransformationExtraArgs(tx.init, blind)


def grafted(learning_rate):
  return optim.graft(optim.sgd(learning_rate), optim.adam(learning_rate))


_PERIODS = dict(factor_period=2, inverse_period=4, norm_constraint=None)
_IN_BASIS = dict(eps=1e-3, factor_period=2, basis_period=4)
# A function of a rate (and a curvature), and its options.
MAKES = {
  "sgd": (optim.sgd, {}),
  "adam": (optim.adam, {}),
  "adamw": (optim.adamw, {}),
  "lamb": (optim.lamb, dict(weight_decay=0.1)),
  "adagrad": (optim.adagrad, {}),
  "muon": (optim.muon, {}),
  "normuon": (optim.muon, dict(normuon=True)),
  "soap": (optim.soap, _IN_BASIS),
  "shampoo": (optim.shampoo, dict(basis_period=4)),
  "graft": (grafted, {}),
  "kfac": (optim.kfac, _PERIODS),
  "ekfac": (optim.ekfac, _PERIODS),
  "kfac_adam": (optim.kfac_adam, _IN_BASIS),
  "kfac_muon": (optim.kfac_muon, dict(normuon=True, factor_period=2, basis_period=4)),
  "by_model": (by_model, {}),
  "gauss_newton": (gauss_newton, {}),
  "hessian_free": (hessian_free, {}),
}
# All parameters have one matrix: the step of a part is not the part of a step.
JOINT = ("gauss_newton", "hessian_free")
WITH_CURVATURE = ("kfac", "ekfac", "kfac_adam", "kfac_muon", "by_model", *JOINT)
# K-FAC, whose state has the most parts, always runs.
_THOROUGH = [
  name if name == "kfac" else pytest.param(name, marks=pytest.mark.thorough) for name in MAKES
]
_APART = [name for name in _THOROUGH if getattr(name, "values", name)[0] not in JOINT]
every, some, apart = (
  pytest.mark.parametrize("name", names) for names in (MAKES, _THOROUGH, _APART)
)


def made(name, rate=0.1, given=None, factory=lambda make: make):
  """The optimizer, its update with all extra arguments that some of them want."""
  make, options = MAKES[name]
  model = (given or curvature(),) if name in WITH_CURVATURE else ()
  return optax.with_extra_args_support(factory(make)(rate, *model, **options))


def extra(params, batch=BATCH):
  mean = lambda p: loss(p, batch)
  return dict(batch=batch, rng=jax.random.key(0), model_params=params, value_fn=mean)


def run(tx, params=PARAMS, gradients=GRADIENTS, state=None, batch=BATCH):
  """The updates of all gradients at one place, in a scan: no state may change its types."""

  @jax.jit
  def scanned(params, gradients, state):
    def step(state, g):
      updates, state = tx.update(g, state, params, **extra(params, batch))
      return state, updates

    return jax.lax.scan(step, state, gradients)[1]

  return scanned(params, gradients, tx.init(params) if state is None else state)


@functools.cache
def alone(name):
  """The updates of the optimizer without a wrapper."""
  return run(made(name))


def only(part, tree):
  """The tree with zeros in the other layer."""
  return {k: x if k == part else jax.tree.map(np.zeros_like, x) for k, x in tree.items()}


def assert_close(found, wanted, rtol=1e-4, atol=1e-5):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, wanted)


@some
def test_jit_and_scan_make_the_steps_of_a_loop(name):
  tx = made(name)
  state, update = tx.init(PARAMS), jax.jit(lambda g, s: tx.update(g, s, PARAMS, **extra(PARAMS)))
  for t in range(STEPS):
    updates, state = update(jax.tree.map(lambda g, t=t: g[t], GRADIENTS), state)
    assert_close(updates, jax.tree.map(lambda u, t=t: u[t], alone(name)))
  assert any(np.any(u) for u in jax.tree.leaves(updates))


@apart
def test_masked_moves_its_part(name):
  tx = optax.masked(made(name), {"one": True, "two": False})
  found = run(tx)
  assert_close(found["one"], run(made(name), gradients=only("one", GRADIENTS))["one"])
  assert_close(found["two"], GRADIENTS["two"], rtol=0)


@apart
def test_multi_transform_gives_each_its_part(name):
  parts = {"a": made(name), "b": made(name)}
  found = run(optax.multi_transform(parts, {"one": "a", "two": "b"}))
  for part in ("one", "two"):
    wanted = run(made(name), gradients=only(part, GRADIENTS))
    assert_close(found[part], wanted[part])


@some
def test_multi_steps_makes_a_step_of_the_mean(name):
  found = run(optax.MultiSteps(made(name), 2).gradient_transformation())
  means = jax.tree.map(lambda g: (g[::2] + g[1::2]) / 2, GRADIENTS)
  assert_close(jax.tree.map(lambda u: u[1::2], found), run(made(name), gradients=means))
  assert not any(np.any(u[::2]) for u in jax.tree.leaves(found))


@some
def test_apply_if_finite_skips_a_bad_gradient(name):
  bad = jax.tree.map(lambda g: np.insert(g, 2, np.nan, axis=0), GRADIENTS)
  found = run(optax.apply_if_finite(made(name), 3), gradients=bad)
  assert not any(np.any(u[2]) for u in jax.tree.leaves(found))
  assert_close(jax.tree.map(lambda u: np.delete(u, 2, axis=0), found), alone(name))


@every
def test_flatten_is_right_or_refused(name):
  """What makes a step of each element alone may be flattened; what needs arrays says so."""
  tx = optax.flatten(made(name))
  if name in ("sgd", "adam", "adamw", "adagrad"):
    return assert_close(run(tx), alone(name))
  with pytest.raises(ValueError) as told:
    tx.init(PARAMS)
  assert len(str(told.value).splitlines()) == 1


@some
def test_tree_map_params(name):
  """Shardings, for instance: trees like the parameters get theirs, all else another one."""
  tx = made(name)
  state = jax.jit(lambda g, s: tx.update(g, s, PARAMS, **extra(PARAMS)))(
    jax.tree.map(lambda g: g[0], GRADIENTS), tx.init(PARAMS)
  )[1]
  same = optax.tree_map_params(tx, lambda x, p: x, state, PARAMS)
  jax.tree.map(np.testing.assert_array_equal, same, state)
  spread = optax.tree_map_params(
    tx,
    lambda x, p: np.shape(x) == np.shape(p) or 1 / 0,
    state,
    PARAMS,
    transform_non_params=lambda x: jax.tree.map(lambda _: False, x),
  )
  assert jax.tree.structure(spread) == jax.tree.structure(state)
  none = ("muon", "normuon", "soap", "kfac_adam", "kfac_muon")
  assert any(jax.tree.leaves(spread)) == (name not in none)


@some
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inject_hyperparams(name, dtype):
  """Rates and dampings are in the state, and those there count."""
  static = {"max_factor"} & set(inspect.signature(MAKES[name][0]).parameters)
  inject = functools.partial(
    optax.inject_hyperparams, static_args=static, hyperparam_dtype=jnp.float32
  )
  params, gradients = jax.tree.map(lambda x: x.astype(dtype), (PARAMS, GRADIENTS))
  tx = made(name, 0.1, curvature(dtype) if name in WITH_CURVATURE else None, inject)
  state = tx.init(params)
  assert {"learning_rate"} <= set(state.hyperparams)
  assert ("damping" in state.hyperparams) == (name in ("kfac", "ekfac", "by_model"))
  found = run(tx, params, gradients, state)
  assert all(np.isfinite(u.astype(np.float32)).all() for u in jax.tree.leaves(found))
  if dtype == "float32":
    assert_close(found, alone(name))
    state.hyperparams["learning_rate"] = jnp.float32(0.2)
    twice = run(tx, params, gradients, state)
    t = int(name in ("soap", "shampoo"))  # their first step is zero
    assert_close(*(jax.tree.map(lambda u: k * u[t], x) for k, x in ((2, found), (1, twice))))


@some
def test_numbers_of_16_bits_are_refused(name):
  """Those that optax injects into bfloat16 parameters: a decay of 0.999 would be 1, a step NaN."""
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
  given = curvature("bfloat16") if name in WITH_CURVATURE else None
  static = {"max_factor"} & set(inspect.signature(MAKES[name][0]).parameters)
  inject = functools.partial(optax.inject_hyperparams, static_args=static)
  with pytest.raises(ValueError, match="hyperparam_dtype"):
    made(name, 0.1, given, inject).init(params)


@some
def test_vmap_over_an_ensemble(name):
  rng = np.random.default_rng(1)
  params, gradients = layers(rng, 0.7, 3), layers(rng, 0.3, 3, STEPS)
  tx = made(name)

  @jax.jit
  @jax.vmap
  def members(params, gradients):
    def step(state, g):
      updates, state = tx.update(g, state, params, **extra(params))
      return state, updates

    return jax.lax.scan(step, tx.init(params), gradients)[1]

  found = members(params, gradients)
  for i in range(3):
    one = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree)
    assert_close(one(found), run(tx, one(params), one(gradients)), rtol=1e-3)


@apart
def test_shard_map(name):
  """Each of two devices has half the batch, and the gradient of all of it."""
  mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
  tx = made(name, 0.1, curvature(axis_name="data"))

  def step(state, params, gradients, batch):
    mean = lambda p: jax.lax.pmean(loss(p, batch), "data")
    told = extra(params, batch) | dict(value_fn=mean)
    body = lambda state, g: tx.update(g, state, params, **told)[::-1]
    return jax.lax.scan(body, state, gradients)[1]

  P = PartitionSpec
  specs = dict(in_specs=(P(), P(), P(), P("data")), out_specs=P())
  spread = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
  found = spread(made(name).init(PARAMS), PARAMS, GRADIENTS, BATCH)
  assert_close(found, alone(name), rtol=1e-3)


@some
def test_parameters_of_16_bits_have_states_of_32(name, dtype="bfloat16"):
  params, gradients = jax.tree.map(lambda x: x.astype(dtype), (PARAMS, GRADIENTS))
  tx = made(name, 0.1, curvature(dtype) if name in WITH_CURVATURE else None)
  floats = [x for x in jax.tree.leaves(tx.init(params)) if jnp.issubdtype(x.dtype, jnp.floating)]
  assert {str(x.dtype) for x in floats} <= {"float32"}
  updates = jax.eval_shape(functools.partial(run, tx), params, gradients)  # a scan
  assert {str(u.dtype) for u in jax.tree.leaves(updates)} == {dtype}
  if name == "by_model":
    found = run(tx, params, gradients)
    assert all(np.isfinite(np.float32(u)).all() for u in jax.tree.leaves(found))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", WITH_CURVATURE)
def test_a_model_all_of_16_bits_is_read_as_it_is(name, dtype):
  """Its program adds no float32 to bfloat16. Nothing but the batch and a key is given."""
  narrow = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
  params, batch = narrow(PARAMS), {**BATCH, "x": narrow(BATCH["x"])}
  tx = made(name, 0.1, optim.Curvature(predict, params, batch, estimation="exact"))
  step = lambda g, p: tx.update(g, tx.init(p), p, batch=batch, rng=jax.random.key(0), **told(p))
  told = lambda p: {"value_fn": lambda p: loss(p, batch)} if name == "by_model" else {}
  updates, _ = jax.eval_shape(step, narrow(layers(_RNG, 0.3)), params)
  assert {str(u.dtype) for u in jax.tree.leaves(updates)} == {dtype}


def rounded(name, dtype, steps=40):
  """Gradients of 16 bits for one parameter of ones, and the last update of them."""
  g = (0.02 * np.random.default_rng(0).normal(size=(steps, 64))).astype(dtype)
  tx = getattr(optim, name)(1.0)
  params = {"w": jnp.ones(64, dtype)}
  state, update = tx.init(params), jax.jit(tx.update)
  for x in g:
    updates, state = update({"w": jnp.asarray(x)}, state, params)
  return g.astype(np.float64), np.float64(updates["w"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", ["lamb", "adagrad", "adam"])
@pytest.mark.first(2)
def test_second_moments_of_16_bits_are_right(name, dtype):
  """The last step of 40, in float64, within the rounding of a step, where moments alone count."""
  g, found = rounded(name, dtype)
  mean, squares, total = 0.0, 0.0, 0.1 + (g**2).sum(axis=0)
  for x in g:
    mean, squares = 0.9 * mean + 0.1 * x, 0.999 * squares + 0.001 * x**2
  step = mean / (1 - 0.9**40) / (np.sqrt(squares / (1 - 0.999**40)) + 1e-8)
  if name == "lamb":
    step = mean / (1 - 0.9**40) / (np.sqrt(squares / (1 - 0.999**40)) + 1e-6)
    step *= 8.0 / np.linalg.norm(step)
  elif name == "adagrad":
    step = g[-1] / np.sqrt(total + 1e-7)
  np.testing.assert_allclose(found, -step, rtol=4 * float(jnp.finfo(dtype).eps))
