"""The splits of a run on an equation: points drawn on the host, which depend on the seed alone.

NumPy's PCG64 draws them in float64, whatever the width of the run and JAX's settings are.
"""

from typing import Any, Mapping, Sequence
import zlib

import jax
import numpy as np

from mixer_jax import npz
from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path
from mixer_jax.tasks.physics.problem import Box, Grid, Problem

_ROUNDING = 1e-9  # a point may lie outside the domain by this share of its sides


def drawn(problem: Problem, name: str, count: int, seed: Sequence[Any]) -> np.ndarray:
  """Rows of a term, float64 [count, columns]; a UserError for a wrong shape or points outside."""
  texts = (zlib.crc32(x.encode()) if isinstance(x, str) else x for x in (*seed, name))
  rows = np.asarray(problem.terms[name].points(np.random.default_rng([*texts]), count), np.float64)
  what, dim = f"points of the term {name!r}", problem.domain.dim
  if rows.ndim != 2 or len(rows) != count or rows.shape[1] < dim:
    raise UserError(f"{what} have shape {rows.shape}; allowed: [{count}, {dim} or more]")
  _check_inside(what, problem.domain, rows[:, :dim])
  return rows


def _check_inside(what: str, domain: Box, x: np.ndarray) -> None:
  """Raises a UserError if a point of x [n, dim] lies outside the domain."""
  low, high = (np.asarray(side, np.float64) for side in (domain.low, domain.high))
  slack = _ROUNDING * (high - low)
  outside = ~((x >= low - slack) & (x <= high + slack))  # true for NaN, too
  if outside.any():
    row, axis = np.argwhere(outside)[0]
    allowed = f"{low[axis]:.6g} to {high[axis]:.6g}, the domain"
    raise UserError(f"{what}: {domain.axes[axis]} is {x[row, axis]:.6g}; allowed: {allowed}")


def read(path: str, domain: Box) -> np.ndarray:
  """The array "points" [n, dim] of an .npz file; a UserError if it has none, or points outside."""
  with as_user_error(path, ValueError, OSError, KeyError), npz.Npz(user_path(path)) as file:
    found = np.asarray(file.read("points"), np.float64)
  if found.ndim != 2 or found.shape[1] != domain.dim:
    raise UserError(f"{path}: points have shape {found.shape}; allowed: [n, {domain.dim}]")
  _check_inside(path, domain, found)
  return found


def training_split(
  problem: Problem, counts: Mapping[str, int], sets: int, seed: int, dtype: Any
) -> Arrays:
  """Sets of points as examples: {term: [sets, count, columns]}."""
  rows = lambda name, i: drawn(problem, name, counts[name], (seed, "train", i))
  stacked = {name: np.stack([rows(name, i) for i in range(sets)]) for name in problem.terms}
  return Arrays({name: x.astype(dtype) for name, x in stacked.items()})


def evaluation_split(problem: Problem, grid: Grid | None, number: int, dtype: Any) -> Arrays:
  """Points of evaluation as examples: {"point": [n, dim], "terms": {term: [n, columns]}}.

  The points are those of the reference's grid, or `number` points drawn inside the domain, the same
  for every seed. "value" [n, functions] is there if the solution is known.
  """
  arrays: dict[str, Any] = {}
  if grid is not None:
    points, arrays["value"] = grid.rows()
  else:
    points = problem.domain.inside(np.random.default_rng(zlib.crc32(b"test")), number)
    if problem.exact is not None:
      arrays["value"] = problem.exact_values(points)
  if "value" in arrays and arrays["value"].shape[1] > len(problem.functions):
    found, names = arrays["value"].shape[1], ", ".join(problem.functions)
    raise UserError(f"the solution has {found} functions; allowed: those of the problem, {names}")
  terms = {name: drawn(problem, name, len(points), ("test",)) for name in problem.terms}
  arrays |= {"point": points, "terms": terms}
  return Arrays(jax.tree.map(lambda x: x.astype(dtype), arrays))
