"""Floating-point operations, counted from sizes.

A product of [m, k] and [k, n] is m k n multiply-adds, the "FLOPs" of the papers'
tables, or 2 m k n operations. Normalisations, activations and the elementwise work of
optimizers are left out: they are bound by memory.
"""

import math
from typing import Any, Callable, NamedTuple, Sequence

import jax
from jax.extend import core

from mixer_jax.optim import Block
from mixer_jax.planning.arithmetic import EIGH


def multiply_adds(function: Callable, *args: Any) -> int:
  """Multiply-adds of the matrix products and convolutions of a function.

  Args:
    function: traceable by JAX; nothing is computed.
    *args: its arguments, or their shapes.
  """
  return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: core.Jaxpr) -> int:
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      depth = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
      total += depth * eqn.outvars[0].aval.size
    elif eqn.primitive.name == "conv_general_dilated":
      kernel = eqn.invars[1].aval
      outputs = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
      total += kernel.size // outputs * eqn.outvars[0].aval.size
    repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
      if _is_jaxpr(value):
        total += repeats * _count(getattr(value, "jaxpr", value))
  return total


def _is_jaxpr(value: Any) -> bool:
  return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


class StepCosts(NamedTuple):
  """Operations of the parts of a step."""

  gradient: float  # forward and backward pass
  factors: float  # one renewal of the factors: a pass for sampled targets, its second moments
  inverses: float  # one renewal of the inverses
  preconditioning: float  # the products of one preconditioned gradient

  def ratio(self, factor_period: int, inverse_period: int) -> float:
    """A K-FAC step over an SGD step, averaged over the periods."""
    extra = self.factors / factor_period + self.inverses / inverse_period + self.preconditioning
    return 1.0 + extra / self.gradient


def step_costs(blocks: Sequence[Block], batch_size: int) -> StepCosts:
  """Counts the operations of a model's steps, exact damping.

  Args:
    blocks: of a `Curvature`.
    batch_size: examples a step.
  """
  gradient = factors = inverses = preconditioning = 0.0
  for block in blocks:
    if block.kind != "kronecker":
      continue
    d_in, d_out = block.factor_sizes
    count = math.prod(block.stacked)
    rows = count * batch_size * block.tokens
    gradient += 6.0 * rows * d_in * d_out
    factors += 6.0 * rows * d_in * d_out + 2.0 * rows * (d_in**2 + d_out**2)
    inverses += count * EIGH * (d_in**3 + d_out**3)
    preconditioning += count * 4.0 * d_in * d_out * (d_in + d_out)
  return StepCosts(gradient, factors, inverses, preconditioning)
