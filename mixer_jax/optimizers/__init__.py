"""The optimizers of a config: their fields and schedules, and how they are made of `optim`'s."""

from mixer_jax.optimizers.build import (
  General,
  Graft,
  build,
  check,
  group,
  is_kernel,
  kfac_blocks,
  kfac_sides,
  numbers,
  table,
)
from mixer_jax.optimizers.registry import OPTIMIZERS, Problem
from mixer_jax.optimizers.schedules import Multiplier, Schedule
