"""The inverse of Darcy flow: from the pressure, measured with noise, to the coefficient.

  python -m mixer_jax.main --config=configs/darcy_inverse.py[:MODEL[,OPTIMIZER]] \
      [--config.data.noise=0.1]

MODEL is galerkin_inverse or another one of `models.OPERATORS` for two axes. The noise is a share of
the pressure's standard deviation at each point, drawn once for each function, of the test set, too.
The coefficient is averaged over the cells of a coarse grid, that of attention. Sizes and OPTIMIZER
are those of `configs/darcy.py`: 85x85 points and 29x29; Cao (NeurIPS 2021) has
`--config.data.step=3 --config.data.output_step=12 --config.model.coarse=36`.
"""

import pathlib

from mixer_jax import study


def get_config(choice="galerkin_inverse"):
  config = study.read_config(pathlib.Path(__file__).parent / "darcy.py", choice)
  config.h1 = 0.0
  config.data.update(output_step=15, inverse=True, noise=0.01)
  config.model.dirichlet = False  # coefficients are not 0 at the boundary
  return config
