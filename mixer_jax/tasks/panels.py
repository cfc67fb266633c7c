"""Figures beside pyplot: no backend is chosen, and a notebook's inline plots stay as they are."""

from typing import Any, Callable, Sequence

import numpy as np

NAMED = 24  # most classes whose names stand in a figure


def plain(text: str) -> str:
  """A name as it is: two "$" would make mathematics of what is between them.

  Bytes of a file's name that are no UTF-8 become "?".
  """
  return text.encode(errors="replace").decode().replace("$", r"\$")


def panels(
  rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Any, np.ndarray]:
  """A figure of a size in inches, and its panels [rows, columns]; options of `Figure.subplots`."""
  from matplotlib.figure import Figure  # late: most commands draw nothing

  figure = Figure(figsize=size, layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False, **options)


def confusion(
  counts: np.ndarray,
  names: Sequence[str],
  shown: Callable[[float, int], Any] = lambda share, count: count,
  rows: Sequence[str] | None = None,
) -> Any:
  """A figure of how often each class (row) was taken for each (column), [classes, classes].

  `shown` makes a cell's text of its share of the true class and its count; `rows` are labels of the
  rows beside the names. Up to 24 classes have names and texts.
  """
  names, rows = ([plain(name) for name in of] for of in (names, rows or names))
  figure, ((axis,),) = panels(1, 1, (8, 6.6))
  shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
  figure.colorbar(image, label="share of the true class")
  axis.set(xlabel="predicted class", ylabel="true class")
  if len(names) <= NAMED:
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axis.set_yticks(range(len(names)), rows)
    for (row, column), share in np.ndenumerate(shares):
      colour = "white" if share > 0.5 else "black"
      text = shown(share, counts[row, column])
      axis.text(column, row, text, ha="center", va="center", size=7, color=colour)
  return figure
