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
  """Relative L2 errors of functions [n, ...] over all points and channels, [n]."""
  norm = lambda x: np.sqrt(np.square(np.float64(x)).reshape(len(x), -1).sum(1))
  return norm(found - outputs) / np.maximum(norm(outputs), 1e-300)


def draw(
  inputs: np.ndarray,
  outputs: np.ndarray,
  found: np.ndarray,
  periodic: bool,
  axes: int | None = None,
) -> Mapping[str, Any]:
  """Figures "functions" and "errors" of functions and the operator's answers.

  Functions from the one with the least error to the one with the largest are drawn, and of several
  channels in "functions_0" and so on, each beside the same channel of the input or its last one.
  """
  axes, by_error = axes or inputs.ndim - 1, errors(outputs, found)
  order = np.argsort(by_error, kind="stable")
  chosen = order[np.linspace(0, len(order) - 1, min(_SHOWN, len(order))).round().astype(int)]
  last = [x.reshape(*x.shape[: 1 + axes], -1)[chosen] for x in (inputs, outputs, found)]
  figures = {"errors": _sorted(by_error)}
  for channel in range(number := last[1].shape[-1]):
    rows = (*(x[..., min(channel, x.shape[-1] - 1)] for x in last), by_error[chosen])
    name = "functions" if number == 1 else f"functions_{channel}"
    figures[name] = _curves(*rows, periodic) if axes == 1 else _maps(*rows)
  return figures


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
  matrices = [[_some_columns(array[0]) for array in parts.values()] for parts in blocks.values()]
  curves, width = matrices[0][0].ndim == 2, len(matrices[0][0])
  each = 1 if curves else width  # curves share a panel, a map has its own
  figure, axes = panels(len(blocks), 3 * each, (9 if curves else 4.5 * each, 1.5 * len(blocks)))
  for line, block, row in zip(axes, blocks, matrices):
    for axis, columns in zip(line, row if curves else np.concatenate(row)):
      if curves:
        axis.plot(
          np.linspace(0, 1, columns.shape[1], endpoint=not periodic), columns.T, linewidth=0.8
        )
        axis.tick_params(labelsize=6)
      else:
        _map(axis, columns, **_around_0(columns))
    line[0].set_ylabel(f"block {block.rpartition('_')[2]}")
  for axis, name in zip(axes[0, ::each], _NAMES):
    axis.set_title(name, size=9, loc="left")
  return {"attention": figure}


def _some_columns(array: np.ndarray) -> np.ndarray:
  """Some columns [columns, *grid] of a matrix [*grid, heads, channels]."""
  rank = array.ndim - 2
  columns = np.moveaxis(array.reshape(*array.shape[:rank], -1), -1, 0)
  return columns[np.linspace(0, len(columns) - 1, _COLUMNS[rank]).round().astype(int)]


def _map(axis: Any, values: np.ndarray, **look: Any) -> Any:
  """Draws values [n, m] over the unit square."""
  axis.set(xticks=[], yticks=[])
  return axis.imshow(values.T, origin="lower", extent=(0, 1, 0, 1), **look)


def _around_0(values: np.ndarray) -> dict[str, Any]:
  limit = max(np.abs(values).max(), 1e-30)
  return dict(cmap="RdBu_r", vmin=-limit, vmax=limit)


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
    shades, wrong = dict(vmin=u.min(), vmax=u.max()), answer - u
    maps = ((a, {}), (u, shades), (answer, shades), (wrong, _around_0(wrong)))
    for axis, (values, look) in zip(row, maps):
      figure.colorbar(_map(axis, values, **look), shrink=0.8)
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
