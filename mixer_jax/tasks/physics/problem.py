"""An equation, as a user writes it: residuals, points, and maybe the solution."""

import dataclasses
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

# From a point [dim] to the value [] of the function, or to those [k] of several.
Function = Callable[[jax.Array], jax.Array]
# Draws n rows, float64 [n, columns]; the first columns are a point of the domain.
Sampler = Callable[[np.random.Generator, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Box:
  """The domain, an interval on each axis.

  Attributes:
    low, high: ends of each axis, [dim].
    names: of the axes; one called "t" is the time.
  """

  low: Sequence[float]
  high: Sequence[float]
  names: Sequence[str] = ()

  @property
  def dim(self) -> int:
    return len(self.low)

  @property
  def axes(self) -> Sequence[str]:
    """The names, or x0, x1, ... if there are none."""
    return self.names or [f"x{i}" for i in range(self.dim)]

  def inside(self, rng: np.random.Generator, n: int) -> np.ndarray:
    """Points drawn uniformly, [n, dim]; a `Sampler`."""
    return rng.uniform(self.low, self.high, (n, self.dim))

  def faces(self, *axes: int) -> Sampler:
    """Points drawn uniformly on the two faces of some axes; none given: of all axes."""
    chosen = np.array(axes or range(self.dim))
    ends = np.array([self.low, self.high], np.float64)

    def sample(rng, n):
      x, axis = self.inside(rng, n), chosen[rng.integers(len(chosen), size=n)]
      x[np.arange(n), axis] = ends[rng.integers(2, size=n), axis]
      return x

    return sample

  def at(self, axis: int, value: float) -> Sampler:
    """Points drawn uniformly where a coordinate has a value, such as the time 0."""

    def sample(rng, n):
      x = self.inside(rng, n)
      x[:, axis] = value
      return x

    return sample


class Term(NamedTuple):
  """A term of the loss: the mean of squares of a residual.

  Attributes:
    residual: maps the solution u, a `Function`, and a row that was drawn, a point [dim], to [] or
      [k], whose squares are added up. Of a problem with learned parameters it gets their values by
      name as a third argument.
    points: draws the rows.
    count: how many.
    weight: of the mean in the loss.
  """

  residual: Callable[..., jax.Array]
  points: Sampler
  count: int
  weight: float = 1.0


class Learned(NamedTuple):
  """A parameter of the equation that is learned with the solution.

  Attributes:
    start: its first value.
    true: the value that it should get; None: nobody knows.
    positive: whether its logarithm is trained.
  """

  start: float
  true: float | None = None
  positive: bool = False


class Grid(NamedTuple):
  """A solution on a grid: the points of each axis, and values [n0, n1, ..., functions]."""

  axes: Sequence[np.ndarray]
  values: np.ndarray

  def rows(self) -> tuple[np.ndarray, np.ndarray]:
    """Points [n, dim] and values [n, functions]."""
    points = np.stack(np.meshgrid(*self.axes, indexing="ij"), axis=-1)
    return points.reshape(-1, len(self.axes)), self.values.reshape(-1, self.values.shape[-1])


@dataclasses.dataclass(frozen=True)
class Problem:
  """An equation to be solved.

  Attributes:
    domain: of the solution.
    terms: of the loss, by name.
    functions: names of the functions that are looked for; with one, u(x) is a number.
    exact: the solution, a `Function` of JAX, if it is known; of several functions maybe the first.
    reference: makes the solution on a grid, of the directory of the cache ("": the user's own).
    learned: parameters of the equation that are learned, by name.
    output: maps a point and the net's value there to that of the solution, so that
      conditions hold whatever the net is. None: the net is the solution.
    periods: of the axes in which the solution is periodic, [dim]; 0 of others. (): none.
  """

  domain: Box
  terms: Mapping[str, Term]
  functions: Sequence[str] = ("u",)
  exact: Function | None = None
  reference: Callable[[str], Grid] | None = None
  learned: Mapping[str, Learned] = dataclasses.field(default_factory=dict)
  output: Callable[[jax.Array, jax.Array], jax.Array] | None = None
  periods: Sequence[float] = ()

  @property
  def solved(self) -> bool:
    """Whether errors can be told."""
    return self.exact is not None or self.reference is not None

  def solution(self, net: Callable[[jax.Array], jax.Array]) -> Function:
    """The solution of a net that maps [dim] to [functions]."""

    def u(x):
      y = net(x)
      y = y[0] if len(self.functions) == 1 else y
      return y if self.output is None else self.output(x, y)

    return u

  def values(self, raw: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The learned parameters, of what is trained."""
    return {k: jnp.exp(x) if self.learned[k].positive else x for k, x in raw.items()}

  def residual(self, name: str, u: Function, row: jax.Array, raw: Mapping[str, Any]) -> jax.Array:
    """The residual of a term at a row, [k]."""
    more = (self.values(raw),) if self.learned else ()
    return jnp.atleast_1d(self.terms[name].residual(u, row, *more))


def observed(points: np.ndarray, values: np.ndarray, weight: float = 1.0) -> Term:
  """A term of data: the first functions shall have values [n] or [n, k] at points [n, dim]."""
  values = np.reshape(values, (len(points), -1))
  rows, (dim, number) = np.hstack([points, values]), (points.shape[1], values.shape[1])
  residual = lambda u, row, *_: jnp.atleast_1d(u(row[:dim]))[:number] - row[dim:]
  draw = lambda rng, n: rows[rng.choice(len(rows), n, replace=n > len(rows))]
  return Term(residual, draw, len(points), weight)
