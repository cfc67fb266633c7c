"""Figures beside pyplot: no backend is chosen, and a notebook's inline plots stay as they are."""

import pathlib
import textwrap
from typing import Any

import numpy as np

_WIDE = 30


def panels(
  rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Any, np.ndarray]:
  """A figure of a size in inches, and its panels [rows, columns]; options of `Figure.subplots`."""
  from matplotlib.figure import Figure  # late: most commands draw nothing

  figure = Figure(figsize=size, layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False, **options)


def fit_scale(axis: Any) -> None:
  """Makes the y axis of errors or losses logarithmic if its lines fall by more than a factor 30."""
  drawn = np.concatenate([np.ravel(line.get_ydata()) for line in axis.lines] or [np.zeros(0)])
  values = drawn[np.isfinite(drawn)]
  if len(values) and values.min() > 0 and values.max() > _WIDE * values.min():
    axis.set_yscale("log")


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure as PNG and returns its path."""
  figure.savefig(path, dpi=110)
  return path


def head(figure: Any, text: str) -> None:
  """A title over all panels, in as many lines as the width of the figure takes."""
  figure.suptitle(textwrap.fill(text, int(12 * figure.get_figwidth())), fontsize=10)
