"""What a step tells an optimizer that tries steps out, and runs with such an optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import experiment, optim
from mixer_jax.training import step
from mixer_jax.training.state import init_state
from mixer_jax.training.trainer import Trainer
from tests.conftest import waves

ALL = dict(batch_size=256)  # of the training examples


def built(monkeypatch, tx, **values):
  """The run with an optimizer made by hand."""
  run = experiment.build(waves(**ALL, **values))
  monkeypatch.setattr(
    type(run), "optimizer", lambda self, numbers=None: optax.with_extra_args_support(tx)
  )
  return run


def trained(run, rows):
  """The last state, and the training error of each evaluation."""
  step.shared(run).clear()  # programs of other optimizers made by hand have the same recipe
  trainer, errors = Trainer(run, init_state(run)), []
  for _ in range(rows):
    trainer.advance()
    errors.append(trainer.report()["train/error"])
  step.shared(run).clear()
  return trainer.state, errors


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
  run = built(monkeypatch, tx, accum_steps=parts)
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


@pytest.mark.parametrize(
  "make", [lambda: optim.lbfgs(iterations=4), lambda: optim.ssbroyden(max_parameters=10**4)]
)
def test_a_run_that_searches_ends_far_below_adam(monkeypatch, make):
  """Whole batches of the task of docs/own_task.py, 24 updates each."""
  ends = []
  for tx in (optax.adam(1e-2), make()):
    run = built(monkeypatch, tx, num_steps=24, eval_steps=12, checkpoint_steps=24)
    _, errors = trained(run, 2)
    assert errors[1] < errors[0]
    ends.append(errors[1])
  assert ends[1] < 0.6 * ends[0]


def test_adam_then_lbfgs_in_one_run(monkeypatch):
  tx = optim.in_turn([optax.adam(1e-2), optim.lbfgs(iterations=4)], boundaries=[12])
  run = built(monkeypatch, tx, num_steps=24, eval_steps=6, checkpoint_steps=24)
  state, errors = trained(run, 4)
  assert errors == sorted(errors, reverse=True)
  assert errors[3] < 0.6 * errors[1]
  adam, lbfgs = state.opt_state.states
  assert (adam[0].count, lbfgs.count) == (12, 12)
  assert jnp.isfinite(jax.flatten_util.ravel_pytree(lbfgs)[0]).all()


@pytest.mark.parametrize("make", [optim.lbfgs, optim.ssbroyden])
def test_two_devices_search_as_one_does(monkeypatch, make):
  steps = dict(num_steps=8, eval_steps=8, checkpoint_steps=8)
  ends = []
  for devices in (1, 2):
    run = built(monkeypatch, make(), **steps, **{"mesh.data": devices})
    ends.append(trained(run, 1)[0].params)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-3)
  jax.tree.map(close, *ends)
