"""Runs whose batches come in buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment
from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file
from mixer_jax.training.state import init_state
from mixer_jax.training.trainer import Trainer
from tests import children
from tests.conftest import optimizer_of
from tests.training import bucketed_task


@pytest.fixture
def config():
  config = config_lib.default("tests.training.bucketed_task:NextNumber")
  config.update(batch_size=8, num_epochs=2, eval_batch_size=40)
  config.mesh.data = 1
  config.optimizer = optimizer_of("sgd")
  return config


@pytest.mark.thorough
def test_steps_are_those_of_batches_that_nothing_was_cut_from(config):
  """On one device; on two, in two parts a batch; on eight."""
  run = experiment.build(config)
  start = jax.device_get(run.task.init(jax.random.key(0)))
  params, rows = start["params"], run.datasets["train"].tree
  sizes, momentum = set(), jax.tree.map(np.zeros_like, params)
  gradient = jax.jit(jax.grad(lambda p, b: run.task.loss({"params": p}, b, None)[0].value()))
  for step in range(6):
    ids = run.order(step)
    sizes.add(len(ids))
    batch = run.task.prepare(None, jax.tree.map(lambda x: x[ids], rows), train=True)
    assert batch["ids"].shape == (len(ids), bucketed_task.LONGEST - 1)
    grads = gradient(params, batch)
    momentum = jax.tree.map(lambda g, m: g + 0.9 * m, grads, momentum)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
  assert len(sizes) > 1
  for devices, parts in ((2, 2), (8, 1)):
    config.mesh.data, config.accum_steps = devices, parts
    config.num_steps = config.eval_steps = config.checkpoint_steps = 6
    trainer = Trainer(run := experiment.build(config), init_state(run, start))
    trainer.advance()
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, trainer.state.params, params)


@pytest.mark.thorough
def test_examples_per_second_counts_what_was_trained_on(config):
  trainer = Trainer(run := experiment.build(config), init_state(run))
  while trainer.step < run.clock.steps_per_epoch:
    trainer.advance()
  row = trainer.report()
  order = run.order
  expected = sum(len(order(step)) for step in range(order.steps_per_epoch))
  assert row["examples_per_second"] * row["seconds"] == pytest.approx(expected)
  assert 150 - 8 < expected <= 150


@pytest.mark.thorough
def test_a_stopped_run_ends_with_the_same_bits(config, tmp_path):
  config.optimizer = optimizer_of("kfac")
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  first = children.trained(config, whole)
  steps = experiment.build(config).clock.steps_per_epoch
  assert "3 shapes of batches: " in first.out
  assert first.out.count("compiled in") == 3
  stopped = children.Child(config, parts, children.signal_at, (steps + 2,))
  assert stopped.wait() == 143, stopped.err
  assert children.latest(parts) == steps + 2
  children.trained(config, parts)
  children.assert_same_run(config, parts, whole)
  rows = metrics_file.read(whole)
  assert [row["epoch"] for row in rows] == [1, 2]
  assert rows[1]["test/loss"] < 0.6 * np.log(bucketed_task.NUMBERS)
  assert evaluate.evaluate(str(whole))["test"]["loss"] == rows[1]["test/loss"]


@pytest.mark.thorough
def test_kfac_takes_batches_of_any_shape(config):
  """Statistics of a batch of one length are those of the same batch with padding."""
  config.optimizer = optimizer_of("kfac")
  run = experiment.build(config)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  examples = jax.tree.map(lambda x: x[run.order(0)], run.datasets["train"].tree)
  optimizer, states = run.optimizer, []
  for cut in (run.order.cut, lambda x: x):
    batch = run.task.prepare(None, jax.tree.map(jnp.asarray, cut(examples)), train=True)
    params = variables["params"]
    extra = dict(batch=(batch, {}), rng=jax.random.key(1), model_params=params)
    grads = jax.grad(lambda p, b=batch: run.task.loss({"params": p}, b, None)[0].value())(params)
    states.append(jax.jit(optimizer.update)(grads, optimizer.init(params), params, **extra)[0])
  # Sampled targets of other shapes are other draws; the directions are close all the same.
  flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(s)]) for s in states]
  assert flat[0] @ flat[1] > 0.9 * np.linalg.norm(flat[0]) * np.linalg.norm(flat[1])


def test_mistakes_are_one_line(config):
  config.data.batch_tokens = 95
  with pytest.raises(
    UserError, match="batch_tokens is 95; allowed: at least 96, batch_size 8 x 12"
  ):
    experiment.build(config)


def test_few_examples_make_a_batch_of_their_own(config):
  config.data.update(batch_tokens=1000, examples=60)
  run = experiment.build(config)
  assert (len(run.order(0)), run.order.steps_per_epoch, run.order.batch_size) == (56, 1, 80)
