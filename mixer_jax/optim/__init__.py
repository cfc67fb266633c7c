"""Optimizers as optax transforms.

Import them from here and use them with any optax chain and any model, inside or outside this
project. K-FAC and its family take a `Curvature`, which is made once of any JAX function.
"""

from mixer_jax.optim.adaptive_damping import levenberg_marquardt
from mixer_jax.optim.algebra import Decomposition
from mixer_jax.optim.curvature.blocks import Block, Diagonal, Diagonals, Kronecker, path_name
from mixer_jax.optim.curvature.curvature import Curvature
from mixer_jax.optim.curvature.likelihoods import Likelihood
from mixer_jax.optim.first_order import adagrad, adam, adamw, lamb, muon, sgd
from mixer_jax.optim.gauss_newton import gauss_newton
from mixer_jax.optim.graft import GraftState, graft
from mixer_jax.optim.hessian_free import hessian_free
from mixer_jax.optim.in_turn import InTurnState, in_turn
from mixer_jax.optim.kfac import ekfac, kfac
from mixer_jax.optim.kfac_basis import (
  kfac_adam,
  kfac_muon,
  scale_by_kfac_adam,
  scale_by_kfac_muon,
)
from mixer_jax.optim.matrices import Axes, Matrices, matrix_axes
from mixer_jax.optim.per_example import per_example_grads
from mixer_jax.optim.preconditioner import (
  ScaleByKfacState,
  constrain_norm,
  scale_by_ekfac,
  scale_by_kfac,
)
from mixer_jax.optim.quadratic import by_quadratic_model
from mixer_jax.optim.quasi_newton import QuasiNewtonState, lbfgs, ssbroyden
from mixer_jax.optim.soap import scale_by_shampoo, scale_by_soap, shampoo, soap
