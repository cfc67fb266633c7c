"""Pictures of images above their reconstructions."""

from typing import Any

import numpy as np

from mixer_jax.tasks import panels


def draw(images: np.ndarray, found: np.ndarray) -> Any:
  """A Matplotlib figure of images and reconstructions, [n, side, side, channels] in [0, 1]."""
  images, found = (x[..., 0] if x.shape[3] == 1 else x for x in (images, found))
  size = (0.9 * len(images), 2.3)
  figure, axes = panels.of_images([images, np.clip(found, 0, 1)], size)
  for axis, image, other in zip(axes[1], images, found):
    axis.set_title(f"{np.square(other - image).sum():.2f}", size=8)
  figure.suptitle("images above their reconstructions, with the squared error", fontsize=9)
  return figure
