"""Diffusion in time, which is the last coordinate of a point.

Equations, solutions and numbers of points inside are those of arXiv:2405.15603 (Section 4 and
Appendix A), where boundary and initial points are counted together.
"""

from typing import Callable

import jax.numpy as jnp

from mixer_jax.tasks.physics.derivatives import gradient, laplacian, partial
from mixer_jax.tasks.physics.problem import Box, Problem, Term

_CONDUCTIVITY = 0.25


def _space_and_time(dim: int, side: tuple[float, float]) -> Box:
  names = ("x",) if dim == 1 else tuple(f"x{i}" for i in range(dim))
  return Box((side[0],) * dim + (0.0,), (side[1],) * dim + (1.0,), (*names, "t"))


def _heat(dim: int, exact: Callable, inside: int, boundary: int, initial: int) -> Problem:
  """u_t = 1/4 Laplace u on [0, 1]^dim up to time 1, with the solution's values on the boundary."""
  box = _space_and_time(dim, (0.0, 1.0))
  equation = lambda u, x: partial(u, dim)(x) - _CONDUCTIVITY * laplacian(u, x, dim)
  value = lambda u, x: u(x) - exact(x)
  terms = {
    "interior": Term(equation, box.inside, inside),
    "boundary": Term(value, box.faces(*range(dim)), boundary),
    "initial": Term(value, box.at(dim, 0.0), initial),
  }
  return Problem(box, terms, exact=exact)


def heat_1d() -> Problem:
  """u = exp(-pi^2 t / 4) sin(pi x)."""
  decay = _CONDUCTIVITY * jnp.pi**2
  return _heat(1, lambda x: jnp.exp(-decay * x[1]) * jnp.sin(jnp.pi * x[0]), 900, 80, 40)


def heat_4d() -> Problem:
  """u = exp(-t) times the sum of sin(2 x_i)."""
  return _heat(4, lambda x: jnp.exp(-x[4]) * jnp.sum(jnp.sin(2 * x[:4])), 3000, 250, 250)


def log_fokker_planck(dim: int) -> Problem:
  """The logarithm q of a density under drift -x / 2 and diffusion 1, on [-5, 5]^dim up to time 1.

  q_t = dim / 2 + x . grad q / 2 + Laplace q + |grad q|^2 from a standard normal, which stays normal
  with the variance 2 - exp(-t). There is no condition on the boundary.
  """
  box = _space_and_time(dim, (-5.0, 5.0))

  def exact(x):
    variance = 2 - jnp.exp(-x[dim])
    return -0.5 * jnp.sum(x[:dim] ** 2) / variance - 0.5 * dim * jnp.log(2 * jnp.pi * variance)

  def equation(q, x):
    slope = gradient(q, x, dim)
    growth = 0.5 * dim + 0.5 * jnp.dot(x[:dim], slope) + jnp.dot(slope, slope)
    return partial(q, dim)(x) - growth - laplacian(q, x, dim)

  terms = {
    "interior": Term(equation, box.inside, 3000),
    "initial": Term(lambda q, x: q(x) - exact(x), box.at(dim, 0.0), 1000),
  }
  return Problem(box, terms, exact=exact)
