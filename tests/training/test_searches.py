"""What a step tells an optimizer that tries steps out, and runs with such an optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.training import loop, step
from mixer_jax.training.state import init_state
from tests.conftest import waves

ALL = dict(batch_size=256)  # of the training examples


def run_with(optimizer, **values):
  config = waves(**ALL, **values)
  config.optimizer = optimizer
  return experiment.build(config)


def trained(run):
  """The last state, and the training error of each evaluation."""
  states, rows = zip(*loop.evaluations(run))
  return states[-1], [row["train/error"] for row in rows]


@pytest.mark.parametrize("parts", [1, 4])
def test_the_loss_tried_out_is_that_of_the_gradient(monkeypatch, parts):
  """The same batch, parts and random draws: here the loss has noise of its key."""
  told = {}

  def record(updates, state, params=None, *, value, value_fn, **extra):
    moved = jax.tree.map(lambda p: 1.1 * p, params)
    told.update(
      gradient=updates,
      value=value,
      found=value_fn(params),
      found_gradient=jax.grad(value_fn)(params),
      moved=value_fn(moved),
    )
    return updates, told

  tx = optax.GradientTransformationExtraArgs(lambda params: {}, record)
  run = experiment.build(waves(**ALL, accum_steps=parts))
  monkeypatch.setattr(type(run), "optimizer", tx)
  loss = run.task.loss

  def noisy(variables, batch, key):
    rate = jax.random.uniform(key, batch["x"].shape)
    return loss(variables, {**batch, "x": batch["x"] * rate}, key)

  monkeypatch.setattr(run.task, "loss", noisy)
  batch = jax.tree.map(lambda x: x[:256], run.datasets["train"].tree)
  after = jax.jit(lambda state: step.update(run, state, batch)[0].opt_state)
  found = after(init_state(run))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
  close(found["found"], found["value"])
  jax.tree.map(close, found["found_gradient"], found["gradient"])
  assert abs(found["moved"] - found["value"]) > 1e-4


ADAM = config_lib.optimizer("adam", 1e-2)
LBFGS = config_lib.optimizer("lbfgs", iterations=4)


@pytest.mark.parametrize("optimizer", [LBFGS, config_lib.optimizer("ssbroyden")])
def test_a_run_that_searches_ends_far_below_adam(optimizer):
  """Whole batches of the task of docs/own_task.py, 24 updates each."""
  ends = []
  for own in (ADAM, optimizer):
    _, errors = trained(run_with(own, num_steps=24, eval_steps=12))
    assert errors[1] < errors[0]
    ends.append(errors[1])
  assert ends[1] < 0.6 * ends[0]


def test_adam_then_lbfgs_in_one_run():
  both = config_lib.in_turn(ADAM, LBFGS, steps=12)
  state, errors = trained(run_with(both, num_steps=24, eval_steps=6))
  assert errors == sorted(errors, reverse=True)
  assert errors[3] < 0.6 * errors[1]
  assert [int(own.count) for own in state.opt_state.states] == [12, 12]
  assert jnp.isfinite(jax.flatten_util.ravel_pytree(state.params)[0]).all()


@pytest.mark.parametrize("name", ["lbfgs", "ssbroyden"])
def test_two_devices_search_as_one_does(name):
  run = lambda devices: run_with(
    config_lib.optimizer(name), num_steps=8, eval_steps=8, **{"mesh.data": devices}
  )
  ends = [trained(run(devices))[0].params for devices in (1, 2)]
  close = functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-3)
  jax.tree.map(close, *ends)
