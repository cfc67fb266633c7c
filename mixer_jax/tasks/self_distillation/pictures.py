"""Pictures of views and of nearest neighbours."""

from typing import Any, Sequence

import numpy as np

from mixer_jax.images.views import GLOBAL
from mixer_jax.tasks import panels

NEIGHBOURS = 8  # of each image


def draw_neighbours(
  images: np.ndarray,
  labels: np.ndarray,
  neighbours: np.ndarray,
  their_labels: np.ndarray,
  similarities: np.ndarray,
  names: Sequence[str],
) -> Any:
  """A Matplotlib figure of images [n, h, w, 3] uint8, on the left, and their neighbours.

  `neighbours` are [n, k, h, w, 3], their labels and cosine similarities [n, k]. Neighbours of
  another class have a red title.
  """
  n, k = their_labels.shape
  names = [panels.plain(name) for name in names]
  heading = "images on the left; beside each, the nearest training images by their features"
  rows = [(image, *near) for image, near in zip(images, neighbours)]
  figure, axes = panels.of_images(rows, (1.1 * (k + 1), 1.3 * n + 0.3), heading)
  for (first, *others), own, found, near in zip(axes, labels, their_labels, similarities):
    first.set_title(names[own], size=8, weight="bold")
    for axis, label, similarity in zip(others, found, near):
      colour = "black" if label == own else "tab:red"
      axis.set_title(f"{names[label]} {similarity:.2f}", size=7, color=colour)
  return figure


def draw_views(images: np.ndarray, views: Sequence[np.ndarray]) -> Any:
  """A Matplotlib figure of images [n, h, w, 3] uint8, on the left, and their views.

  Each of the views has all images, [n, height, width, 3], with values of about [0, 1].
  """
  n, k = len(images), len(views)
  rows = [(image, *(np.clip(x[i], 0, 1) for x in views)) for i, image in enumerate(images)]
  small = f" and {k - GLOBAL} small" if k > GLOBAL else ""
  heading = f"stored images, and their {GLOBAL} large{small} views"
  return panels.of_images(rows, (max(k + 1, 4), n + 0.3), heading)[0]
