"""The optimizers of a config: their fields and schedules, and how they are made of `optim`'s."""

from mixer_jax.optimizers.build import (
  General,
  Graft,
  InTurn,
  build,
  check,
  curvature_blocks,
  group,
  is_kernel,
  leaves,
  makes_whole_steps,
  of_curvature,
  periods,
  table,
)
from mixer_jax.optimizers.registry import OPTIMIZERS, Problem
from mixer_jax.optimizers.schedules import Multiplier, Schedule
