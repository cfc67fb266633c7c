"""An equation as a user writes it: residuals, points, and the solution if it is known."""

import dataclasses
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.errors import UserError

# Maps a point [dim] to the value [] of the function, or to the values [k] of several functions.
Function = Callable[[jax.Array], jax.Array]
# Draws n rows, float64 [n, columns], whose first columns are a point of the domain.
Sampler = Callable[[np.random.Generator, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Box:
  """The domain, an interval on each axis.

  Attributes:
    low: lower end of each axis, [dim].
    high: upper end of each axis, [dim].
    names: names of the axes; an axis "t" is the time.

  Example:
    ```python
    import numpy as np
    from mixer_jax.tasks import physics

    box = physics.Box((0.0, -1.0), (1.0, 1.0), ("t", "x"))
    start = box.at("t", 0.0)  # draws points of the time 0
    points = start(np.random.default_rng(0), 5)
    assert points.shape == (5, 2) and (points[:, 0] == 0).all()
    ```
  """

  low: Sequence[float]
  high: Sequence[float]
  names: Sequence[str] = ()

  @property
  def dim(self) -> int:
    return len(self.low)

  @property
  def axes(self) -> Sequence[str]:
    """The names of the axes; x0, x1, ... if none are given."""
    return self.names or [f"x{i}" for i in range(self.dim)]

  def inside(self, rng: np.random.Generator, n: int) -> np.ndarray:
    """Points drawn uniformly, [n, dim]; a `Sampler`."""
    return rng.uniform(self.low, self.high, (n, self.dim))

  def _number(self, axis: int | str) -> int:
    return list(self.axes).index(axis) if isinstance(axis, str) else axis

  def faces(self, *axes: int | str) -> Sampler:
    """Draws points uniformly on the two faces of these axes, by default of all axes."""
    chosen = np.array([self._number(axis) for axis in axes] or range(self.dim))
    ends = np.array([self.low, self.high], np.float64)

    def sample(rng, n):
      x, axis = self.inside(rng, n), chosen[rng.integers(len(chosen), size=n)]
      x[np.arange(n), axis] = ends[rng.integers(2, size=n), axis]
      return x

    return sample

  def at(self, axis: int | str, value: float) -> Sampler:
    """Draws points uniformly where a coordinate has this value, such as the time 0."""
    number = self._number(axis)

    def sample(rng, n):
      x = self.inside(rng, n)
      x[:, number] = value
      return x

    return sample


class Term(NamedTuple):
  """A term of the loss: the mean over points of the squared residual.

  Attributes:
    residual: maps the solution u, a `Function`, and a row that was drawn, a point [dim], to [] or
      [k], whose squares are added up. If the problem has learned parameters, their values by name
      are a third argument.
    points: draws the rows.
    count: the number of rows.
    weight: the weight of the mean in the loss.

  Example:
    After the example of `Box`:

    ```python
    heat = lambda u, x: physics.partial(u, 0)(x) - physics.partial(u, 1, 1)(x)
    term = physics.Term(heat, box.inside, count=100)
    ```
  """

  residual: Callable[..., jax.Array]
  points: Sampler
  count: int
  weight: float = 1.0


class Learned(NamedTuple):
  """A parameter of the equation that is learned with the solution.

  Attributes:
    start: its first value.
    true: the value that it should get, if that is known.
    positive: whether its logarithm is trained.

  Example:
    ```python
    from mixer_jax.tasks import physics

    viscosity = physics.Learned(start=0.1, true=0.01, positive=True)
    ```
  """

  start: float
  true: float | None = None
  positive: bool = False


class Grid(NamedTuple):
  """A solution on a grid.

  Attributes:
    axes: the points of each axis, [n] each.
    values: the solution there, [n0, n1, ..., functions].

  Example:
    ```python
    import numpy as np
    from mixer_jax.tasks import physics

    axis = np.linspace(0.0, 1.0, 5)
    points, values = physics.Grid((axis, axis), np.zeros((5, 5, 1))).rows()
    assert points.shape == (25, 2) and values.shape == (25, 1)
    ```
  """

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
    domain: the domain of the solution.
    terms: the terms of the loss, by name.
    functions: the names of the unknown functions; with one name, u(x) is a number.
    exact: the solution in JAX, a `Function`, if it is known, or its first functions.
    reference: makes the solution on a grid; takes the directory of a cache ("": the user's own).
    learned: the parameters of the equation that are learned, by name; a number is a first value.
    output: maps a point and the net's value there to the value of the solution, so that conditions
      hold for any net. By default the net is the solution.
    periods: the period of each axis, [dim], 0 for an axis without one; or by names of axes.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax.tasks import physics

    box = physics.Box((0.0,), (1.0,), ("x",))
    inside = physics.Term(lambda u, x: physics.laplacian(u, x) + 2.0, box.inside, 64)
    edge = physics.Term(lambda u, x: u(x), box.faces(), 2)
    exact = lambda x: x[0] * (1.0 - x[0])
    problem = physics.Problem(box, {"inside": inside, "edge": edge}, exact=exact)
    assert abs(problem.residual("inside", exact, jnp.array([0.3]), {})[0]) < 1e-5
    ```
  """

  domain: Box
  terms: Mapping[str, Term]
  functions: Sequence[str] = ("u",)
  exact: Function | None = None
  reference: Callable[[str], Grid] | None = None
  learned: Mapping[str, Learned | float] = dataclasses.field(default_factory=dict)
  output: Callable[[jax.Array, jax.Array], jax.Array] | None = None
  periods: Sequence[float] | Mapping[str, float] = ()

  def __post_init__(self):
    whole = lambda x: x if isinstance(x, Learned) else Learned(float(x))
    learned, periods = {name: whole(x) for name, x in self.learned.items()}, self.periods
    if isinstance(periods, Mapping):
      periods = [periods.get(axis, 0.0) for axis in self.domain.axes]
    object.__setattr__(self, "learned", learned)
    object.__setattr__(self, "periods", periods)

  @property
  def solved(self) -> bool:
    """Whether the solution is known."""
    return self.exact is not None or self.reference is not None

  def solution(self, net: Callable[[jax.Array], jax.Array]) -> Function:
    """The solution of a net that maps [dim] to [functions]."""

    def u(x):
      y = net(x)
      y = y[0] if len(self.functions) == 1 else y
      return y if self.output is None else self.output(x, y)

    return u

  def values(self, raw: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The learned parameters, computed from the trained numbers."""
    return {k: jnp.exp(x) if self.learned[k].positive else x for k, x in raw.items()}

  def exact_values(self, points: np.ndarray) -> np.ndarray:
    """The exact solution at points [n, dim], [n, functions], as wide as JAX's floats are."""
    return np.asarray(jax.jit(jax.vmap(self.exact))(points)).reshape(len(points), -1)

  def residual(self, name: str, u: Function, row: jax.Array, raw: Mapping[str, Any]) -> jax.Array:
    """The residual of a term at a row, [k]; a UserError if the user's function has another shape."""
    more = (self.values(raw),) if self.learned else ()
    found = jnp.atleast_1d(self.terms[name].residual(u, row, *more))
    if found.ndim > 1:
      raise UserError(
        f"the residual {name!r} of a point has shape {found.shape}; allowed: (), (k,)"
      )
    return found


def observed(points: np.ndarray, values: np.ndarray, weight: float = 1.0) -> Term:
  """A term of data: the solution was measured at some points.

  Args:
    points: where it was measured, [n, dim].
    values: of the first functions there, [n] or [n, k].
    weight: the weight of the mean of squares in the loss.

  Returns:
    A `Term` whose rows are drawn from the measurements.

  Example:
    ```python
    import numpy as np
    from mixer_jax.tasks import physics

    x = np.linspace(0.0, 1.0, 7)[:, None]
    term = physics.observed(x, np.sin(x), weight=10.0)
    ```
  """
  values = np.reshape(values, (len(points), -1))
  rows, (dim, number) = np.hstack([points, values]), (points.shape[1], values.shape[1])
  residual = lambda u, row, *_: jnp.atleast_1d(u(row[:dim]))[:number] - row[dim:]
  draw = lambda rng, n: rows[rng.choice(len(rows), n, replace=n > len(rows))]
  return Term(residual, draw, len(points), weight)
