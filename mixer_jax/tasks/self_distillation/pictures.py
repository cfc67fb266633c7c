"""Figures of views and of nearest neighbours."""

from typing import Any, Sequence

import numpy as np

from mixer_jax.images.views import GLOBAL
from mixer_jax.tasks.panels import panels, plain

NEIGHBOURS = 8  # of each image


def draw_neighbours(
  images: np.ndarray,
  labels: np.ndarray,
  neighbours: np.ndarray,
  their_labels: np.ndarray,
  similarities: np.ndarray,
  names: Sequence[str],
) -> Any:
  """A Matplotlib figure: images [n, h, w, 3] uint8 on the left, beside each its neighbours.

  `neighbours` are [n, k, h, w, 3], their labels and cosine similarities [n, k]. Neighbours of
  another class have a red title.
  """
  n, k = their_labels.shape
  names = [plain(name) for name in names]
  figure, axes = panels(n, k + 1, (1.1 * (k + 1), 1.3 * n + 0.3))
  for row, line in enumerate(axes):
    line[0].imshow(images[row])
    line[0].set_title(names[labels[row]], size=8, weight="bold")
    for axis, image, label, near in zip(
      line[1:], neighbours[row], their_labels[row], similarities[row], strict=True
    ):
      axis.imshow(image)
      colour = "black" if label == labels[row] else "tab:red"
      axis.set_title(f"{names[label]} {near:.2f}", size=7, color=colour)
  for axis in axes.flat:
    axis.axis("off")
  figure.suptitle("images on the left; beside each, the nearest training images by their features")
  return figure


def draw_views(images: np.ndarray, views: Sequence[np.ndarray]) -> Any:
  """A Matplotlib figure: images [n, h, w, 3] uint8 on the left, beside each its views.

  Each of the views has all images, [n, height, width, 3], with values of about [0, 1].
  """
  n, k = len(images), len(views)
  figure, axes = panels(n, k + 1, (max(k + 1, 4), n + 0.3))
  for row, line in enumerate(axes):
    for axis, shown in zip(line, [images[row], *(np.clip(x[row], 0, 1) for x in views)]):
      axis.imshow(shown)
      axis.axis("off")
  small = f" and {k - GLOBAL} small" if k > GLOBAL else ""
  figure.suptitle(f"stored images, and their {GLOBAL} large{small} views", size=10)
  return figure
