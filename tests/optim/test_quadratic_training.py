"""Training by the quadratic model: a part of the parameters, several devices, parts of a batch."""

import jax
from jax.sharding import NamedSharding, PartitionSpec
import optax
import pytest

from tests.conftest import waves
from tests.optim.small_net import close, curvature, loss, problem
from tests.optim.small_net_fisher import EXACT, chosen, train
from tests.training.test_step import advanced, assert_close


@pytest.mark.thorough
def test_a_part_of_the_parameters_is_moved():
  params, batch = problem(64)
  tx = chosen(curvature(params, batch, **EXACT), 0.1, damping_period=1)
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
  tx = chosen(curvature(params, batch, **EXACT), 0.1, damping_period=2)
  one, state = train(tx, params, batch, 4)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  rows = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
  spread, other = train(tx, params, rows, 4)
  close(spread, one, rtol=1e-4, atol=1e-5)
  of = curvature(params, batch, axis_name="data", **EXACT)
  by_hand = chosen(of, 0.1, damping_period=2)

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
  options = dict(quadratic_model=True, adaptive_damping=True, damping_period=2, learning_rate=1.0)
  options |= dict(damping=0.1, estimation="exact")
  return waves("kfac", **{f"optimizer.{k}": v for k, v in options.items()}, **values)


FACTORED = dict(damping_type="factored", inverse_period=2, factor_damping_period=2)


@pytest.mark.parametrize("options", [{}, FACTORED], ids=["exact", "factored"])
@pytest.mark.thorough
def test_training_on_any_mesh_and_in_parts_makes_the_same_steps(options):
  options = {f"optimizer.{k}": v for k, v in options.items()}
  one = advanced(run(**options), steps=4)
  assert float(one[0].opt_state.inner_state.damping) != pytest.approx(0.1)
  for change in ({"accum_steps": 4}, {"mesh.data": 2, "mesh.model": 4}):
    other = advanced(run(**options, **change), steps=4)
    assert_close(other, one, rtol=2e-3, atol=2e-4)
    states = [state.opt_state.inner_state for state, _ in (one, other)]
    assert float(states[1].damping) == pytest.approx(float(states[0].damping))
    if options:
      own = [float(state.inner.factor_damping) for state in states]
      assert own[1] == pytest.approx(own[0]) and own[0] != pytest.approx(0.1)
