"""Floating-point operations of training steps, from the sizes of dense layers.

A product of [m, k] and [k, n] counts 2 m k n. Normalisations, activations and the
optimizers' elementwise work are left out: they are bound by memory.
"""

from typing import NamedTuple, Sequence

from mixer_jax.optim.blocks import Block

# Operations of a symmetric eigendecomposition over n^3: reduction to tridiagonal
# form 4/3, its eigenproblem and the back-transformation of the vectors about 4
# each (Golub and Van Loan, Section 8.3).
EIGH = 9.0


class StepCosts(NamedTuple):
  """Operations of the parts of a step.

  Attributes:
    gradient: forward and backward pass.
    factors: one renewal of the factors: a pass for sampled targets, its second
      moments.
    inverses: one renewal of the inverses.
    preconditioning: the products of one preconditioned gradient.
  """

  gradient: float
  factors: float
  inverses: float
  preconditioning: float

  def ratio(self, factor_period: int, inverse_period: int) -> float:
    """A K-FAC step over an SGD step, averaged over the periods."""
    extra = self.factors / factor_period + self.inverses / inverse_period + self.preconditioning
    return 1.0 + extra / self.gradient


def step_costs(blocks: Sequence[Block], batch_size: int) -> StepCosts:
  """Counts the operations of a model's steps, exact damping.

  Args:
    blocks: of `optim.kfac_blocks`, one per dense layer.
    batch_size: examples a step.
  """
  gradient = factors = inverses = preconditioning = 0.0
  for block in blocks:
    if block.kind != "kronecker":
      continue
    d_in, d_out = block.factor_sizes
    rows = batch_size * block.tokens
    gradient += 6.0 * rows * d_in * d_out
    factors += 6.0 * rows * d_in * d_out + 2.0 * rows * (d_in**2 + d_out**2)
    inverses += EIGH * (d_in**3 + d_out**3)
    preconditioning += 4.0 * d_in * d_out * (d_in + d_out)
  return StepCosts(gradient, factors, inverses, preconditioning)
