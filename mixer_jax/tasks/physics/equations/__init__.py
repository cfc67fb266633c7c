"""Equations by the name in `config.problem.name`."""

import functools

from mixer_jax.tasks.physics.equations import cavity, diffusion, inverse, poisson, waves

PROBLEMS = {
  "poisson_2d": poisson.poisson_2d,
  "poisson_5d": poisson.poisson_5d,
  "poisson_10d": poisson.poisson_10d,
  "poisson_100d": poisson.poisson_100d,
  "heat_1d": diffusion.heat_1d,
  "heat_4d": diffusion.heat_4d,
  "log_fokker_planck_9d": functools.partial(diffusion.log_fokker_planck, dim=9),
  "burgers": waves.burgers,
  "allen_cahn": waves.allen_cahn,
  "korteweg_de_vries": waves.korteweg_de_vries,
  "kuramoto_sivashinsky": waves.kuramoto_sivashinsky,
  "burgers_inverse": inverse.burgers_inverse,
  "cavity": cavity.cavity,
}
