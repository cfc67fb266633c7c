"""Poisson's equation on the unit cube, -Laplace u = f, with the values of u on the boundary.

Solutions and numbers of points are those of arXiv:2405.15603 (Section 4 and Appendix A) up to ten
dimensions, where the "L2 error" is the root mean square of errors, `rmse` here. In a hundred the solution is its, and the
numbers are ours.
"""

from typing import Callable

import jax
import jax.numpy as jnp

from mixer_jax.tasks.physics.derivatives import laplacian
from mixer_jax.tasks.physics.problem import Box, Problem, Term


def dirichlet(
  dim: int, exact: Callable, source: Callable[[jax.Array], jax.Array], inside: int, boundary: int
) -> Problem:
  """The problem of a solution and its -Laplacian, functions of a point, on [0, 1]^dim."""
  box = Box((0.0,) * dim, (1.0,) * dim, ("x", "y") if dim == 2 else ())
  terms = {
    "interior": Term(lambda u, x: laplacian(u, x) + source(x), box.inside, inside),
    "boundary": Term(lambda u, x: u(x) - exact(x), box.faces(), boundary),
  }
  return Problem(box, terms, exact=exact)


def poisson_2d() -> Problem:
  """u = sin(pi x) sin(pi y)."""
  exact = lambda x: jnp.prod(jnp.sin(jnp.pi * x))
  return dirichlet(2, exact, lambda x: 2 * jnp.pi**2 * exact(x), 900, 120)


def poisson_5d() -> Problem:
  """u is the sum of cos(pi x_i)."""
  exact = lambda x: jnp.sum(jnp.cos(jnp.pi * x))
  return dirichlet(5, exact, lambda x: jnp.pi**2 * exact(x), 3000, 500)


def poisson_10d() -> Problem:
  """u = x0 x1 + x2 x3 + ..., which is harmonic."""
  exact = lambda x: jnp.sum(x[::2] * x[1::2])
  return dirichlet(10, exact, lambda x: jnp.zeros((), x.dtype), 3000, 1000)


def poisson_100d() -> Problem:
  """u = |x|^2."""
  exact = lambda x: jnp.sum(x**2)
  return dirichlet(100, exact, lambda x: jnp.asarray(-2.0 * x.size, x.dtype), 100, 50)
