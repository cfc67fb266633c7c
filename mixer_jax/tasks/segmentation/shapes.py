"""Coloured shapes on a background, generated from a seed, for first steps and tests."""

import numpy as np

NAMES = ("background", "disc", "square", "triangle")
VOID = 255  # id of the outlines
SIDE = 64  # pixels on a side of an image
_MOST = 4  # shapes in an image
_COLOURS = np.array([[200, 90, 80], [90, 180, 90], [90, 100, 200]])  # means of the shapes


def make(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
  """Makes images uint8 [n, SIDE, SIDE, 3] and masks uint8 [n, SIDE, SIDE] of class ids or `VOID`.

  A larger set of a seed begins with the smaller ones. A shape's colour hints at its class; later
  shapes cover earlier ones.
  """
  images, masks = np.empty((n, SIDE, SIDE, 3), np.uint8), np.zeros((n, SIDE, SIDE), np.uint8)
  y, x = np.mgrid[:SIDE, :SIDE]
  for i in range(n):
    rng = np.random.default_rng((seed, i))
    slope = rng.normal(0, 0.6, (2, 3))
    image = rng.uniform(60, 190, 3) + (y[..., None] - SIDE / 2) * slope[0] + x[..., None] * slope[1]
    for _ in range(rng.integers(2, _MOST + 1)):
      kind, radius = rng.integers(3), rng.uniform(7, 17)
      inside = _inside(kind, rng.uniform(8, SIDE - 8, 2), radius, y, x)
      image = np.where(inside[..., None] <= 0, _COLOURS[kind] + rng.normal(0, 45, 3), image)
      masks[i] = np.where(inside <= 0, kind + 1, masks[i])
      masks[i] = np.where(abs(inside) < 0.7, VOID, masks[i])
    images[i] = np.clip(image + rng.normal(0, 12, image.shape), 0, 255)
  return images, masks


def _inside(kind: int, centre: np.ndarray, radius: float, y: np.ndarray, x: np.ndarray):
  """About the distance in pixels from the outline of a shape, negative inside: [SIDE, SIDE]."""
  down, right = y - centre[0], x - centre[1]
  if kind == 0:
    return np.hypot(down, right) - radius
  if kind == 1:
    return np.maximum(abs(down), abs(right)) - 0.85 * radius
  return np.maximum(0.87 * abs(right) - 0.5 * down, down) - radius / 2
