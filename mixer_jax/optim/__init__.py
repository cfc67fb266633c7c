"""Optimizers as optax transforms.

Import them from here and use them with any optax chain and any model, inside or outside this
project. K-FAC and its family take a `Curvature`, which is made once of any JAX function.
"""

from mixer_jax.optim.adaptive_damping import LevenbergMarquardtState, levenberg_marquardt
from mixer_jax.optim.algebra import Decomposition
from mixer_jax.optim.curvature.blocks import Block, Diagonal, Diagonals, Kronecker, path_name
from mixer_jax.optim.curvature.curvature import Curvature
from mixer_jax.optim.curvature.likelihoods import Likelihood
from mixer_jax.optim.curvature.residuals import Residuals
from mixer_jax.optim.curvature.tagged import Tagged
from mixer_jax.optim.eigenbasis import InBasisState
from mixer_jax.optim.first_order import adagrad, adam, adamw, lamb, muon, sgd
from mixer_jax.optim.gauss_newton import GaussNewtonState, gauss_newton
from mixer_jax.optim.graft import GraftState, graft
from mixer_jax.optim.hessian_free import HessianFreeState, hessian_free
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
from mixer_jax.optim.quadratic import ByModelState, by_quadratic_model
from mixer_jax.optim.quasi_newton import QuasiNewtonState, lbfgs, ssbroyden
from mixer_jax.optim.soap import scale_by_shampoo, scale_by_soap, shampoo, soap

__all__ = (
  # curvature
  "Block",
  "Curvature",
  "Decomposition",
  "Diagonal",
  "Diagonals",
  "Kronecker",
  "Likelihood",
  "Residuals",
  "Tagged",
  "path_name",
  "per_example_grads",
  # with curvature
  "by_quadratic_model",
  "constrain_norm",
  "ekfac",
  "gauss_newton",
  "hessian_free",
  "kfac",
  "kfac_adam",
  "kfac_muon",
  "levenberg_marquardt",
  "scale_by_ekfac",
  "scale_by_kfac",
  "scale_by_kfac_adam",
  "scale_by_kfac_muon",
  # with gradients alone
  "adagrad",
  "adam",
  "adamw",
  "lamb",
  "lbfgs",
  "muon",
  "scale_by_shampoo",
  "scale_by_soap",
  "sgd",
  "shampoo",
  "soap",
  "ssbroyden",
  # of two optimizers; axes of matrices
  "Axes",
  "Matrices",
  "graft",
  "in_turn",
  "matrix_axes",
  # states
  "ByModelState",
  "GaussNewtonState",
  "GraftState",
  "HessianFreeState",
  "InBasisState",
  "InTurnState",
  "LevenbergMarquardtState",
  "QuasiNewtonState",
  "ScaleByKfacState",
)
