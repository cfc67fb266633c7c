"""Originals above their reconstructions."""

from typing import Any

import numpy as np


def draw(images: np.ndarray, found: np.ndarray) -> Any:
  """A Matplotlib figure of images and reconstructions, [n, side, side, channels] in [0, 1]."""
  from matplotlib.figure import Figure  # late: most commands draw nothing

  figure = Figure(figsize=(0.9 * len(images), 2.3), layout="constrained")
  errors = np.square(found - images).sum(axis=(1, 2, 3))
  axes = figure.subplots(2, len(images), squeeze=False)
  for (above, below), image, other, error in zip(axes.T, images, found, errors):
    for axis, shown in ((above, image), (below, other)):
      shown = np.clip(shown, 0, 1)
      axis.imshow(shown[..., 0] if shown.shape[2] == 1 else shown, cmap="gray", vmin=0, vmax=1)
      axis.set(xticks=[], yticks=[])
    below.set_xlabel(f"{error:.2f}", size=8)
  figure.suptitle("images above their reconstructions, with the squared error", fontsize=9)
  return figure
