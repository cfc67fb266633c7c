"""K-FAC and EK-FAC as complete optimizers: preconditioners with decay, momentum and a rate."""

from __future__ import annotations  # `help` shows names, not what they stand for

from typing import Any

import optax

from mixer_jax.optim import first_order
from mixer_jax.optim.curvature.curvature import Curvature
from mixer_jax.optim.preconditioner import Schedule, constrain_norm, scale_by_ekfac, scale_by_kfac


def kfac(
  learning_rate: float | Schedule,
  curvature: Curvature,
  *,
  damping: float | Schedule = 1e-2,
  damping_type: str = "exact",
  momentum: float = 0.9,
  weight_decay: float | Schedule = 1e-4,
  decay_mask: Any = None,
  norm_constraint: float | None = 1e-2,
  factor_decay: float = 0.8,
  factor_period: int = 10,
  inverse_period: int = 20,
  factor_fraction: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """K-FAC, complete: precondition, clip, decay, momentum, step.

  The update needs `batch` and `rng`: `tx.update(grads, state, params, batch=batch, rng=key)`. The
  order is that of "Analyzing the Effectiveness of K-FAC on Training MLP-Mixers" and of its code.
  Its settings, for 78,000 steps, are a damping of 1e-3, a factor_decay of 0.95 and an inverse_period
  of 100; the defaults forget the identity sooner and hold for hundreds of steps, too.

  Args:
    learning_rate: a number or a schedule of the update count.
    curvature: of the model, see `Curvature`.
    damping: see `scale_by_kfac`, as are damping_type, factor_decay, factor_period,
      inverse_period and factor_fraction.
    momentum: decay of the momentum buffer (no dampening, no Nesterov).
    weight_decay: times the parameters it is added to the preconditioned gradient; a number from
      update 20 factor_period on, as in the published code, which lets the curvature settle
      first; or a schedule.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    norm_constraint: see `constrain_norm`; None: no constraint.
  """
  first = scale_by_kfac(
    curvature,
    damping=damping,
    damping_type=damping_type,
    factor_decay=factor_decay,
    factor_period=factor_period,
    inverse_period=inverse_period,
    factor_fraction=factor_fraction,
  )
  decay = weight_decay if callable(weight_decay) else settled(weight_decay, 20 * factor_period)
  return complete(first, learning_rate, curvature, momentum, decay, decay_mask, norm_constraint)


def ekfac(
  learning_rate: float | Schedule,
  curvature: Curvature,
  *,
  damping: float | Schedule = 1e-2,
  moments: str = "batch",
  moment_decay: float = 0.95,
  momentum: float = 0.9,
  weight_decay: float | Schedule = 1e-4,
  decay_mask: Any = None,
  norm_constraint: float | None = 1e-2,
  factor_decay: float = 0.8,
  factor_period: int = 10,
  inverse_period: int = 20,
) -> optax.GradientTransformationExtraArgs:
  """EK-FAC, complete; the arguments are those of `scale_by_ekfac` and `kfac`."""
  first = scale_by_ekfac(
    curvature,
    damping=damping,
    moments=moments,
    moment_decay=moment_decay,
    factor_decay=factor_decay,
    factor_period=factor_period,
    inverse_period=inverse_period,
  )
  decay = weight_decay if callable(weight_decay) else settled(weight_decay, 20 * factor_period)
  return complete(first, learning_rate, curvature, momentum, decay, decay_mask, norm_constraint)


def settled(weight_decay: Any, start: Any) -> Schedule:
  """A weight decay that begins with update `start`."""
  return lambda count: weight_decay * (count >= start)


def complete(
  first: optax.GradientTransformationExtraArgs,
  learning_rate: Any,
  curvature: Curvature,
  momentum: Any,
  decay: Schedule,
  decay_mask: Any,
  norm_constraint: Any,
) -> optax.GradientTransformationExtraArgs:
  """A preconditioner with norm constraint, decay, momentum and learning rate."""
  if norm_constraint is not None:
    first = constrain_norm(first, curvature, norm_constraint, learning_rate)
  return optax.chain(
    first,
    first_order.add_decayed_weights(decay, decay_mask),
    first_order.in_float32(optax.trace(momentum)),
    first_order.scale_by_rate(learning_rate),
  )
