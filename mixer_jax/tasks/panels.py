"""Figures beside pyplot: no backend is chosen, and a notebook's inline plots stay as they are."""

from typing import Any

import numpy as np


def plain(text: str) -> str:
  """A name as it is: two "$" would make mathematics of what is between them."""
  return text.replace("$", r"\$")


def panels(
  rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Any, np.ndarray]:
  """A figure of a size in inches, and its panels [rows, columns]; options of `Figure.subplots`."""
  from matplotlib.figure import Figure  # late: most commands draw nothing

  figure = Figure(figsize=size, layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False, **options)
