"""Points of a problem as the splits of a run, drawn on the host by the seed alone.

NumPy's PCG64 in float64 draws them, whatever the width of the run and JAX's settings are.
"""

from typing import Any, Mapping, Sequence
import zlib

import jax
import numpy as np

from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError
from mixer_jax.tasks.physics.problem import Grid, Problem

_ROUNDING = 1e-9  # of the domain's sides, by which a point may lie outside


def drawn(problem: Problem, name: str, count: int, seed: Sequence[Any]) -> np.ndarray:
  """Rows of a term, float64 [count, columns]; a UserError for wrong shapes and points outside."""
  texts = (zlib.crc32(x.encode()) if isinstance(x, str) else x for x in (*seed, name))
  rows = np.asarray(problem.terms[name].points(np.random.default_rng([*texts]), count), np.float64)
  domain = problem.domain
  if rows.ndim != 2 or len(rows) != count or rows.shape[1] < domain.dim:
    allowed = f"[{count}, {domain.dim}], or more columns"
    raise UserError(f"points of the term {name!r} have shape {rows.shape}; allowed: {allowed}")
  low, high = (np.asarray(side, np.float64) for side in (domain.low, domain.high))
  slack = _ROUNDING * (high - low)
  x = rows[:, : domain.dim]
  outside = ~((x >= low - slack) & (x <= high + slack))  # NaN lies outside, too
  if outside.any():
    row, axis = np.argwhere(outside)[0]
    raise UserError(
      f"points of the term {name!r}: {domain.axes[axis]} is {x[row, axis]:.6g};"
      f" allowed: {low[axis]:.6g} to {high[axis]:.6g}, the domain"
    )
  return rows


def train_split(
  problem: Problem, counts: Mapping[str, int], sets: int, seed: int, dtype: Any
) -> Arrays:
  """Sets of points as examples: {term: [sets, count, columns]}."""
  rows = lambda name, i: drawn(problem, name, counts[name], (seed, "train", i))
  stacked = {name: np.stack([rows(name, i) for i in range(sets)]) for name in problem.terms}
  return Arrays({name: x.astype(dtype) for name, x in stacked.items()})


def test_split(problem: Problem, grid: Grid | None, number: int, seed: int, dtype: Any) -> Arrays:
  """Points of evaluation as examples: {"point": [n, dim], "terms": {term: [n, columns]}}.

  With a solution also "value", [n, functions]. The points are those of the reference's grid, if
  there is one, else `number` drawn inside of the domain.
  """
  arrays: dict[str, Any] = {}
  if grid is not None:
    points, arrays["value"] = grid.rows()
  else:
    points = problem.domain.inside(np.random.default_rng([seed, zlib.crc32(b"test")]), number)
    if problem.exact is not None:
      arrays["value"] = exact_values(problem, points)
  terms = {name: drawn(problem, name, len(points), (seed, "test")) for name in problem.terms}
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
