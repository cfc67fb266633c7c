"""Two equations for a net, with all that makes runs by several packages comparable.

  poisson  -laplace u = 2 pi^2 sin(pi x) sin(pi y) in the unit square, u = 0 at its boundary
  burgers  u_t + u u_x = 0.01 / pi u_xx for t in [0, 1] and x in [-1, 1], u = -sin(pi x) at t = 0
           and 0 at x = -1 and 1; inputs are (t, x)

A loss is the sum of the mean squares of its residuals: in the interior, at the boundary and at the
beginning. Points, and the parameters that a net begins with, are functions of the seed alone.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

# A peer has a Python of its own: nothing but NumPy is imported above.
PROBLEMS = ("poisson", "burgers")
VISCOSITY = 0.01 / np.pi
TESTED = 10_000  # points of the error, about
# Points in the interior. With 1,024 a net fits burgers to a loss of 1e-10 and an error of 0.2: the
# shock lies between the points.
INTERIOR = {"poisson": 1024, "burgers": 8192}
BORDER = 64  # of each side
_PLASTIC = 1.32471795724474602596  # x^3 = x + 1


@dataclasses.dataclass(frozen=True)
class Problem:
  """Points and values."""

  name: str  # of the equation
  # by residual, [points, 2]: interior, boundary and, of burgers, initial
  points: dict[str, np.ndarray]
  values: dict[str, np.ndarray]  # of u, by residual, [points, 1]; the interior has none
  tested: np.ndarray  # points of the error, [points, 2]
  solution: np.ndarray  # u there, [points, 1]

  def error(self, found: Any) -> float:
    """The relative L2 error of values at the points of the error."""
    found = np.asarray(found).reshape(self.solution.shape)
    return float(np.linalg.norm(found - self.solution) / np.linalg.norm(self.solution))


def of(name: str, seed: int, interior: int | None = None, border: int = BORDER) -> Problem:
  """One of `PROBLEMS`, with points at borders that are equally spaced.

  Those in the interior are even, too: Roberts' sequence, multiples of the inverse plastic number
  and of its square, from a random point on.
  """
  start = np.random.default_rng(seed).uniform(size=2)
  steps = np.arange(interior or INTERIOR[name])[:, None]
  inner = (start + steps * _PLASTIC ** np.array([-1.0, -2.0])) % 1
  # Without the corners, which lie at two borders.
  line = (np.arange(border) + 0.5) / border
  grid = np.linspace(0, 1, round(TESTED**0.5))
  tested = np.stack(np.meshgrid(grid, grid, indexing="ij"), axis=-1).reshape(-1, 2)
  if name == "poisson":
    ends, ones = np.zeros(border), np.ones(border)
    sides = [(ends, line), (ones, line), (line, ends), (line, ones)]
    points = {"interior": inner, "boundary": np.concatenate([np.stack(s, 1) for s in sides])}
    solution = np.sin(np.pi * tested).prod(axis=1, keepdims=True)
  else:
    stretched = lambda x: np.stack([x[:, 0], 2 * x[:, 1] - 1], axis=1)
    inner, tested = stretched(inner), stretched(tested)
    sides = [np.stack([line, np.full(border, x)], axis=1) for x in (-1.0, 1.0)]
    initial = np.stack([np.zeros(border), 2 * line - 1], axis=1)
    points = {"interior": inner, "boundary": np.concatenate(sides), "initial": initial}
    solution = burgers(*tested.T)[:, None]
  values = {"boundary": np.zeros((len(points["boundary"]), 1))}
  if "initial" in points:
    values["initial"] = -np.sin(np.pi * points["initial"][:, 1:])
  return Problem(name, points, values, tested, solution)


def burgers(t: np.ndarray, x: np.ndarray) -> np.ndarray:
  """The solution by the Cole-Hopf transform (Basdevant et al., 1986, Section 2), [points].

  The integrands fall as exp(-z^2), so that the trapezoidal rule is right to rounding. Their other
  factor rises by up to exp(100) from the middle on, hence the wide range.
  """
  z = np.linspace(-13, 13, 1301)
  shifted = x[:, None] - np.sqrt(4 * VISCOSITY * t)[:, None] * z
  # The largest exponent is taken off, as the integrals are divided.
  weights = np.exp(-(np.cos(np.pi * shifted) + 1) / (2 * np.pi * VISCOSITY) - z**2)
  return -(np.sin(np.pi * shifted) * weights).sum(axis=1) / weights.sum(axis=1)


def initial_layers(sizes: list[int], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
  """Kernels [inputs, outputs] by Glorot's uniform rule, and biases of 0."""
  rng = np.random.default_rng(seed)
  layers = []
  for rows, columns in itertools.pairwise(sizes):
    limit = np.sqrt(6 / (rows + columns))
    layers.append((rng.uniform(-limit, limit, (rows, columns)), np.zeros(columns)))
  return layers
