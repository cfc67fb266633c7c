"""Originals above their reconstructions."""

from typing import Any

import numpy as np

from mixer_jax.tasks.panels import panels


def draw(images: np.ndarray, found: np.ndarray) -> Any:
  """A Matplotlib figure of images and reconstructions, [n, side, side, channels] in [0, 1]."""
  figure, axes = panels(2, len(images), (0.9 * len(images), 2.3))
  errors = np.square(found - images).sum(axis=(1, 2, 3))
  for (above, below), image, other, error in zip(axes.T, images, found, errors):
    for axis, shown in ((above, image), (below, other)):
      shown = np.clip(shown, 0, 1)
      axis.imshow(shown[..., 0] if shown.shape[2] == 1 else shown, cmap="gray", vmin=0, vmax=1)
      axis.set(xticks=[], yticks=[])
    below.set_xlabel(f"{error:.2f}", size=8)
  figure.suptitle("images above their reconstructions, with the squared error", fontsize=9)
  return figure
