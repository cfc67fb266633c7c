"""K-FAC and EK-FAC as complete optimizers: preconditioners with decay, momentum and a rate."""

from __future__ import annotations  # `help` shows names, not what they stand for

from typing import Any

import optax

from mixer_jax.optim import first_order
from mixer_jax.optim.curvature.curvature import Curvature
from mixer_jax.optim.preconditioner import Schedule, constrain_norm, scale_by_ekfac, scale_by_kfac


def kfac(
  learning_rate: optax.ScalarOrSchedule,
  curvature: Curvature,
  *,
  damping: optax.ScalarOrSchedule = 1e-2,
  damping_type: str = "exact",
  momentum: float = 0.9,
  weight_decay: optax.ScalarOrSchedule = 1e-4,
  decay_mask: Any = None,
  norm_constraint: float | None = 1e-2,
  factor_decay: float = 0.8,
  factor_period: int = 10,
  inverse_period: int = 20,
  factor_fraction: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Preconditions by K-FAC's curvature, with norm constraint, weight decay, momentum and rate.

  The order of these parts is that of "Analyzing the Effectiveness of K-FAC on Training MLP-Mixers"
  and of its code. Its settings, for 78,000 steps, are a damping of 1e-3, a factor_decay of 0.95 and
  an inverse_period of 100; the defaults forget the identity sooner and suit hundreds of steps, too.

  The update needs the extra arguments `batch`, which the curvature's function gets, and `rng`, a
  key for the sampled targets.

  Args:
    learning_rate: a number, or a schedule of the update count.
    curvature: the `Curvature` of the model.
    damping: number added to the curvature, in the units of loss / parameter^2, or a schedule.
    damping_type: "exact" adds it to the eigenvalues of A (x) G; "factored" splits it between both
      factors, see `scale_by_kfac`.
    momentum: decay of the momentum buffer (no dampening, no Nesterov).
    weight_decay: times the parameters it is added to the preconditioned gradient. A number acts
      from update 20 factor_period on, as in the published code, which lets the curvature settle
      first; a schedule acts from the start.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    norm_constraint: limit of the step's squared length, see `constrain_norm`; None: no limit.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    inverse_period: updates between renewals of the inverses.
    factor_fraction: share 1/n of the batch that factors are estimated from; None: all of it.

  Returns:
    A transform whose update needs parameters, `batch` and `rng`.

  Raises:
    ValueError: damping_type is unknown; in the update, `batch` or parameters are missing.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.kfac(0.1, curvature, damping=1e-3)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params, batch=batch, rng=key)
    ```
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
  learning_rate: optax.ScalarOrSchedule,
  curvature: Curvature,
  *,
  damping: optax.ScalarOrSchedule = 1e-2,
  moments: str = "batch",
  moment_decay: float = 0.95,
  momentum: float = 0.9,
  weight_decay: optax.ScalarOrSchedule = 1e-4,
  decay_mask: Any = None,
  norm_constraint: float | None = 1e-2,
  factor_decay: float = 0.8,
  factor_period: int = 10,
  inverse_period: int = 20,
) -> optax.GradientTransformationExtraArgs:
  """Preconditions as K-FAC does, with second moments in the place of its eigenvalues (EK-FAC).

  George et al., 2018, https://arxiv.org/abs/1806.03884. Norm constraint, weight decay, momentum
  and rate are those of `kfac`.

  Args:
    learning_rate: a number, or a schedule of the update count.
    curvature: the `Curvature` of the model.
    damping: number added to the second moments, or a schedule.
    moments: "batch": second moments of every update's gradient; "examples": those of single
      examples, when factors are renewed.
    moment_decay: decay of the second moments' averages.
    momentum: decay of the momentum buffer.
    weight_decay: as in `kfac`.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    norm_constraint: limit of the step's squared length, see `constrain_norm`; None: no limit.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    inverse_period: updates between renewals of the eigenbasis.

  Returns:
    A transform whose update needs parameters, `batch` and `rng`.

  Raises:
    ValueError: as `scale_by_ekfac`.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.ekfac(0.1, curvature)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params, batch=batch, rng=key)
    ```
  """
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
  learning_rate: optax.ScalarOrSchedule,
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
