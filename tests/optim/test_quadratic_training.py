"""Steps chosen by the quadratic model: saved, spread over devices, of a part; mistakes."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mixer_jax import optim
from mixer_jax.errors import UserError
from tests.conftest import waves
from tests.optim.small_net import close, loss, predict, problem
from tests.optim.small_net_fisher import CHOSEN, EXACT, train
from tests.optim.test_quadratic_model import POISSON
from tests.training.test_step import advanced, assert_close


@pytest.mark.thorough
def test_a_saved_and_restored_state_goes_on(tmp_path):
  params, batch = problem(16)
  tx = optim.kfac(1.0, predict, params, batch, damping=1e-3, inverse_period=3, **CHOSEN, **EXACT)
  first = train(tx, params, batch, 7)
  assert float(first[1].damping) != pytest.approx(1e-3)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "mid", first)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "mid", jax.eval_shape(lambda: first))
  whole, again = (train(tx, *pair[:1], batch, 5, state=pair[1]) for pair in (first, restored))
  jax.tree.map(np.testing.assert_array_equal, again, whole)


def test_a_state_may_be_donated_and_its_damping_given_as_an_array():
  params, batch = problem()
  damping = jnp.float32(1e-2)
  tx = optim.kfac(1.0, predict, params, batch, damping=damping, **CHOSEN)
  taken = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  for _ in range(2):  # the second time the caller's array is still there
    taken(tx.init(params))
  make = optax.inject_hyperparams(optim.kfac, static_args=("predict", "params", "batch"))
  taken(make(1.0, predict, params, batch, **CHOSEN).init(params))


@pytest.mark.thorough
def test_a_part_of_the_parameters_is_moved():
  params, batch = problem(64)
  tx = optim.kfac(1.0, predict, params, batch, damping=0.1, damping_period=1, **CHOSEN, **EXACT)
  labels = {"one": "kfac", "two": "still"}
  mixed = optax.multi_transform({"kfac": tx, "still": optax.set_to_zero()}, labels)
  moved, state = train(mixed, params, batch, 3)
  assert loss(moved, batch) < loss(params, batch)
  close(moved["two"], params["two"], rtol=0, atol=0)
  ratio = state.inner_states["kfac"].inner_state.ratio
  assert 0.5 < float(ratio) < 1.5  # of the part alone


@pytest.mark.thorough
def test_devices_that_share_a_batch_make_the_same_steps():
  params, batch = problem(16)
  options = CHOSEN | EXACT | dict(damping=0.1, damping_period=2)
  tx = optim.kfac(1.0, predict, params, batch, **options)
  one, state = train(tx, params, batch, 4)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  rows = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
  spread, other = train(tx, params, rows, 4)
  close(spread, one, rtol=1e-4, atol=1e-5)
  by_hand = optim.kfac(1.0, predict, params, batch, axis_name="data", **options)

  def step(params, state, batch):
    mean = lambda p: jax.lax.pmean(loss(p, batch), "data")
    grads = jax.grad(mean)(params)
    updates, state = by_hand.update(grads, state, params, batch=batch, value_fn=mean)
    return optax.apply_updates(params, updates), state

  specs = dict(in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")))
  step = jax.jit(jax.shard_map(step, mesh=mesh, out_specs=PartitionSpec(), **specs))
  moved, hand = params, by_hand.init(params)
  for _ in range(4):
    moved, hand = step(moved, hand, rows)
  close(moved, one, rtol=1e-4, atol=1e-5)
  for found in (other, hand):
    assert float(found.damping) == pytest.approx(float(state.damping))
    assert float(found.ratio) == pytest.approx(float(state.ratio), rel=1e-3)


def run(**values):
  options = dict(CHOSEN, damping_period=2, learning_rate=1.0, damping=0.1, estimation="exact")
  return waves("kfac", **{f"optimizer.{k}": v for k, v in options.items()}, **values)


FACTORED = dict(damping_type="factored", inverse_period=2, factor_damping_period=2)


@pytest.mark.parametrize("options", [{}, FACTORED], ids=["exact", "factored"])
@pytest.mark.thorough
def test_training_on_any_mesh_and_in_parts_makes_the_same_steps(options):
  options = {f"optimizer.{k}": v for k, v in options.items()}
  one = advanced(run(**options), steps=4)
  assert float(one[0].opt_state.damping) != pytest.approx(0.1)
  for change in ({"accum_steps": 4}, {"mesh.data": 2, "mesh.model": 4}):
    other = advanced(run(**options, **change), steps=4)
    assert_close(other, one, rtol=2e-3, atol=2e-4)
    states = [state.opt_state for state, _ in (one, other)]
    assert float(states[1].damping) == pytest.approx(float(states[0].damping))
    if options:
      own = [float(state.inner.factor_damping) for state in states]
      assert own[1] == pytest.approx(own[0]) and own[0] != pytest.approx(0.1)


@pytest.mark.thorough
def test_mistakes_are_one_line():
  params, batch = problem()
  build = lambda **kw: optim.kfac(1.0, predict, params, batch, **EXACT, **kw)
  grads, tx = jax.grad(loss)(params, batch), build(**CHOSEN)
  with pytest.raises(ValueError, match="adaptive_damping needs the loss as a function"):
    tx.update(grads, tx.init(params), params, batch=batch)
  with pytest.raises(ValueError, match="update needs params"):
    build(quadratic_model=True).update(grads, tx.init(params).inner, batch=batch)
  with pytest.raises(ValueError, match="but damping is a schedule"):
    build(adaptive_damping=True, damping=lambda count: 0.1)
  with pytest.raises(ValueError, match="damping is 0.1; it must be from min_damping, 1e-08, to"):
    build(adaptive_damping=True, damping=0.1, max_damping=0.01)
  with pytest.raises(ValueError, match="momentum is 0.5; a quadratic model takes its place: leave"):
    build(quadratic_model=True, momentum=0.5)
  with pytest.raises(ValueError, match="norm_constraint is 0.1; .*: leave it at 0.01"):
    build(quadratic_model=True, norm_constraint=0.1)
  with pytest.raises(ValueError, match="factor_damping_period is 20; it needs damping_type="):
    build(quadratic_model=True, factor_damping_period=20)
  factored = dict(damping_type="factored", inverse_period=10)
  with pytest.raises(ValueError, match="factor_damping_period is 20; it needs quadratic_model"):
    build(factor_damping_period=20, **factored)
  with pytest.raises(ValueError, match="period is 15; allowed: a multiple of inverse_period, 10"):
    build(factor_damping_period=15, quadratic_model=True, **factored)
  drawn = POISSON._replace(factor=None)
  with pytest.raises(ValueError, match="quadratic model needs a likelihood with a factor"):
    optim.kfac(1.0, predict, params, batch, likelihood=drawn, quadratic_model=True)
  with pytest.raises(UserError, match="optimizer kfac: a quadratic model needs clip_norm=0"):
    advanced(run(**{"optimizer.clip_norm": 1.0}))
