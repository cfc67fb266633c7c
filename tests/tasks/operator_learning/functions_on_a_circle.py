"""Functions on a circle with a known operator."""

import numpy as np


def waves(seed, number, points):
  """Random waves on the circle and the same, shifted by a quarter and doubled."""
  rng = np.random.default_rng(seed)
  x, k = np.arange(points) / points, np.arange(1, 4)
  size, shift = rng.normal(size=(2, number, 3, 1))
  wave = lambda x: (size * np.sin(2 * np.pi * k[:, None] * x + shift)).sum(1)
  return wave(x).astype(np.float32), 2 * wave(x + 0.25).astype(np.float32)
