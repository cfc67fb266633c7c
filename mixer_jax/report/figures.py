"""Scales, titles and files of figures, whose panels are those of the tasks' pictures."""

import pathlib
import textwrap
from typing import Any, Iterable, Sequence

import numpy as np

from mixer_jax.errors import as_user_error
from mixer_jax.tasks.panels import panels as panels

_WIDE = 30  # the range of values, high by low, that asks for a logarithmic axis
_MANY = 30  # points that need no mark
_LETTERS = 14  # of a legend in an inch
_INSIDE = 6  # most names that a panel has room for
_COLORS = 10
_DASHES = ("-", "--", "-.", (0, (5, 2, 1, 2, 1, 2)))  # dots alone are values as published
_MARKS = "os^D"


def marker(points: Sequence) -> str:
  """The mark at each point of a line, without which a single one would not show; "" of many."""
  return "." if len(points) < _MANY else ""


def styles(names: Iterable[str], field: str = "linestyle") -> dict[str, dict[str, Any]]:
  """A colour and dashes for each line, or with the field "fmt" a mark.

  There are ten colours, then the same with the next dashes or mark.
  """
  values = _DASHES if field == "linestyle" else _MARKS
  of = lambda i: {"color": f"C{i % _COLORS}", field: values[i // _COLORS % len(values)]}
  return {name: of(i) for i, name in enumerate(dict.fromkeys(names))}


def draw_band(axis: Any, band: Any, scale: float = 1.0, **style: Any) -> None:
  """Draws a `results.Band`, whose values are scaled: the mean as a line, the range as a shade."""
  mean, low, high = (scale * y for y in (band.mean, band.low, band.high))
  axis.plot(band.x, mean, marker=marker(band.x), **style)
  axis.fill_between(band.x, low, high, color=style["color"], alpha=0.2, linewidth=0)
  axis.grid(alpha=0.3)


def legend(figure: Any, axes: np.ndarray) -> None:
  """Names the lines: a few short names inside each panel, others beneath all panels.

  Panels keep their height.
  """
  drawn = {axis: axis.get_legend_handles_labels() for axis in np.ravel(axes)}
  named = {name: handle for lines in drawn.values() for handle, name in zip(*lines)}
  width, longest = figure.get_figwidth(), max(map(len, named), default=0)
  if len(named) > _INSIDE or longest > _LETTERS * width / np.atleast_2d(axes).shape[1] / 2:
    texts = [textwrap.fill(name, int(_LETTERS * width) - 8) for name in named]
    rows = [line for text in texts for line in text.split("\n")]
    columns = max(1, int(width / (0.6 + max(map(len, rows)) / _LETTERS)))
    place = dict(loc="outside lower center", ncols=columns, fontsize=8)
    inches = 0.13 * -(-len(rows) // columns) + 0.06 * -(-len(texts) // columns) + 0.2
    figure.set_figheight(figure.get_figheight() + inches)
    figure.legend(named.values(), texts, **place)
    return
  for axis, (handles, _) in drawn.items():
    if handles:
      axis.legend(fontsize=8)


def fit_scale(axis: Any) -> None:
  """Makes the y axis of errors or losses logarithmic if its lines fall by more than a factor 30."""
  drawn = np.concatenate([np.ravel(line.get_ydata()) for line in axis.lines] or [np.zeros(0)])
  values = drawn[np.isfinite(drawn)]
  if len(values) and values.min() > 0 and values.max() > _WIDE * values.min():
    axis.set_yscale("log")


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure as PNG and returns its path; a UserError if it cannot be written."""
  with as_user_error(f"{path}: cannot be written", OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
  return path


def head(figure: Any, text: str) -> None:
  """A title over all panels, in as many lines as the width of the figure takes."""
  figure.suptitle(textwrap.fill(text, int(12 * figure.get_figwidth())), fontsize=10)
