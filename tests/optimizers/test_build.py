"""From a config to an optimizer: every option arrives, and numbers may be traced."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import config as config_lib
from mixer_jax import optim, optimizers, options
from mixer_jax.errors import UserError
from mixer_jax.optimizers import numbers as numbers_lib
from mixer_jax.optimizers.registry import WHOLE_STEPS
from mixer_jax.optimizers.schedules import Multiplier
from tests.optim import small_net

ONE = lambda count: 1.0
# What an option needs beside it so that it changes steps; other values of some.
NEEDS = {
  "tolerance": dict(refresh="qr"),
  "full_factors": dict(max_factor=2),
  "moment_decay": dict(eigenvalues="batch"),
  "factor_damping_period": dict(quadratic_model=True, damping_type="factored"),
  "damping_period": dict(adaptive_damping=True),
  "damping_decay": dict(adaptive_damping=True, damping_period=2),
  "min_damping": dict(adaptive_damping=True, damping_period=1, damping_decay=0.5),
  "max_damping": dict(adaptive_damping=True, damping_period=1, damping_decay=0.5),
  "max_increase": dict(adaptive_damping=True, damping_period=1, learning_rate=9.0),
  "decay_from": dict(weight_decay=0.1),
  "norm_constraint": dict(learning_rate=1.0),
  "weight_decay": dict(decay_from=0),
  **{field: dict(adam_paths="^one/") for field in ("b1", "b2", "eps")},
}
OTHERS = dict(max_factor=2, full_factors="^one/", adam_paths="^one/", unpreconditioned="^one/")
OTHERS |= dict(factor_fraction=0.5, factor_damping_period=2, damping_period=2, decay_from=1)
OTHERS |= dict(min_damping=1.0, max_damping=1e-4, norm_constraint=1e-6, basis_period=3)
OTHERS |= dict(inverse_period=3, factor_period=3, tolerance=1.0, newton_schulz=2, ridge=0.5)
OTHERS |= dict(linear_algebra="products")  # a CPU takes the library's by default


class Net(nn.Module):
  """Two layers, tokens that share the first, and a normalisation between."""

  @nn.compact
  def __call__(self, x):
    x = nn.LayerNorm(name="norm")(nn.tanh(nn.Dense(4, name="one")(x)))
    return nn.Dense(3, name="two")(x.mean(axis=1))


def predict(params, batch):
  return Net().apply({"params": params}, batch["x"]), batch["y"]


def loss(params, batch):
  return optax.softmax_cross_entropy_with_integer_labels(*predict(params, batch)).mean()


def steps_of(name, values):
  """Seven updates of a config on a small net, at one place."""
  x = np.random.default_rng(0).normal(size=(8, 3, 4)).astype(np.float32)
  batch = {"x": x, "y": np.arange(8) % 3}
  params = Net().init(jax.random.key(0), x)["params"]
  config = config_lib.optimizer(name, **{"learning_rate": 0.1, "decay": "all"} | values)
  tx = optimizers.build(config, ONE, optimizers.Problem(predict, params, batch, "categorical"))
  shape = lambda p, i: jnp.cos(i + jnp.arange(p.size)).reshape(p.shape)

  def step(state, i):
    told = dict(batch=batch, rng=jax.random.key(i), value_fn=lambda p: loss(p, batch))
    grads = jax.tree.map(lambda p: shape(p, i), params)
    updates, state = tx.update(grads, state, params, **told)
    return state, updates

  return jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(7))[1])(tx.init(params))


@pytest.mark.parametrize(
  "name",
  [
    n if n in ("adam", "muon") else pytest.param(n, marks=pytest.mark.thorough)
    for n in optimizers.OPTIMIZERS
    if n not in WHOLE_STEPS
  ],
)
def test_every_option_of_a_config_changes_the_steps(name):
  known, base = options.of(optimizers.OPTIMIZERS[name]), {}
  few = dict(factor_period=2, inverse_period=4, basis_period=4, norm_constraint=1e9)
  base = {k: v for k, v in few.items() if k in known}

  def other(option):
    if option.type is bool:
      return not option.default
    if option.choices:
      return next(c for c in option.choices if c != option.default)
    return 0.123

  same, found = {}, {}
  for key, option in known.items():
    needs = base | {k: v for k, v in NEEDS.get(key, {}).items() if k in (*known, "learning_rate")}
    label = tuple(sorted(needs.items()))
    if label not in same:
      same[label] = steps_of(name, needs)
    changed = steps_of(name, needs | {key: OTHERS.get(key, other(option))})
    pairs = zip(jax.tree.leaves(changed), jax.tree.leaves(same[label]))
    found[key] = any(not np.array_equal(a, b) for a, b in pairs)
  assert [key for key, differs in found.items() if not differs] == []


def test_options_of_a_grafted_pair_arrive():
  sides = (config_lib.optimizer("sgd", 0.5, momentum=0.0), config_lib.optimizer("sgd", 1.0))
  grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.0])}

  def step(**values):
    config = config_lib.grafted(*sides)
    config.update(values)
    tx = optimizers.build(config, ONE, None)
    return tx.update(grads, tx.init(grads), grads)[0]["a"]

  np.testing.assert_allclose(step(), [-1.5, -2.0], rtol=1e-6)
  np.testing.assert_allclose(step(scope="global", eps=5.0), [-0.75, -1.0], rtol=1e-6)


@pytest.mark.parametrize("decay", ["kernels", "all"])
def test_a_task_says_which_parameters_decay(decay):
  config = config_lib.optimizer("sgd", 1.0, weight_decay=0.1, decay=decay)
  params = {name: jnp.ones(1) for name in ("kernel", "diagonals", "bias")}
  zeros = jax.tree.map(jnp.zeros_like, params)

  def decayed(**given):
    tx = optimizers.build(config, ONE, None, **given)
    updates, _ = tx.update(zeros, tx.init(params), params)
    return {name for name, update in updates.items() if update != 0}

  assert decayed() == (set(params) if decay == "all" else {"kernel"})
  own = decayed(decayed=lambda path: path in ("kernel", "diagonals"))
  assert own == (set(params) if decay == "all" else {"kernel", "diagonals"})


@pytest.mark.parametrize("name", ["adamw", "soap", "sgd", "graft"])
def test_weight_decay_moves_by_half_a_cosine(name):
  """Without gradients every step is the decay's alone; DINO has 0.04 to 0.4 (its Section 3.2)."""
  part = lambda name: config_lib.optimizer(name, 0.5, weight_decay=0.04)
  config = config_lib.grafted(part("adamw"), part("sgd")) if name == "graft" else part(name)
  if name == "sgd":
    config.momentum = 0.0
  decay = Multiplier(decay_end=10.0).decay(4)
  tx = optimizers.build(config, ONE, None, decay=decay)
  params = {"kernel": jnp.arange(6.0).reshape(2, 3)}
  zeros, expected = jax.tree.map(jnp.zeros_like, params), np.arange(6.0).reshape(2, 3)
  state = tx.init(params)
  for t in range(6):
    updates, state = tx.update(zeros, state, params)
    params = optax.apply_updates(params, updates)
    if name != "soap" or t:  # the first update of SOAP is zero
      expected *= 1 - 0.5 * (0.4 + (0.04 - 0.4) * (1 + np.cos(np.pi * min(t / 4, 1))) / 2)
    np.testing.assert_allclose(params["kernel"], expected, rtol=1e-5)


def test_the_weight_decay_of_kfac_is_constant():
  with pytest.raises(UserError, match="schedule.decay_end: the weight decay of kfac is constant"):
    optimizers.build(config_lib.optimizer("kfac", 0.1), ONE, None, decay=ONE)
  assert Multiplier().decay(4) is None


def test_a_gradient_is_clipped_before_all_else():
  config = config_lib.optimizer("sgd", 1.0, momentum=0.0, clip_norm=1.0)
  tx = optimizers.build(config, ONE, None)
  grads = {"a": jnp.array([3.0, 4.0])}
  np.testing.assert_allclose(tx.update(grads, tx.init(grads), grads)[0]["a"], [-0.6, -0.8])


def test_unknown_options_and_sides_are_named():
  config = config_lib.optimizer("adam", learning_rate=0.1, damping=1.0)
  with pytest.raises(UserError, match="optimizer.damping is no option of adam"):
    optimizers.build(config, ONE, None)
  sgd = config_lib.optimizer("sgd", learning_rate=0.1)
  config = config_lib.grafted(sgd, sgd)
  del config.direction
  with pytest.raises(UserError, match="optimizer.direction is missing"):
    optimizers.build(config, ONE, None)
  with pytest.raises(UserError, match="optimizer kfac: problem is None; allowed: a Problem"):
    optimizers.build(config_lib.optimizer("kfac", learning_rate=0.1), ONE, None)


def kfac_config(learning_rate=0.3, **values):
  defaults = dict(damping=0.02, norm_constraint=1e9, weight_decay=0.0)
  return config_lib.optimizer("kfac", learning_rate, **defaults | values)


@pytest.mark.parametrize("damping_type", ["exact", "factored"])
def test_one_program_makes_the_updates_of_all_rates_and_dampings(damping_type):
  params, batch = small_net.problem()
  problem = optimizers.Problem(small_net.predict, params, batch, "categorical")
  grads = jax.grad(small_net.loss)(params, batch)
  transforms, traces = [], []

  @jax.jit
  def update(state):
    traces.append(1)
    return transforms[0].update(grads, state, params, batch=batch, rng=jax.random.key(0))[0]

  for numbers in (dict(learning_rate=0.3, damping=0.02), dict(learning_rate=0.1, damping=2.0)):
    own = optimizers.build(kfac_config(damping_type=damping_type, **numbers), ONE, problem)
    transforms.append(own)
    state = own.init(params)
    found = {name: float(x) for name, x in numbers_lib.given(state, ONE).items()}
    assert found == pytest.approx(numbers)
    kernel = update(state)["two"]["kernel"]
    eager, _ = own.update(grads, state, params, batch=batch, rng=jax.random.key(0))
    np.testing.assert_allclose(kernel, eager["two"]["kernel"], rtol=1e-4, atol=1e-7)
  assert len(traces) == 1


def test_both_sides_of_a_pair_have_numbers():
  sides = (config_lib.optimizer("sgd", 0.1), config_lib.optimizer("adam", 0.2))
  config, grads = config_lib.grafted(*sides), {"a": jnp.array([3.0, 4.0])}
  tx = optimizers.build(config, ONE, None)
  state = tx.init(grads)
  names = ["magnitude.learning_rate", "direction.learning_rate"]
  assert {k: float(v) for k, v in numbers_lib.given(state, ONE).items()} == pytest.approx(
    dict(zip(names, (0.1, 0.2)))
  )
  for rate in (0.1, 0.3):
    state.magnitude.hyperparams["learning_rate"] = jnp.float32(rate)
    step = tx.update(grads, state, grads)[0]["a"]
    np.testing.assert_allclose(step, -5 * rate / np.sqrt(2) * np.ones(2), rtol=1e-6)


class Numbered(nn.Module):
  """Names of layers that a pattern read letter by letter would match."""

  @nn.compact
  def __call__(self, x):
    for i in range(3):
      x = nn.Dense(3, name=f"layers_{i}")(x)
    return x


def blocks_of(listed):
  x = jnp.ones((2, 3))
  params = jax.eval_shape(Numbered().init, jax.random.key(0), x)["params"]
  predict = lambda p, b: Numbered().apply({"params": p}, b)
  found = optim.Curvature(predict, params, x, unpreconditioned=listed).blocks
  return {block.name for block in found if block.kind == "kronecker"}


def test_a_text_is_one_pattern():
  every = {f"layers_{i}" for i in range(3)}
  assert blocks_of("layers_2") == blocks_of(["layers_2"]) == every - {"layers_2"}
  assert blocks_of("") == blocks_of(()) == every
  assert blocks_of("layers_[12]") == {"layers_0"}


def test_a_curvature_is_traced_once_for_two_optimizers_of_a_problem():
  made = []

  def predict(params, batch):
    made.append(1)
    return small_net.predict(params, batch)

  params, batch = small_net.problem()
  problem = optimizers.Problem(predict, params, batch, "categorical")
  first = 0
  for values in ({}, dict(damping=1.0, factor_period=3, damping_type="factored")):
    optimizers.build(kfac_config(**values), ONE, problem)
    first = first or len(made)
    assert len(made) == first
  optimizers.build(kfac_config(estimation="exact"), ONE, problem)
  assert len(made) == 2 * first


def test_patterns_that_are_none_are_told():
  params, batch = small_net.problem()
  problem = optimizers.Problem(small_net.predict, params, batch, "categorical")
  with pytest.raises(UserError, match="optimizer kfac: unpreconditioned.*three"):
    optimizers.build(kfac_config(unpreconditioned="three"), ONE, problem)


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS.keys() - set(WHOLE_STEPS)))
def test_decay_shrinks_kernels_and_nothing_else(name):
  params, batch = small_net.problem()
  params = jax.tree.map(lambda p: p + 0.5, params)
  own = dict(decay_from=0) if name == "kfac" else {}
  config = config_lib.optimizer(name, 0.1, weight_decay=0.2, **own)
  tx = optimizers.build(
    config, ONE, optimizers.Problem(small_net.predict, params, batch, "categorical")
  )
  state, update = tx.init(params), jax.jit(tx.update)
  for t in range(2):  # the first of SOAP and Shampoo is zero
    updates, state = update(
      jax.tree.map(jnp.zeros_like, params), state, params, batch=batch, rng=jax.random.key(t)
    )
  for layer, own in updates.items():
    assert not np.any(own["bias"])
    assert (np.sign(own["kernel"]) == -np.sign(params[layer]["kernel"])).all()
    if name in ("adamw", "muon", "soap", "shampoo", "kfac_adam", "kfac_muon"):  # decoupled
      np.testing.assert_allclose(own["kernel"], -0.02 * params[layer]["kernel"], rtol=1e-5)


def quadratic_problem():
  """Least squares, whose Gauss-Newton step ends at the minimum."""
  x = jax.random.normal(jax.random.key(0), (12, 3))
  batch = {"x": x, "y": x @ jnp.array([[1.0], [-2.0], [0.5]])}
  predict = lambda params, batch: (batch["x"] @ params["w"], batch["y"])
  loss = lambda params: jnp.mean(jnp.sum((batch["x"] @ params["w"] - batch["y"]) ** 2, axis=1))
  params = {"w": jnp.ones((3, 1))}
  return optimizers.Problem(predict, params, batch, "normal"), params, batch, loss


@pytest.mark.parametrize("name", WHOLE_STEPS)
def test_optimizers_of_whole_steps_solve_least_squares(name):
  problem, params, batch, loss = quadratic_problem()
  config = config_lib.optimizer(name)
  assert config.learning_rate == 1
  tx = optimizers.build(config, ONE, problem)
  state, first = tx.init(params), loss(params)

  @jax.jit
  def step(params, state):
    value, grads = jax.value_and_grad(loss)(params)
    extra = dict(batch=batch, rng=jax.random.key(0), value=value, value_fn=loss)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  for _ in range(8):
    params, state = step(params, state)
  assert loss(params) < 1e-8 * first
  for wrong in (dict(clip_norm=1.0), dict(weight_decay=0.1)):
    refused = config.copy_and_resolve_references()
    refused.update(wrong)
    with pytest.raises(UserError):
      optimizers.build(refused, ONE, problem)


def test_one_optimizer_after_another():
  problem, params, batch, loss = quadratic_problem()
  first, second = config_lib.optimizer("sgd", 1e-2, momentum=0.0), config_lib.optimizer("lbfgs")
  tx = optimizers.build(config_lib.in_turn(first, second, steps=2), ONE, problem)
  state, by_hand, rates = tx.init(params), params, []
  for _ in range(8):
    value, grads = jax.value_and_grad(loss)(params)
    extra = dict(batch=batch, value=value, value_fn=loss)
    updates, state = tx.update(grads, state, params, **extra)
    params = optax.apply_updates(params, updates)
    rates.append(numbers_lib.given(state, ONE)["learning_rate"])
    if len(rates) <= 2:
      by_hand = jax.tree.map(lambda p, g: p - 1e-2 * g, by_hand, jax.grad(loss)(by_hand))
      np.testing.assert_allclose(params["w"], by_hand["w"], rtol=1e-6)
  np.testing.assert_allclose(rates, [1e-2] * 2 + [1.0] * 6, rtol=1e-6)
  assert loss(params) < 1e-6
  with pytest.raises(UserError, match="second is missing"):
    optimizers.build(config_lib.in_turn(first, None, steps=2), ONE, problem)
