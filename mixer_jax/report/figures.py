"""Figures without a display: they leave the caller's matplotlib as it is.

Made beside pyplot, they neither choose a backend, which would end the inline plots of a
notebook, nor stay in memory.
"""

import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
  from matplotlib.figure import Figure


def panels(
  rows: int, columns: int, size: tuple[float, float], **options: Any
) -> "tuple[Figure, np.ndarray]":
  """A figure of a size in inches, and its panels as an array [rows, columns].

  Further options are those of `Figure.subplots`.
  """
  from matplotlib.figure import Figure  # late: most commands draw nothing

  figure = Figure(figsize=size, layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save(figure: "Figure", path: pathlib.Path) -> pathlib.Path:
  """Writes a figure as PNG and returns its path."""
  figure.savefig(path, dpi=110)
  return path
