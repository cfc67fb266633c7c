"""Points of a problem as the splits of a run, drawn on the host by the seed alone.

NumPy's PCG64 in float64 draws them, whatever the width of the run and JAX's settings are.
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

_ROUNDING = 1e-9  # of the domain's sides, by which a point may lie outside


def drawn(problem: Problem, name: str, count: int, seed: Sequence[Any]) -> np.ndarray:
  """Rows of a term, float64 [count, columns]; a UserError for wrong shapes and points outside."""
  texts = (zlib.crc32(x.encode()) if isinstance(x, str) else x for x in (*seed, name))
  rows = np.asarray(problem.terms[name].points(np.random.default_rng([*texts]), count), np.float64)
  dim = problem.domain.dim
  if rows.ndim != 2 or len(rows) != count or rows.shape[1] < dim:
    allowed = f"[{count}, {dim}], or more columns"
    raise UserError(f"points of the term {name!r} have shape {rows.shape}; allowed: {allowed}")
  _check_inside(f"points of the term {name!r}", problem.domain, rows[:, :dim])
  return rows


def _check_inside(what: str, domain: Box, x: np.ndarray) -> None:
  """Raises a UserError for a point of [n, dim] outside of the domain."""
  low, high = (np.asarray(side, np.float64) for side in (domain.low, domain.high))
  slack = _ROUNDING * (high - low)
  outside = ~((x >= low - slack) & (x <= high + slack))  # NaN lies outside, too
  if outside.any():
    row, axis = np.argwhere(outside)[0]
    raise UserError(
      f"{what}: {domain.axes[axis]} is {x[row, axis]:.6g};"
      f" allowed: {low[axis]:.6g} to {high[axis]:.6g}, the domain"
    )


def read(path: str, domain: Box) -> np.ndarray:
  """The array "points" of an .npz file, [n, dim]; a UserError if it has none, or points outside."""
  with as_user_error(path, ValueError, OSError, KeyError), npz.Npz(user_path(path)) as file:
    found = np.asarray(file.read("points"), np.float64)
  if found.ndim != 2 or found.shape[1] != domain.dim:
    raise UserError(f"{path}: points have shape {found.shape}; allowed: [n, {domain.dim}]")
  _check_inside(path, domain, found)
  return found


def train_split(
  problem: Problem, counts: Mapping[str, int], sets: int, seed: int, dtype: Any
) -> Arrays:
  """Sets of points as examples: {term: [sets, count, columns]}."""
  rows = lambda name, i: drawn(problem, name, counts[name], (seed, "train", i))
  stacked = {name: np.stack([rows(name, i) for i in range(sets)]) for name in problem.terms}
  return Arrays({name: x.astype(dtype) for name, x in stacked.items()})


def test_split(problem: Problem, grid: Grid | None, number: int, dtype: Any) -> Arrays:
  """Points of evaluation as examples: {"point": [n, dim], "terms": {term: [n, columns]}}.

  With a solution also "value", [n, functions]. The points are those of the reference's grid, if
  there is one, else `number` drawn inside of the domain, the same for all seeds of a run.
  """
  arrays: dict[str, Any] = {}
  if grid is not None:
    points, arrays["value"] = grid.rows()
  else:
    points = problem.domain.inside(np.random.default_rng(zlib.crc32(b"test")), number)
    if problem.exact is not None:
      arrays["value"] = exact_values(problem, points)
  terms = {name: drawn(problem, name, len(points), ("test",)) for name in problem.terms}
  arrays |= {"point": points, "terms": terms}
  cast = lambda x: (
    x.astype(dtype) if isinstance(x, np.ndarray) else {k: cast(v) for k, v in x.items()}
  )
  return Arrays(cast(arrays))


test_split.__test__ = False  # pytest must not take it for a test


def exact_values(problem: Problem, points: np.ndarray) -> np.ndarray:
  """The exact solution at points [n, dim], [n, functions], as wide as JAX's floats are."""
  values = np.asarray(jax.jit(jax.vmap(problem.exact))(points))
  return values.reshape(len(points), -1)
