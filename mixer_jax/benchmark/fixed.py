"""Training steps on one batch that lies on the device already."""

import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax

from mixer_jax import sharding, steps
from mixer_jax.experiment import Experiment


def batch(run: Experiment) -> Any:
  """An augmented batch on the devices."""
  images, labels = map(jnp.asarray, run.dataset.train.first(run.config.batch_size))
  made = run.task.batch(jax.random.key(0), images, labels, train=True)
  return jax.device_put(made, sharding.batched(run.mesh))


def no_totals(run: Experiment) -> Any:
  """Metrics of no step, on the devices."""
  return jax.device_put(run.task.train_metrics.empty(), sharding.replicated(run.mesh))


def make_steps(run: Experiment, length: int | None = None) -> Callable:
  """The program of some steps on one batch.

  Args:
    run: the experiment.
    length: how many steps; needed where counts are not given.

  Returns:
    A jitted function of (state, totals, batch, counts) to (state, totals). It
    donates the state. The i-th step is made the counts[i]-th update of the
    optimizer, which decides what K-FAC renews in it; counts None: the next ones.
  """

  @functools.partial(jax.jit, donate_argnums=0)
  def program(state, totals, batch, counts):
    def step(carry, count):
      state, totals = carry
      if count is not None:
        state = state.replace(opt_state=optax.tree.set(state.opt_state, count=count))
      state, totals, _ = steps.update(run, state, totals, batch)
      return (state, totals), None

    if length == 1 or (counts is not None and len(counts) == 1):
      return step((state, totals), None if counts is None else counts[0])[0]
    return jax.lax.scan(step, (state, totals), counts, length)[0]

  return program
