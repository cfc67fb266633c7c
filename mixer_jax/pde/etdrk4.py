"""Periodic equations u_t = L u + N(u) in one dimension: spectral in space, ETDRK4 in time.

Cox and Matthews (2002); the coefficients as Kassam and Trefethen (2005), Fourth-order
time-stepping for stiff PDEs, means over a circle around each rate.
"""

from typing import Callable, NamedTuple

import numpy as np
from scipy import fft

_CONTOUR = 64  # points
# Samples of the initial value: of one with a kink, few would alias its spectrum, which falls off
# with the square of the frequency.
_SAMPLES = 2**20


class Equation(NamedTuple):
  """A periodic equation on [low, low + length).

  Attributes:
    linear: maps i k, complex [modes], to the rate of each mode.
    nonlinear: maps u [points] and i k to (function of u [points], factor of its spectrum [modes]).
    initial: u at time 0, a function of x.
    order: of the nonlinear part as a polynomial; products up to it are computed without aliasing.
    low: begin of the domain.
    length: of the domain.
  """

  linear: Callable[[np.ndarray], np.ndarray]
  nonlinear: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
  initial: Callable[[np.ndarray], np.ndarray]
  order: int = 2
  low: float = -1.0
  length: float = 2.0


def burgers(viscosity: float) -> Equation:
  """u_t + u u_x = viscosity u_xx from -sin(pi x) on [-1, 1]."""
  linear = lambda ik: viscosity * ik**2
  return Equation(linear, lambda u, ik: (u * u, -ik / 2), lambda x: -np.sin(np.pi * x))


def allen_cahn(diffusion: float = 1e-4, rate: float = 5.0) -> Equation:
  """u_t = diffusion u_xx + rate (u - u^3) from x^2 cos(pi x) on [-1, 1].

  The initial value has a kink at the ends, where it is repeated: its spectrum falls off slowly.
  """
  linear = lambda ik: diffusion * ik**2 + rate
  nonlinear = lambda u, ik: (u**3, np.full(len(ik), -rate))
  return Equation(linear, nonlinear, lambda x: x**2 * np.cos(np.pi * x), order=3)


def korteweg_de_vries(dispersion: float = 0.022) -> Equation:
  """u_t + u u_x + dispersion^2 u_xxx = 0 from cos(pi x) on [-1, 1] (Zabusky and Kruskal, 1965)."""
  linear = lambda ik: -(dispersion**2) * ik**3
  return Equation(linear, lambda u, ik: (u * u, -ik / 2), lambda x: np.cos(np.pi * x))


def kuramoto_sivashinsky(
  advection: float = 5.0, growth: float = 0.5, damping: float = 0.005
) -> Equation:
  """u_t + advection u u_x + growth u_xx + damping u_xxxx = 0 from -sin(pi x) on [-1, 1]."""
  linear = lambda ik: -growth * ik**2 - damping * ik**4
  nonlinear = lambda u, ik: (u * u, -advection * ik / 2)
  return Equation(linear, nonlinear, lambda x: -np.sin(np.pi * x))


def solve(
  equation: Equation,
  times: np.ndarray,
  points: int,
  modes: int,
  step: float,
  dtype: type = np.float64,
) -> np.ndarray:
  """The solution at times from 0 on, equally spaced, on a grid.

  Args:
    equation: see `Equation`.
    times: [n], the first is 0.
    points: of the result's grid, x = low + length i / points; 2 modes or fewer.
    modes: kept of the spectrum.
    step: in time, at most; the steps between two times are equal.
    dtype: of all numbers inside; np.longdouble where errors of rounding grow.

  Returns:
    float64 [n, points].
  """
  between = times[1] - times[0]
  count = max(1, int(np.ceil(between / step - 1e-9)))
  k = 8 * np.arctan(dtype(1)) * np.arange(modes) / equation.length
  grid = lambda n: equation.low + equation.length * np.arange(n, dtype=dtype) / n
  spectrum = fft.rfft(equation.initial(grid(_SAMPLES)), norm="forward")[:modes]
  advance = _of_equation(equation, 1j * k, dtype(between) / count)
  found = []
  for _ in times[1:]:
    for _ in range(count):
      spectrum = advance(spectrum)
    found.append(spectrum)
  solved = np.vstack([equation.initial(grid(points)), _on_grid(np.stack(found), points)])
  return solved.astype(np.float64)


def _on_grid(spectra, points):
  """Values [n, points] of spectra [n, modes]: a part of a grid that holds all modes."""
  every = -(-2 * spectra.shape[1] // points)
  return fft.irfft(spectra, every * points, norm="forward")[:, ::every]


def _of_equation(equation, ik, step):
  """The function from a spectrum [modes] to the spectrum one step later."""
  modes = len(ik)
  points = fft.next_fast_len((equation.order + 1) * modes, real=True)

  def nonlinear(v):
    values, factor = equation.nonlinear(fft.irfft(v, points, norm="forward"), ik)
    return factor * fft.rfft(values, norm="forward")[:modes]

  return stepper(equation.linear(ik), nonlinear, step)


def stepper(
  rates: np.ndarray, nonlinear: Callable[[np.ndarray], np.ndarray], step: np.floating
) -> Callable[[np.ndarray], np.ndarray]:
  """A step of ETDRK4 for v' = rates v + nonlinear(v), as a function of v [..., modes].

  Args:
    rates: [modes], real or complex.
    nonlinear: takes and returns complex [..., modes].
    step: in time, a NumPy number whose type is that of the coefficients.
  """
  half, whole, q, f1, f2, f3 = _coefficients(rates, step)

  def advance(v):
    n0 = nonlinear(v)
    decayed = half * v
    a = decayed + q * n0
    na = nonlinear(a)
    nb = nonlinear(decayed + q * na)
    nc = nonlinear(half * a + q * (2 * nb - n0))
    return whole * v + f1 * n0 + f2 * (na + nb) + f3 * nc

  return advance


def _coefficients(rates, step):
  z = step * rates
  turn = 8 * np.arctan(step.dtype.type(1)) / _CONTOUR
  w = z[:, None] + np.exp(1j * turn * (np.arange(_CONTOUR) + 0.5))
  e = np.exp(w)
  q = (np.exp(w / 2) - 1) / w
  f1 = (-4 - w + e * (4 - 3 * w + w**2)) / w**3
  f2 = 2 * (2 + w + e * (w - 2)) / w**3
  f3 = (-4 - 3 * w - w**2 + e * (4 - w)) / w**3
  means = [step * x.mean(1) for x in (q, f1, f2, f3)]
  return np.exp(z / 2), np.exp(z), *([x.real for x in means] if np.isrealobj(z) else means)
