"""An inverse problem: the coefficients of Burgers' equation from noisy values of its solution."""

from typing import Annotated

import numpy as np

from mixer_jax.options import Option
from mixer_jax.pde import cole_hopf
from mixer_jax.tasks.physics.derivatives import partial, powers
from mixer_jax.tasks.physics.equations.waves import BOX, VISCOSITY, burgers_reference
from mixer_jax.tasks.physics.problem import Learned, Problem, Term, observed


def burgers_inverse(
  noise: Annotated[
    float, Option("standard deviation of the data's noise, by that of the data", 0, 10)
  ] = 0.01,
  observations: Annotated[int, Option("points with data", 1, 10**6)] = 2000,
  data_seed: Annotated[int, Option("seed of points with data and of noise", 0, 2**31)] = 0,
) -> Problem:
  """u_t + advection u u_x = viscosity u_xx, whose coefficients are learned (Raissi et al., 2019).

  The truth is 1 and 0.01 / pi; values of the solution are known at points of the domain, and nothing else.
  """

  def equation(u, x, coefficients):
    value, slope, second = powers(u, x, 0, 2)
    moved = coefficients["advection"] * value * slope
    return partial(u, 1)(x) + moved - coefficients["viscosity"] * second

  rng = np.random.default_rng(data_seed)
  points = BOX.inside(rng, observations)
  values = cole_hopf.solve(points[:, 0], points[:, 1], VISCOSITY)
  values = values + noise * values.std() * rng.standard_normal(observations)
  terms = {"interior": Term(equation, BOX.inside, 2000), "data": observed(points, values)}
  learned = {
    "advection": Learned(0.5, true=1.0),
    "viscosity": Learned(0.01, true=VISCOSITY, positive=True),
  }
  return Problem(BOX, terms, reference=burgers_reference, learned=learned)
