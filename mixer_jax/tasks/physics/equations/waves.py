"""Waves in one dimension on [-1, 1], and the time, which is the second coordinate.

Each is solved in one window of time, the whole of it. Allen and Cahn's equation is that of Raissi,
Perdikaris and Karniadakis (2019); Korteweg and de Vries' and Kuramoto and Sivashinsky's
have the coefficients of Wang et al.'s jaxpi, the latter those of its regular regime. The last three are periodic:
the net is, and there is no term for it.
"""

import functools
from typing import Annotated, Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.options import Option
from mixer_jax.pde import cole_hopf, etdrk4, reference
from mixer_jax.tasks.physics.derivatives import partial, powers
from mixer_jax.tasks.physics.problem import Box, Grid, Problem, Term

_POINTS, _TIMES = 256, 101  # of a reference's grid
BOX = Box((-1.0, 0.0), (1.0, 1.0), ("x", "t"))
VISCOSITY = 0.01 / np.pi
# Of each equation: modes, step in time and type of numbers with which the reference has converged to
# 1e-10 (tests/pde). Kuramoto and Sivashinsky's makes errors of rounding grow a hundred thousandfold.
RESOLUTIONS = {
  "allen_cahn": (1024, 5e-4, np.float64),
  "korteweg_de_vries": (256, 5e-5, np.float64),
  "kuramoto_sivashinsky": (128, 2.5e-5, np.longdouble),
}

_INITIAL = 100.0  # weight of initial values of periodic problems: without them u = 0 solves all
_HARD = "build the conditions into the solution, which leaves the term of the interior alone"


def burgers(hard: Annotated[bool, Option(_HARD)] = False) -> Problem:
  """u_t + u u_x = 0.01 / pi u_xx from -sin(pi x), 0 at the ends (Raissi et al., 2019).

  The reference is Cole and Hopf's solution by quadrature.
  """

  def equation(u, x):
    value, slope, second = powers(u, x, 0, 2)
    return partial(u, 1)(x) + value * slope - VISCOSITY * second

  initial = lambda x: -jnp.sin(jnp.pi * x[0])
  terms = {"interior": Term(equation, BOX.inside, 2000)}
  conditions = {
    "boundary": Term(lambda u, x: u(x), BOX.faces(0), 100),
    "initial": Term(lambda u, x: u(x) - initial(x), BOX.at(1, 0.0), 100),
  }
  output = lambda x, y: initial(x) + x[1] * (1 - x[0] ** 2) * y
  own = dict(reference=burgers_reference)
  if hard:
    return Problem(BOX, terms, output=output, **own)
  return Problem(BOX, terms | conditions, **own)


def burgers_reference(cache_dir: str) -> Grid:
  """On 257 x 101 points with the ends."""
  axes = np.linspace(-1, 1, _POINTS + 1), np.linspace(0, 1, _TIMES)
  x, t = np.meshgrid(*axes, indexing="ij")
  make = lambda: {"u": cole_hopf.solve(x, t, VISCOSITY)}
  found = reference.cached("burgers", (VISCOSITY, x.shape), make, cache_dir)
  return Grid(axes, found["u"][..., None])


def _periodic(
  equation: Callable, initial: Callable[[jax.Array], Any], solved: str, inside: int
) -> Problem:
  """A problem whose reference `etdrk4` makes, by the name of the equation there."""
  terms = {
    "interior": Term(equation, BOX.inside, inside),
    "initial": Term(lambda u, x: u(x) - initial(x[0]), BOX.at(1, 0.0), 200, _INITIAL),
  }
  solution = functools.partial(periodic_reference, solved)
  return Problem(BOX, terms, reference=solution, periods=(2.0, 0.0))


def periodic_reference(name: str, cache_dir: str = "") -> Grid:
  """The solution on 256 x 101 points by `etdrk4`."""
  modes, step, dtype = RESOLUTIONS[name]
  times = np.linspace(0, 1, _TIMES)
  axes = -1 + 2 * np.arange(_POINTS) / _POINTS, times
  equation = getattr(etdrk4, name)()
  make = lambda: {"u": etdrk4.solve(equation, times, _POINTS, modes, step, dtype).T}
  identity = modes, step, dtype.__name__, _POINTS, _TIMES
  found = reference.cached(name, identity, make, cache_dir)
  return Grid(axes, found["u"][..., None])


def allen_cahn() -> Problem:
  """u_t = 1e-4 u_xx + 5 (u - u^3) from x^2 cos(pi x)."""

  def equation(u, x):
    value, _, second = powers(u, x, 0, 2)
    return partial(u, 1)(x) - 1e-4 * second + 5 * (value**3 - value)

  return _periodic(equation, lambda x: x**2 * jnp.cos(jnp.pi * x), "allen_cahn", 4000)


def korteweg_de_vries() -> Problem:
  """u_t + u u_x + 0.022^2 u_xxx = 0 from cos(pi x) (Zabusky and Kruskal, 1965)."""

  def equation(u, x):
    value, slope, _, third = powers(u, x, 0, 3)
    return partial(u, 1)(x) + value * slope + 0.022**2 * third

  return _periodic(equation, lambda x: jnp.cos(jnp.pi * x), "korteweg_de_vries", 4000)


def kuramoto_sivashinsky() -> Problem:
  """u_t + 5 u u_x + u_xx / 2 + u_xxxx / 200 = 0 from -sin(pi x)."""

  def equation(u, x):
    value, slope, second, _, fourth = powers(u, x, 0, 4)
    return partial(u, 1)(x) + 5 * value * slope + 0.5 * second + 0.005 * fourth

  return _periodic(equation, lambda x: -jnp.sin(jnp.pi * x), "kuramoto_sivashinsky", 4000)
