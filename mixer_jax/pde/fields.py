"""Gaussian random fields, drawn mode by mode, so that a finer grid adds modes to the same field."""

from typing import Sequence

import numpy as np
from scipy import fft


def periodic(
  generators: Sequence[np.random.Generator], points: int, mean: float = 0.0
) -> np.ndarray:
  """Fields of the law N(0, 625 (-Laplace + 25)^-2) on the periodic [0, 1).

  A cosine and a sine of frequency k have the amplitudes sqrt(2) s_k times normal numbers, where
  s_k = 25 / ((2 pi k)^2 + 25). The mean of a field has the deviation `mean`: 1 by that law, but 0 in
  the published set. Frequencies run up to points / 2, which is left out. One generator draws each
  field.

  Source: Li et al., Fourier Neural Operator (2021), appendix.

  Returns:
    float64 [fields, points], at x = 0, 1 / points, ...
  """
  modes = (points + 1) // 2
  deviation = 25 / ((2 * np.pi * np.arange(modes)) ** 2 + 25)
  normal = np.stack([g.standard_normal((modes, 2)) for g in generators])
  spectrum = deviation * (normal[..., 0] - 1j * normal[..., 1]) / np.sqrt(2)
  spectrum[:, 0] = mean * normal[:, 0, 0]
  return fft.irfft(spectrum, points, norm="forward")


def neumann(generators: Sequence[np.random.Generator], side: int) -> np.ndarray:
  """Fields of the law N(0, (-Laplace + 9)^-2), without a flux through the square's boundary.

  The mode cos(pi j x) cos(pi k y), of norm 1 on the square, has the deviation
  1 / (pi^2 (j^2 + k^2) + 9). The mean of a field is zero. Frequencies run up to side - 2. One
  generator draws each field.

  Source: Li et al., Fourier Neural Operator (2021), appendix, whose published generator sets
  the mean to zero.

  Returns:
    float64 [fields, side, side], on a grid with the boundary.
  """
  modes = np.arange(side - 1)
  shells = np.argsort(np.maximum.outer(modes, modes), axis=None, kind="stable")
  squares = np.add.outer(modes**2, modes**2).ravel()[shells]
  deviation = np.where(squares == 0, 0, 1 / (np.pi**2 * squares + 9))
  amplitudes = np.empty((len(generators), len(shells)))
  amplitudes[:, shells] = [deviation * g.standard_normal(len(shells)) for g in generators]
  amplitudes = amplitudes.reshape(-1, side - 1, side - 1)
  # SciPy's type 1 doubles all cosines but the first and the last; the norm wants sqrt(2) of them.
  amplitudes[:, 1:] /= np.sqrt(2)
  amplitudes[:, :, 1:] /= np.sqrt(2)
  return fft.dctn(np.pad(amplitudes, ((0, 0), (0, 1), (0, 1))), 1, axes=(1, 2), overwrite_x=True)
