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
from tests.optim.small_net import close, curvature, loss, predict, problem
from tests.optim.small_net_fisher import EXACT, chosen, train
from tests.optim.test_quadratic_model import POISSON
from tests.training.test_step import advanced, assert_close


@pytest.mark.thorough
def test_a_saved_and_restored_state_goes_on(tmp_path):
  params, batch = problem(16)
  tx = chosen(curvature(params, batch, **EXACT), 1e-3, inverse_period=3)
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
  of = curvature(params, batch)
  tx = chosen(of, damping)
  taken = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  for _ in range(2):  # the second time the caller's array is still there
    taken(tx.init(params))
  make = lambda learning_rate, damping: chosen(of, damping, learning_rate)
  taken(optax.inject_hyperparams(make)(1.0, 0.1).init(params))


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


@pytest.mark.thorough
def test_mistakes_are_one_line():
  params, batch = problem()
  grads, tx = jax.grad(loss)(params, batch), chosen(curvature(params, batch, **EXACT))
  with pytest.raises(ValueError, match="the loss as a function"):
    tx.update(grads, tx.init(params), params, batch=batch)
  told = dict(batch=batch, value_fn=lambda p: loss(p, batch))
  with pytest.raises(ValueError, match="needs params"):
    tx.update(grads, tx.init(params), **told)
  outputs = lambda params, batch: predict(params, batch)[0]
  likelihood = POISSON._replace(factor=None)
  drawn = chosen(optim.Curvature(outputs, params, batch, likelihood=likelihood))
  told["rng"] = jax.random.key(0)
  with pytest.raises(ValueError, match="likelihood with a factor"):
    drawn.update(grads, drawn.init(params), params, **told)
  with pytest.raises(UserError, match="clip_norm is 1; allowed: 0"):
    advanced(run(**{"optimizer.clip_norm": 1.0}))
