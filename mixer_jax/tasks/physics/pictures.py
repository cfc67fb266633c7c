"""Pictures of a solution: values, errors and residuals over the domain, and over time."""

from typing import Any, Callable, Mapping

import numpy as np

from mixer_jax.tasks.panels import panels
from mixer_jax.tasks.physics.points import exact_values
from mixer_jax.tasks.physics.problem import Grid, Problem
from mixer_jax.tasks.task import in_batches

_SIDE = 101  # points of a grid that is drawn
_BINS = 20  # of the time
_LOOKS = {"solution": "viridis", "learned": "viridis", "error": "RdBu_r"}

# From points [n, dim] to values [n, functions].
Values = Callable[[np.ndarray], Any]


def draw(
  problem: Problem,
  grid: Grid | None,
  u: Values,
  residuals: Callable,
  arrays: Mapping[str, Any],
  batch_size: int,
) -> Mapping[str, Any]:
  """Figures by name: "solution", "residuals" and, of a problem with a time, "time".

  Of more than two dimensions the plane of the first and the last axis is drawn, through the middle of
  the domain.

  Args:
    problem: that is solved.
    grid: the reference, if it has one.
    u: the net's solution.
    residuals: maps rows of each term to residuals, {term: [n, k]}.
    arrays: the split of evaluation.
    batch_size: points at once.
  """
  found = in_batches(residuals, arrays["terms"], batch_size)
  sizes = {name: np.sqrt(np.square(r).sum(1)) for name, r in found.items()}
  drawn = {"residuals": _residuals(problem, arrays["terms"], sizes)}
  if problem.domain.dim > 1:
    drawn["solution"] = _solution(problem, grid, u, batch_size)
  else:
    drawn["solution"] = _curve(problem, u)
  if problem.domain.axes[-1] == "t":
    drawn["time"] = _time(problem, u, arrays, sizes, batch_size)
  return drawn


def _shown(problem: Problem, grid: Grid | None) -> tuple[Any, np.ndarray, np.ndarray | None]:
  """The axes of a plane, its points [n0, n1, dim], and the known values [n0, n1, functions] there."""
  domain = problem.domain
  ends = [0, domain.dim - 1]
  if grid is not None and domain.dim == 2:
    points, _ = grid.rows()
    return grid.axes, points.reshape(*grid.values.shape[:2], 2), grid.values
  axes = [np.linspace(domain.low[i], domain.high[i], _SIDE) for i in ends]
  middle = (np.asarray(domain.low) + np.asarray(domain.high)) / 2
  points = np.tile(middle, (_SIDE, _SIDE, 1))
  points[..., ends] = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
  if problem.exact is None:
    return axes, points, None
  values = exact_values(problem, points.reshape(-1, domain.dim))
  return axes, points, values.reshape(_SIDE, _SIDE, -1)


def _solution(problem: Problem, grid: Grid | None, u: Values, batch_size: int) -> Any:
  """A row of maps for each function: the solution, the learned one, the error."""
  axes, points, known = _shown(problem, grid)
  flat = points.reshape(-1, points.shape[-1])
  learned = in_batches(u, flat, batch_size).reshape(*points.shape[:2], -1)
  rows = len(problem.functions)
  figure, panel = panels(rows, 3, (11, 3.2 * rows))
  names = problem.domain.axes[0], problem.domain.axes[-1]
  for i, (row, function) in enumerate(zip(panel, problem.functions)):
    maps = {"learned": learned[..., i]}
    if known is not None and i < known.shape[-1]:
      maps = {"solution": known[..., i], **maps, "error": learned[..., i] - known[..., i]}
    for axis, (title, values) in zip(row, maps.items()):
      look = {}
      if title == "error":
        limit = max(np.abs(values).max(), 1e-300)
        look = dict(vmin=-limit, vmax=limit)
      elif "solution" in maps:
        look = dict(vmin=maps["solution"].min(), vmax=maps["solution"].max())
      image = axis.pcolormesh(*axes, values.T, cmap=_LOOKS[title], shading="nearest", **look)
      figure.colorbar(image, shrink=0.8)
      axis.set(xlabel=names[0], ylabel=names[1], title=f"{function}: {title}")
    for axis in row[len(maps) :]:
      axis.remove()
  return figure


def _curve(problem: Problem, u: Values) -> Any:
  """The functions of one variable."""
  domain = problem.domain
  x = np.linspace(domain.low[0], domain.high[0], _SIDE)[:, None]
  figure, [[axis]] = panels(1, 1, (5, 3.4))
  for values, name in zip(np.asarray(u(x)).T, problem.functions):
    axis.plot(x, values, label=name)
  axis.set(xlabel=domain.axes[0])
  axis.legend()
  return figure


def _residuals(
  problem: Problem, rows: Mapping[str, np.ndarray], sizes: Mapping[str, np.ndarray]
) -> Any:
  """The size of each residual at the points of its term."""
  figure, panel = panels(1, len(rows), (4.2 * len(rows), 3.4))
  last = problem.domain.dim - 1
  for axis, (name, x) in zip(panel[0], rows.items()):
    log = np.log10(np.maximum(sizes[name], 1e-300))
    order = np.argsort(log, kind="stable")  # the largest above
    y = x[order, last] if last else log[order]
    image = axis.scatter(x[order, 0], y, 4, c=log[order], cmap="magma", linewidths=0)
    figure.colorbar(image, label="log10 |residual|")
    axis.set(xlabel=problem.domain.axes[0], title=name)
    axis.set_ylabel(problem.domain.axes[last] if last else "log10 |residual|")
  return figure


def _time(
  problem: Problem,
  u: Values,
  arrays: Mapping[str, Any],
  sizes: Mapping[str, np.ndarray],
  batch_size: int,
) -> Any:
  """Relative error, and the root mean square of residuals, over parts of the time."""
  figure, [[axis]] = panels(1, 1, (6, 3.6))
  last = problem.domain.dim - 1
  edges = np.linspace(problem.domain.low[last], problem.domain.high[last], _BINS + 1)
  middle = (edges[1:] + edges[:-1]) / 2
  part = lambda x: np.clip(np.searchsorted(edges, x[:, last], "right") - 1, 0, _BINS - 1)
  total = lambda x, values: np.bincount(part(x), values, _BINS)
  if "value" in arrays:
    known = np.float64(arrays["value"])
    errors = np.float64(in_batches(u, arrays["point"], batch_size))[:, : known.shape[1]] - known
    squares = [total(arrays["point"], np.square(e).sum(1)) for e in (errors, known)]
    axis.semilogy(
      middle, np.sqrt(squares[0] / np.maximum(squares[1], 1e-300)), "k", label="relative error"
    )
  for name, size in sizes.items():
    x = np.float64(arrays["terms"][name])
    if np.ptp(x[:, last]) > 0:
      count = np.maximum(total(x, np.ones(len(x))), 1)
      axis.semilogy(middle, np.sqrt(total(x, np.square(size)) / count), "--", label=name)
  axis.set(xlabel="t", ylabel="relative error, residuals")
  axis.legend()
  return figure
