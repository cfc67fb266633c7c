"""Darcy's equation on the unit square: five-point differences, solved by conjugate gradients."""

from concurrent import futures

import numpy as np
from scipy import fft

from mixer_jax.data import cpus

_TOLERANCE = 1e-9
_MOST_STEPS = 10_000


def solve(coefficient: np.ndarray, source: np.ndarray | float = 1.0) -> np.ndarray:
  """Solves -div(a grad u) = f on the unit square, with u = 0 on its boundary.

  The flux between two neighbouring points has the arithmetic mean of their coefficients, as in the
  generator of Li et al. (2021). That one, however, draws coefficients and keeps solutions at the
  centres of cells, and splines carry both from and to the grid; here all stands on the grid.

  Conjugate gradients are preconditioned by the inverse of the equation with a = 1, two fast sine
  transforms. So the number of steps depends on the ratio of the largest and smallest coefficient,
  not on the grid: about 18 for 3 and 12. They end when the residual is 1e-9 of the source, in the
  norm of the preconditioner.

  Args:
    coefficient: a, positive, [functions, side, side] on a grid with the boundary.
    source: f, a number or of a shape that broadcasts to that of `coefficient`.

  Returns:
    float64 [functions, side, side]. A ValueError if a coefficient is not positive, or if the steps
    do not converge.
  """
  a = np.asarray(coefficient, np.float64)
  if not (a > 0).all():
    raise ValueError(f"coefficients of Darcy's equation are positive, not {a.min()}")
  right = np.broadcast_to(source, a.shape)[:, 1:-1, 1:-1] / (a.shape[1] - 1.0) ** 2
  with futures.ThreadPoolExecutor(cpus.available()) as pool:  # NumPy and SciPy release the lock
    inner = np.stack(list(pool.map(_conjugate_gradients, a, right)))
  return np.pad(inner, ((0, 0), (1, 1), (1, 1)))


def _conjugate_gradients(a, right):
  """Solves for the inner points of one function."""
  down = (a[1:, 1:-1] + a[:-1, 1:-1]) / 2  # between rows
  across = (a[1:-1, 1:] + a[1:-1, :-1]) / 2
  diagonal = down[1:] + down[:-1] + across[:, 1:] + across[:, :-1]
  down, across = down[1:-1], across[:, 1:-1]
  eigenvalues = _eigenvalues(len(right))

  def apply(u):
    out = diagonal * u
    out[1:] -= down * u[:-1]
    out[:-1] -= down * u[1:]
    out[:, 1:] -= across * u[:, :-1]
    out[:, :-1] -= across * u[:, 1:]
    return out

  def precondition(r):
    spectrum = fft.dstn(r, 1)
    spectrum /= eigenvalues
    return fft.idstn(spectrum, 1, overwrite_x=True)

  u, r = np.zeros_like(right), right.copy()
  z = precondition(r)
  p, rz = z, np.vdot(r, z)
  enough = _TOLERANCE**2 * rz
  for _ in range(_MOST_STEPS):
    if rz <= enough:
      return u
    ap = apply(p)
    step = rz / np.vdot(p, ap)
    u += step * p
    r -= step * ap
    z = precondition(r)
    rz, before = np.vdot(r, z), rz
    p = z + (rz / before) * p
  raise ValueError("the conjugate gradients of Darcy's equation did not converge")


def _eigenvalues(n):
  """Eigenvalues of five-point differences with a = 1 on n x n inner points, times h^2."""
  one = 2 - 2 * np.cos(np.pi * np.arange(1, n + 1) / (n + 1))
  return np.add.outer(one, one)
