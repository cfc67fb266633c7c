"""Pictures of a solution: values, errors and residuals over the domain, and over time."""

from typing import Any, Callable, Mapping

import numpy as np

from mixer_jax.tasks.panels import panels
from mixer_jax.tasks.physics.problem import Grid, Problem

_SIDE = 101  # points on a side of the grid that is drawn
_BINS = 20  # parts of the time
_LEAST = 1e-300  # keeps logarithms and quotients finite

# Maps points [n, dim] to values [n, functions].
Values = Callable[[np.ndarray], np.ndarray]


def draw(
  problem: Problem,
  grid: Grid | None,
  u: Values,
  residuals: Mapping[str, np.ndarray],
  arrays: Mapping[str, Any],
) -> Mapping[str, Any]:
  """Figures by name: "solution", "residuals" and, if the problem has a time, "time".

  Of more than two dimensions the plane of the first and the last axis through the middle of the
  domain is drawn.

  Args:
    problem: the equation.
    grid: the reference solution, if there is one.
    u: the net's solution.
    residuals: [n, k] of each term at `arrays["terms"]`.
    arrays: the split of evaluation.
  """
  sizes = {name: np.sqrt(np.square(r).sum(1)) for name, r in residuals.items()}
  drawn = {"residuals": _residuals(problem, arrays["terms"], sizes)}
  drawn["solution"] = _maps(problem, grid, u) if problem.domain.dim > 1 else _curve(problem, u)
  if problem.domain.axes[-1] == "t":
    drawn["time"] = _time(problem, u, arrays, sizes)
  return drawn


def _plane(problem: Problem, grid: Grid | None) -> tuple[Any, np.ndarray, np.ndarray | None]:
  """The two axes of the plane, its points [n0, n1, dim], and known values [n0, n1, functions]."""
  domain = problem.domain
  if grid is not None and domain.dim == 2:
    points, _ = grid.rows()
    return grid.axes, points.reshape(*grid.values.shape[:2], 2), grid.values
  ends = [0, domain.dim - 1]
  axes = [np.linspace(domain.low[i], domain.high[i], _SIDE) for i in ends]
  points = np.tile((np.asarray(domain.low) + np.asarray(domain.high)) / 2, (_SIDE, _SIDE, 1))
  points[..., ends] = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
  if problem.exact is None:
    return axes, points, None
  values = problem.exact_values(points.reshape(-1, domain.dim))
  return axes, points, values.reshape(_SIDE, _SIDE, -1)


def _maps(problem: Problem, grid: Grid | None, u: Values) -> Any:
  """A row of maps for each function: the known solution, the learned one, the error."""
  axes, points, known = _plane(problem, grid)
  learned = u(points.reshape(-1, points.shape[-1])).reshape(*points.shape[:2], -1)
  rows, names = len(problem.functions), problem.domain.axes
  figure, panel = panels(rows, 3, (11, 3.2 * rows))
  for i, (row, function) in enumerate(zip(panel, problem.functions)):
    maps, scale = {"learned": learned[..., i]}, learned[..., i]
    if known is not None and i < known.shape[-1]:
      scale = known[..., i]
      maps = {"solution": scale, **maps, "error": learned[..., i] - scale}
    for axis, (title, values) in zip(row, maps.items()):
      look = dict(cmap="viridis", vmin=scale.min(), vmax=scale.max())
      if title == "error":
        limit = max(np.abs(values).max(), _LEAST)
        look = dict(cmap="RdBu_r", vmin=-limit, vmax=limit)
      figure.colorbar(axis.pcolormesh(*axes, values.T, shading="nearest", **look), shrink=0.8)
      axis.set(xlabel=names[0], ylabel=names[-1], title=f"{function}: {title}")
    for axis in row[len(maps) :]:
      axis.remove()
  return figure


def _curve(problem: Problem, u: Values) -> Any:
  """The functions of one variable."""
  domain = problem.domain
  x = np.linspace(domain.low[0], domain.high[0], _SIDE)[:, None]
  figure, [[axis]] = panels(1, 1, (5, 3.4))
  axis.plot(x, u(x), label=problem.functions)
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
    log = np.log10(np.maximum(sizes[name], _LEAST))
    order = np.argsort(log, kind="stable")  # the largest are drawn last
    y = x[order, last] if last else log[order]
    image = axis.scatter(x[order, 0], y, 4, c=log[order], cmap="magma", linewidths=0)
    figure.colorbar(image, label="log10 |residual|")
    axis.set(xlabel=problem.domain.axes[0], title=name)
    axis.set_ylabel(problem.domain.axes[last] if last else "log10 |residual|")
  return figure


def _time(
  problem: Problem, u: Values, arrays: Mapping[str, Any], sizes: Mapping[str, np.ndarray]
) -> Any:
  """The relative error, and the root mean square of residuals, in parts of the time."""
  figure, [[axis]] = panels(1, 1, (6, 3.6))
  edges = np.linspace(problem.domain.low[-1], problem.domain.high[-1], _BINS + 1)
  middle, last = (edges[1:] + edges[:-1]) / 2, problem.domain.dim - 1

  def total(x, values):
    part = np.clip(np.searchsorted(edges, x[:, last], "right") - 1, 0, _BINS - 1)
    return np.bincount(part, values, _BINS)

  if "value" in arrays:
    known = np.float64(arrays["value"])
    errors = np.float64(u(arrays["point"]))[:, : known.shape[1]] - known
    wrong, right = (total(arrays["point"], np.square(e).sum(1)) for e in (errors, known))
    axis.semilogy(middle, np.sqrt(wrong / np.maximum(right, _LEAST)), "k", label="relative error")
  for name, size in sizes.items():
    x = np.float64(arrays["terms"][name])
    if np.ptp(x[:, last]) > 0:
      count = np.maximum(total(x, np.ones(len(x))), 1)
      axis.semilogy(middle, np.sqrt(total(x, np.square(size)) / count), "--", label=name)
  axis.set(xlabel="t", ylabel="relative error, residuals")
  axis.legend()
  return figure
