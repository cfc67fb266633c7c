"""Figures made without pyplot, which would choose a backend and change a notebook's plots."""

from typing import Any, Callable, Sequence

import numpy as np

NAMED = 24  # figures of more classes do not name them


def plain(text: str) -> str:
  """A name that Matplotlib shows as it is: "$" begins no formula, and bytes out of UTF-8 are "?"."""
  return text.encode(errors="replace").decode().replace("$", r"\$")


def panels(
  rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Any, np.ndarray]:
  """A figure of a size in inches, and its panels [rows, columns]; `options` as of `subplots`."""
  from matplotlib.figure import Figure  # late: most commands draw nothing

  figure = Figure(figsize=size, layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False, **options)


def of_images(
  rows: Sequence[Sequence[np.ndarray]], size: tuple[float, float], heading: str = ""
) -> tuple[Any, np.ndarray]:
  """A figure of rows of images, [h, w, 3], or [h, w] in [0, 1], and its panels [rows, columns]."""
  figure, axes = panels(len(rows), len(rows[0]), size)
  for axis, image in zip(axes.flat, (image for row in rows for image in row), strict=True):
    axis.imshow(image, cmap="gray", vmin=0, vmax=1)
    axis.axis("off")
  if heading:
    figure.suptitle(heading, size=10)
  return figure, axes


def confusion(
  counts: np.ndarray,
  names: Sequence[str],
  shown: Callable[[float, int], Any] = lambda share, count: count,
  rows: Sequence[str] | None = None,
) -> Any:
  """A figure of how often each class (row) was taken for each (column), [classes, classes].

  `shown` maps a cell's share of the true class and its count to the cell's text. `rows` are labels
  of the rows other than `names`. Names and texts are left out for more than 24 classes.
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
