"""K-FAC as a complete optimizer: `scale_by_kfac` with decay, momentum and a learning rate."""

import functools
import inspect
from typing import Annotated, Any, Callable

import optax

from mixer_jax import options as options_lib
from mixer_jax.optim import curvature_options, first_order, quadratic
from mixer_jax.optim.preconditioner import Schedule, scale_by_kfac
from mixer_jax.options import COUNT, Option

_DECAY_FROM = Option("first update that decays; None: 20 factor periods", 0, COUNT)
_BY_MODEL = "steps to the minimum of the quadratic model, times the learning rate"


@curvature_options.checked(scale_by_kfac, quadratic.levenberg_marquardt)
def kfac(
  learning_rate: float | Schedule,
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  momentum: first_order.Momentum = 0.9,
  weight_decay: Annotated[float, Option("weight decay, after preconditioning", 0)] = 1e-4,
  decay_mask: Any = None,
  decay_from: Annotated[int | None, _DECAY_FROM] = None,
  norm_constraint: curvature_options.NormConstraint = 1e-2,
  factor_period: curvature_options.FactorPeriod = 10,
  quadratic_model: Annotated[bool, Option(_BY_MODEL)] = False,
  factor_damping_period: quadratic.FactorDampingPeriod = None,
  adaptive_damping: Annotated[bool, Option("damping by the Levenberg-Marquardt rule")] = False,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """K-FAC, complete: precondition, clip, decay, momentum, step.

  The order is that of "Analyzing the Effectiveness of K-FAC on Training MLP-Mixers" and of its
  code. Its settings, for 78,000 steps, are a damping of 1e-3, a factor_decay of 0.95 and an
  inverse_period of 100; the defaults forget the identity sooner and hold for hundreds of steps, too.

  Args:
    learning_rate: a number or a schedule of the update count.
    predict: see `scale_by_kfac`, as are all arguments that are not named here but those of
      `quadratic.levenberg_marquardt`.
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes.
    momentum: decay of the momentum buffer (no dampening, no Nesterov).
    weight_decay: a number or a schedule; it times the parameters is added to the preconditioned
      gradient.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    decay_from: the first update that decays; None is 20 factor periods, as in
      the published code, which lets the curvature settle first.
    quadratic_model: each update is the minimum of the exact quadratic model along the
      preconditioned gradient and the update before (Martens and Grosse, Section 7), times the
      learning rate, which should be 1. `momentum` and `norm_constraint` are left at their defaults;
      weight decay is part of the objective. The loss must be that of `likelihood`.
    factor_damping_period: of a quadratic model with factored damping, see `quadratic.by_model`.
    adaptive_damping: see `quadratic.levenberg_marquardt`; the update then needs the extra
      argument `value_fn`, a function from parameters to the loss.

  Returns:
    A transform whose `update` needs the parameters and the extra arguments of `scale_by_kfac`.

  Raises:
    ValueError: as of `scale_by_kfac`, or options that do not go together.
  """
  decay_from = 20 * factor_period if decay_from is None else decay_from
  given_decay = weight_decay if callable(weight_decay) else lambda count: weight_decay
  decay = lambda count: given_decay(count) * (count >= decay_from)
  decays = not (isinstance(weight_decay, int | float) and weight_decay == 0)
  defaults = {k: p.default for k, p in inspect.signature(kfac).parameters.items()}
  named = dict(momentum=momentum, norm_constraint=norm_constraint)
  given = defaults | options | named | dict(factor_damping_period=factor_damping_period)
  rule = {k: options.pop(k) for k in options_lib.of(quadratic.levenberg_marquardt) if k in options}
  curvature_options.check_model(
    given, defaults, rule, quadratic_model=quadratic_model, adapts=adaptive_damping, decays=decays
  )
  # The model chooses the length of a step itself.
  options |= dict(norm_constraint=None if quadratic_model else norm_constraint)
  options |= dict(factor_period=factor_period, learning_rate=learning_rate)
  first = scale_by_kfac(predict, params, batch, **options)
  model = functools.partial(quadratic.Model, predict, given["likelihood"], given["axis_name"])
  if quadratic_model:
    model = functools.partial(model, decay, decay_mask)
    tx = quadratic.by_model(first, model(), given["damping"], learning_rate, factor_damping_period)
  else:
    tx = optax.chain(
      first,
      first_order.add_decayed_weights(decay, decay_mask) if decays else optax.identity(),
      optax.trace(momentum),
      optax.scale_by_learning_rate(learning_rate),
    )
  if adaptive_damping:
    return quadratic.levenberg_marquardt(tx, model(), given["damping"], **rule)
  return tx
