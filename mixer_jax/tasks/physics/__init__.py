"""Differential equations solved by nets; `docs/own_equation.py` writes one."""

from mixer_jax.tasks.physics.derivatives import gradient, laplacian, partial, powers
from mixer_jax.tasks.physics.problem import Box, Grid, Learned, Problem, Term, observed
from mixer_jax.tasks.physics.task import Physics, task

__all__ = (
  "Box",
  "Grid",
  "Learned",
  "Physics",
  "Problem",
  "Term",
  "gradient",
  "laplacian",
  "observed",
  "partial",
  "powers",
  "task",
)
