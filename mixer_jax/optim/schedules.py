"""Learning-rate schedules as multipliers: 1 is the optimizer's own rate.

A schedule multiplies every learning rate of a run, so both sides of a grafted
pair follow it. Configs state times in epochs.
"""

import math
from typing import Callable

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mixer_jax.errors import UserError

Schedule = Callable[[jax.Array], jax.Array]

NAMES = ("constant", "step", "cosine", "linear")
# Counts are int32.
_LAST_EPOCH = 2**31 - 1


def build(config: ml_collections.ConfigDict, steps_per_epoch: int, num_epochs: float) -> Schedule:
  """The multiplier as a function of the update count.

  Args:
    config: `name` ("constant", "step", "cosine" or "linear"), `warmup_epochs` of
      a linear rise from 0, `end` (the last multiplier of cosine and linear), and
      for "step": `epochs` at which the rate is multiplied by `factor`.
    steps_per_epoch: updates an epoch.
    num_epochs: length of the run.

  Returns:
    A function from an int count to a float32 multiplier.

  Raises:
    UserError: an unknown name or times that contradict each other.
  """
  check(config, num_epochs)
  warmup = config.warmup_epochs * steps_per_epoch
  total = num_epochs * steps_per_epoch
  boundaries = np.array([round(e * steps_per_epoch) for e in config.epochs], np.float32)

  def multiplier(count):
    count = jnp.asarray(count, jnp.float32)
    progress = jnp.clip((count - warmup) / max(total - warmup, 1), 0.0, 1.0)
    if config.name == "step":
      value = config.factor ** jnp.sum(count >= boundaries)
    elif config.name == "cosine":
      value = config.end + (1 - config.end) * 0.5 * (1 + jnp.cos(math.pi * progress))
    elif config.name == "linear":
      value = config.end + (1 - config.end) * (1 - progress)
    else:
      value = jnp.ones(())
    return value * jnp.minimum((count + 1) / warmup, 1.0) if warmup else value

  return multiplier


def check(config: ml_collections.ConfigDict, num_epochs: float) -> None:
  """Raises a UserError for an unknown name or times that contradict each other."""
  if config.name not in NAMES:
    raise UserError(f"schedule.name is {config.name!r}; allowed: {', '.join(NAMES)}")
  if not 0 <= config.warmup_epochs < num_epochs:
    raise UserError(
      f"schedule.warmup_epochs is {config.warmup_epochs}; it must be at least 0 and below"
      f" num_epochs ({num_epochs})"
    )
  if not 0 <= config.end <= 1:
    raise UserError(f"schedule.end is {config.end}; allowed: 0 to 1")
  if list(config.epochs) != sorted(set(config.epochs)) or any(e <= 0 for e in config.epochs):
    raise UserError(f"schedule.epochs is {tuple(config.epochs)}; it must rise from above 0")
  if any(e > _LAST_EPOCH for e in config.epochs):
    raise UserError(f"schedule.epochs is {tuple(config.epochs)}; allowed: up to {_LAST_EPOCH}")
  if not 0 < config.factor <= 1:
    raise UserError(f"schedule.factor is {config.factor}; allowed: above 0 up to 1")
