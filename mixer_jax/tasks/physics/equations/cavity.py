"""The flow in a cavity whose lid slides, steady, at a Reynolds number of 100."""

import jax.numpy as jnp
import numpy as np

from mixer_jax.pde import cavity as flow
from mixer_jax.pde import reference
from mixer_jax.tasks.physics.derivatives import gradient, laplacian
from mixer_jax.tasks.physics.problem import Box, Grid, Problem, Term

_REYNOLDS = 100.0
_CELLS = 96  # of the coarser of two grids, which are extrapolated
BOX = Box((0.0, 0.0), (1.0, 1.0), ("x", "y"))


def cavity() -> Problem:
  """Navier and Stokes' equations for u, v and p: u = 1 at y = 1, else no slip; p = 0 at (0, 0).

  The errors are those of u and v. The lid's velocity jumps at its ends, as in Ghia et al. (1982).
  """

  def equation(f, x):
    u, v, _ = f(x)
    d = gradient(f, x)  # [2, 3]
    second = laplacian(f, x)
    moved = u * d[0] + v * d[1] - second / _REYNOLDS
    return jnp.stack([moved[0] + d[0, 2], moved[1] + d[1, 2], d[0, 0] + d[1, 1]])

  def wall(f, x):
    lid = jnp.where(x[1] == 1, 1.0, 0.0)
    return f(x)[:2] - jnp.stack([lid, jnp.zeros_like(lid)])

  corner = lambda rng, n: np.zeros((n, 2))
  terms = {
    "interior": Term(equation, BOX.inside, 4000),
    "boundary": Term(wall, BOX.faces(), 800),
    "pressure": Term(lambda f, x: f(x)[2], corner, 1),
  }
  return Problem(BOX, terms, ("u", "v", "p"), reference=cavity_reference)


def cavity_reference(cache_dir: str = "") -> Grid:
  """Velocities on 97 x 97 points: Richardson's extrapolation of those of 96 and 192 cells.

  They are right to 1e-5 but next to the lid's ends, where the velocity jumps, to a few percent.
  """

  def make():
    coarse, fine = (flow.solve(cells, _REYNOLDS) for cells in (_CELLS, 2 * _CELLS))
    return {"velocities": (4 * fine[::2, ::2] - coarse) / 3}

  found = reference.cached("cavity", (_REYNOLDS, _CELLS), make, cache_dir)
  axis = np.linspace(0, 1, _CELLS + 1)
  return Grid((axis, axis), found["velocities"])
