"""Burgers' equation on the periodic [0, 1): spectral in space, exponential Runge-Kutta in time."""

import numpy as np
from scipy import fft

from mixer_jax.data import cpus
from mixer_jax.pde import etdrk4

_FEWEST_MODES = 128
_DECAY = 24  # the spectrum of the steepest front falls to exp(-24) of it
_STEP = 1.0  # of the time in which a front crosses its own width
_FEWEST_STEPS = 200


def solve(initial: np.ndarray, viscosity: float, time: float, refine: float = 1.0) -> np.ndarray:
  """Solves u_t + (u^2 / 2)_x = viscosity u_xx from `initial`, up to `time`.

  The mean m is taken off, since u(x, t) - m solves the equation in coordinates that move by m t.
  The rest has the range d = max - min, rounded up to a power of two. The steepest front that
  such a function can form is a hyperbolic tangent of width 4 viscosity / d; the number of modes
  resolves it, whatever the grid of the result, and keeps all that viscosity leaves of the initial
  function. The time step is a part of viscosity / d^2. Products are computed without aliasing. Each
  function has modes and a step of its own, so that its solution does not depend on the others.

  Args:
    initial: [functions, points], at x = 0, 1 / points, ...
    refine: divides the time step.

  Returns:
    float64 [functions, points], the solutions at the same points.
  """
  initial = np.asarray(initial, np.float64)
  mean = initial.mean(axis=1, keepdims=True)
  spread = np.ptp(initial, axis=1)
  levels = np.ceil(np.log2(np.maximum(spread, 2.0**-10)))
  solved = np.empty_like(initial)
  for level in np.unique(levels):
    rows = levels == level
    solved[rows] = _solve(initial[rows] - mean[rows], mean[rows], 2**level, viscosity, time, refine)
  return solved


def _solve(initial, mean, spread, viscosity, time, refine):
  points = initial.shape[1]
  front = _DECAY * spread / (4 * np.pi**2 * viscosity)
  alive = np.sqrt(_DECAY / (viscosity * time)) / (2 * np.pi)  # at the end, of the initial function
  modes = int(max(_FEWEST_MODES, front, min(alive, points // 2 + 1)))
  steps = int(np.ceil(refine * max(_FEWEST_STEPS, time * spread**2 / (_STEP * viscosity))))
  spectrum = fft.rfft(initial, norm="forward")
  if points % 2 == 0:
    spectrum[:, -1] /= 2  # a cosine: a longer spectrum has its two halves
  spectrum = _resized(spectrum, modes)
  spectrum = _advance(spectrum, viscosity, time / steps, steps)
  k = np.arange(modes)
  spectrum *= np.exp(-2j * np.pi * k * mean * time)
  every = -(-2 * modes // points)  # the result is a part of a grid that holds all modes
  return fft.irfft(spectrum, every * points, norm="forward")[:, ::every] + mean


def _resized(spectrum, modes):
  """The first modes of spectra [functions, frequencies], or all of them and zeros."""
  kept = spectrum[:, :modes]
  return np.pad(kept, ((0, 0), (0, modes - kept.shape[1])))


def _advance(spectrum, viscosity, step, steps):
  """ETDRK4 on spectra [functions, modes]."""
  modes = spectrum.shape[1]
  points, workers = fft.next_fast_len(3 * modes, real=True), cpus.available()
  wave = 2j * np.pi * np.arange(modes)

  def nonlinear(v):
    u = fft.irfft(v, points, norm="forward", workers=workers)
    return -wave / 2 * fft.rfft(u * u, norm="forward", workers=workers)[:, :modes]

  advance = etdrk4.stepper(viscosity * (wave**2).real, nonlinear, np.float64(step))
  for _ in range(steps):
    spectrum = advance(spectrum)
  return spectrum
