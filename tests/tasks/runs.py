"""What the tests of tasks share: moved variables, runs that are killed, other settings of JAX."""

import functools

import jax
import numpy as np

from mixer_jax import experiment
from mixer_jax.data import dataset
from mixer_jax.training import restore
from mixer_jax.training.evaluator import Evaluator
from mixer_jax.training.state import init_state
from mixer_jax.training.step import step_keys
from mixer_jax.training.trainer import Trainer
from tests import children


def shaken(variables, scale=0.1, seed=0):
  """Variables plus normal noise: no head, bias or norm is at its start."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: x + scale * rng.normal(size=x.shape).astype(np.float32), variables)


def assert_kill_changes_nothing(config, path, *steps, whole=None, before_resume=lambda: None):
  """A run that is stopped in a step ends with the bits of `whole`, by default trained here too."""
  if whole is None:
    children.trained(config, whole := path / "whole")
  stopped = children.Child(config, path / "parts", children.signal_at, steps)
  assert stopped.wait() == 143, stopped.err
  before_resume()
  children.trained(config, path / "parts")
  children.assert_same_run(config, whole, path / "parts")


# JAX's settings that change what its own keys draw, or how wide numbers without a type are.
SETTINGS = {
  "JAX_ENABLE_X64": lambda: jax.enable_x64(True),
  "JAX_DEFAULT_PRNG_IMPL": lambda: jax.default_prng_impl("rbg"),
  "JAX_THREEFRY_PARTITIONABLE": lambda: jax.threefry_partitionable(False),
}


def begun(config, steps=2):
  """What a seed decides: a run's first variables, a training batch, losses of its steps, metrics."""
  config = config.copy_and_resolve_references()
  config.num_steps = config.eval_steps = config.checkpoint_steps = steps
  run = experiment.build(config)
  variables = run.task.initial(run.variable_shapes, restore.stored)
  trainer = Trainer(run, init_state(run, variables))
  first = jax.device_get(trainer.state.variables)
  split = run.datasets["train"]
  examples = dataset.examples(split, range(min(4, len(split))))
  key = step_keys(trainer.state)[0]
  batch = jax.device_get(jax.jit(lambda k, x: run.task.prepare(k, x, train=True))(key, examples))
  metrics = Evaluator(run)(trainer.state.variables)
  trainer.advance()
  return first, batch, metrics, trainer.report()["train/loss"]


def assert_settings_change_no_draw(config, settings=SETTINGS):
  wanted = begun(config)
  for name in settings:
    with SETTINGS[name]():
      found = begun(config)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5, err_msg=name)
    jax.tree.map(close, found, wanted)
