"""Flow in a square cavity whose lid slides, steady: finite differences and Newton's method."""

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

_STEPS = 30
_TOLERANCE = 1e-10


def solve(cells: int, reynolds: float = 100.0) -> np.ndarray:
  """Velocities of the flow in [0, 1]^2 with u = 1 at y = 1 and no slip elsewhere.

  The stream function and the vorticity w have central differences of second order, w on the
  walls is Thom's. Newton's method begins at rest, or at the flow of a lower Reynolds number where that
  is above 500.

  Args:
    cells: on each side; the grid has a point more.
    reynolds: of lid and side.

  Returns:
    float64 [cells + 1, cells + 1, 2], u and v at x_i, y_j.

  Raises:
    ArithmeticError: Newton's method did not converge.
  """
  system = _System(cells)
  state = np.zeros(2 * (cells + 1) ** 2)
  for number in [*np.arange(500.0, reynolds, 500.0), reynolds]:
    state = system.newton(state, number)
  return system.velocities(state)


class _System:
  """The equations of stream function psi and vorticity w; a state is both, [2 (cells + 1)^2]."""

  def __init__(self, cells: int):
    n, h = cells + 1, 1 / cells
    self.n, self.h = n, h
    inner = np.zeros((n, n), bool)
    inner[1:-1, 1:-1] = True
    self.inner = sparse.diags(inner.ravel().astype(float))
    centre = sparse.diags([-1.0, 1.0], [-1, 1], (n, n)) / (2 * h)
    second = sparse.diags([1.0, -2.0, 1.0], [-1, 0, 1], (n, n)) / h**2
    one = sparse.identity(n)
    self.dx, self.dy = sparse.kron(centre, one, "csr"), sparse.kron(one, centre, "csr")
    self.laplace = sparse.kron(second, one, "csr") + sparse.kron(one, second, "csr")
    self.walls, self.slide = self._walls(n, h)

  def _walls(self, n, h):
    """The rows of w on the walls: w = -2 (psi of the neighbour - psi of the wall + h lid) / h^2."""
    number = np.arange(n * n).reshape(n, n)
    sides = [(number[:, -1], number[:, -2]), (number[:, 0], number[:, 1])]
    sides += [(number[0, 1:-1], number[1, 1:-1]), (number[-1, 1:-1], number[-2, 1:-1])]
    rows = np.concatenate([wall for wall, _ in sides])
    beside = np.concatenate([inside for _, inside in sides])
    shape, ones = (n * n, n * n), np.ones(len(rows))
    matrix = sparse.csr_matrix((2 * ones / h**2, (rows, beside)), shape)
    matrix -= sparse.csr_matrix((2 * ones / h**2, (rows, rows)), shape)
    slide = np.zeros(n * n)
    slide[number[:, -1]] = 2 / h
    return matrix, slide

  def newton(self, state: np.ndarray, reynolds: float) -> np.ndarray:
    size = self.n**2
    edge, one = sparse.identity(size) - self.inner, sparse.identity(size)
    for _ in range(_STEPS):
      psi, w = state[:size], state[size:]
      u, v = self.dy @ psi, -(self.dx @ psi)
      flow = sparse.diags(u) @ self.dx + sparse.diags(v) @ self.dy - self.laplace / reynolds
      turned = sparse.diags(self.dx @ w) @ self.dy - sparse.diags(self.dy @ w) @ self.dx
      matrix = sparse.bmat(
        [
          [self.inner @ self.laplace + edge, self.inner @ one],
          [self.inner @ turned + self.walls, self.inner @ flow + edge],
        ],
        "csc",
      )
      residual = np.concatenate(
        [
          self.inner @ (self.laplace @ psi + w) + edge @ psi,
          self.inner @ (flow @ w) + edge @ w + self.walls @ psi + self.slide,
        ]
      )
      change = linalg.splu(matrix).solve(-residual)
      state = state + change
      if np.abs(change[:size]).max() < _TOLERANCE:
        return state
    raise ArithmeticError(f"Newton's method did not converge at a Reynolds number of {reynolds:g}")

  def velocities(self, state: np.ndarray) -> np.ndarray:
    psi = state[: self.n**2]
    u, v = (self.dy @ psi).reshape(self.n, self.n), -(self.dx @ psi).reshape(self.n, self.n)
    found = np.zeros((self.n, self.n, 2))
    found[1:-1, 1:-1] = np.stack([u, v], -1)[1:-1, 1:-1]
    found[:, -1, 0] = 1.0
    return found
