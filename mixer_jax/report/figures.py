"""Scales, titles and files of figures, whose panels are those of the tasks' pictures."""

import pathlib
import textwrap
from typing import Any, Iterable, Sequence

import numpy as np

from mixer_jax.errors import as_user_error
from mixer_jax.tasks.panels import panels as panels

_WIDE, _MANY = 30, 30
_INSIDE = 6  # most names of lines that leave room for the lines in a panel
_COLORS, _DASHES = 10, ("-", "--", ":", "-.")


def marker(points: Sequence) -> str:
  """The mark at each point of a line, which alone shows a single one; "" of many points."""
  return "." if len(points) < _MANY else ""


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
  """The colour and the dashes of each line: ten colours, then the same dashed."""
  lines = enumerate(dict.fromkeys(names))
  dashes = lambda i: _DASHES[i // _COLORS % len(_DASHES)]
  return {name: {"color": f"C{i % _COLORS}", "linestyle": dashes(i)} for i, name in lines}


def legend(figure: Any, axes: np.ndarray) -> None:
  """The names of the lines: a few in each panel, many beneath all panels."""
  drawn = {axis: axis.get_legend_handles_labels() for axis in np.ravel(axes)}
  named = {name: handle for lines in drawn.values() for handle, name in zip(*lines)}
  if len(named) > _INSIDE:
    columns = max(1, int(figure.get_figwidth() / 2.5))
    place = dict(loc="outside lower center", ncols=columns, fontsize=8)
    figure.legend(named.values(), named, **place)
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
  """Writes a figure as PNG and returns its path, or raises a UserError."""
  with as_user_error(f"{path}: cannot be written", OSError):
    figure.savefig(path, dpi=110)
  return path


def head(figure: Any, text: str) -> None:
  """A title over all panels, in as many lines as the width of the figure takes."""
  figure.suptitle(textwrap.fill(text, int(12 * figure.get_figwidth())), fontsize=10)
