"""Pictures of learned operators: functions, their errors, and columns of attention."""

from typing import Any, Mapping

import numpy as np

from mixer_jax import models
from mixer_jax.tasks.panels import panels

_SHOWN = 4  # functions
_COLUMNS = {1: 5, 2: 2}  # columns drawn of each matrix, by the number of axes of the grid
_NAMES = ("queries", "keys", "values")

# Queries, keys and values [batch, *grid, heads, channels] of each block, by its name.
Attended = Mapping[str, Mapping[str, np.ndarray]]


def errors(outputs: np.ndarray, found: np.ndarray) -> np.ndarray:
  """Relative L2 errors of functions [n, *grid], [n]."""
  norm = lambda x: np.sqrt(np.square(np.float64(x)).reshape(len(x), -1).sum(1))
  return norm(found - outputs) / np.maximum(norm(outputs), 1e-300)


def draw(
  inputs: np.ndarray, outputs: np.ndarray, found: np.ndarray, periodic: bool
) -> Mapping[str, Any]:
  """Figures "functions" and "errors" of functions [n, *grid] and the operator's answers.

  Functions from the one with the least error to the one with the largest are drawn.
  """
  by_error = errors(outputs, found)
  order = np.argsort(by_error, kind="stable")
  chosen = order[np.linspace(0, len(order) - 1, min(_SHOWN, len(order))).round().astype(int)]
  rows = (inputs[chosen], outputs[chosen], found[chosen], by_error[chosen])
  drawn = _curves(*rows, periodic) if inputs.ndim == 2 else _maps(*rows)
  return {"functions": drawn, "errors": _sorted(by_error)}


def attended(sown: Any, grid: tuple[int, ...]) -> Attended:
  """The arrays that attention over the points of a grid has sown."""
  on_grid = lambda x: np.float32(x.reshape(len(x), *grid, *x.shape[2:]))
  return {
    block: {name: on_grid(parts["attention"][name][0]) for name in _NAMES}
    for block, parts in models.unrolled(sown).items()
    if "attention" in parts
  }


def draw_attention(blocks: Attended, periodic: bool) -> Mapping[str, Any]:
  """The figure "attention" of the first function of a batch; none if there is no attention.

  A row has a few columns of a block's queries, keys and values, evenly spread over all heads, as
  functions on the grid.
  """
  if not blocks:
    return {}
  arrays = [[_some_columns(array[0]) for array in parts.values()] for parts in blocks.values()]
  curves = arrays[0][0].ndim == 2
  figure = _columns_as_curves(arrays, periodic) if curves else _columns_as_maps(arrays)
  axes = np.array(figure.axes).reshape(len(arrays), -1)
  for axis, name in zip(axes[0, :: axes.shape[1] // len(_NAMES)], _NAMES):
    axis.set_title(name, size=9, loc="left")
  for axis, block in zip(axes[:, 0], blocks):
    axis.set_ylabel(f"block {block.rpartition('_')[2]}")
  return {"attention": figure}


def _some_columns(array: np.ndarray) -> np.ndarray:
  """Some columns [columns, *grid] of a matrix [*grid, heads, channels]."""
  rank = array.ndim - 2
  columns = np.moveaxis(array.reshape(*array.shape[:rank], -1), -1, 0)
  return columns[np.linspace(0, len(columns) - 1, _COLUMNS[rank]).round().astype(int)]


def _columns_as_curves(arrays: list[list[np.ndarray]], periodic: bool) -> Any:
  rows, matrices = len(arrays), len(arrays[0])
  figure, axes = panels(rows, matrices, (3 * matrices, 1.5 * rows), sharex=True)
  for axis, columns in zip(axes.ravel(), (columns for row in arrays for columns in row)):
    axis.plot(np.linspace(0, 1, columns.shape[1], endpoint=not periodic), columns.T, linewidth=0.8)
    axis.tick_params(labelsize=6)
  for axis in axes[-1]:
    axis.set_xlabel("x")
  return figure


def _columns_as_maps(arrays: list[list[np.ndarray]]) -> Any:
  rows = [np.concatenate(row) for row in arrays]
  figure, axes = panels(len(rows), len(rows[0]), (1.5 * len(rows[0]), 1.5 * len(rows)))
  for axis, column in zip(axes.ravel(), np.concatenate(rows)):
    limit = np.abs(column).max() or 1.0
    look = dict(cmap="RdBu_r", vmin=-limit, vmax=limit)
    axis.imshow(column.T, origin="lower", extent=(0, 1, 0, 1), **look)
    axis.set(xticks=[], yticks=[])
  return figure


def _curves(inputs, outputs, found, by_error, periodic):
  """Input, output and answer of each function above the error."""
  figure, axes = panels(2, len(inputs), (3 * len(inputs), 4.4), height_ratios=(2, 1), sharex=True)
  grid = lambda x: np.linspace(0, 1, x.shape[-1], endpoint=not periodic)
  for above, below, a, u, answer, error in zip(*axes, inputs, outputs, found, by_error):
    above.plot(grid(a), a, color="0.7", label="input")
    above.plot(grid(u), u, label="output")
    above.plot(grid(u), answer, "--", label="learned")
    above.set_title(f"relative L2 error {error:.1e}", size=9)
    below.plot(grid(u), answer - u, color="C3")
    below.set(xlabel="x")
  axes[0][0].legend(fontsize=8)
  axes[1][0].set_ylabel("error")
  return figure


def _maps(inputs, outputs, found, by_error):
  """A row of maps for each function: input, output, answer, error."""
  figure, axes = panels(len(inputs), 4, (10, 2.3 * len(inputs)))
  for row, a, u, answer, error in zip(axes, inputs, outputs, found, by_error):
    low, high = u.min(), u.max()
    limit = max(np.abs(answer - u).max(), 1e-30)
    shades = (dict(cmap="viridis", vmin=low, vmax=high),) * 2
    looks = ({"cmap": "viridis"}, *shades, dict(cmap="RdBu_r", vmin=-limit, vmax=limit))
    for axis, array, look in zip(row, (a, u, answer, answer - u), looks):
      image = axis.imshow(array.T, origin="lower", extent=(0, 1, 0, 1), **look)
      figure.colorbar(image, shrink=0.8)
      axis.set(xticks=[], yticks=[])
    row[2].set_xlabel(f"relative L2 error {error:.1e}", size=9)
  for axis, title in zip(axes[0], ("input", "output", "learned", "error")):
    axis.set_title(title)
  return figure


def _sorted(by_error: np.ndarray) -> Any:
  """The errors of all functions, in rising order."""
  figure, [[axis]] = panels(1, 1, (5, 3.4))
  axis.semilogy(np.sort(by_error), ".", markersize=4)
  axis.axhline(by_error.mean(), color="0.6", linewidth=1, label=f"mean {by_error.mean():.1e}")
  axis.set(xlabel="functions, by error", ylabel="relative L2 error")
  axis.legend()
  return figure
