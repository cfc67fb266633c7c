"""Damping adapted to how well the quadratic model predicts the change of the loss.

Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671, Section 6.5; the model q(d) of the objective
h is that of `quadratic`, without damping.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim.curvature.curvature import Curvature, tangent
from mixer_jax.optim.quadratic import at, decayed_part, slopes
from mixer_jax.optim.trees import wide_type

# Reduction ratios below and above which damping grows and shrinks.
_LOW, _HIGH = 0.25, 0.75


class LevenbergMarquardtState(NamedTuple):
  """State of `levenberg_marquardt`.

  Attributes:
    count: number of updates so far, an int32 scalar.
    inner: state of the optimizer.
    damping: damping of the next update, a scalar.
    ratio: last reduction ratio, the loss's change over the model's; 1 before the first.
  """

  count: jax.Array
  inner: Any
  damping: jax.Array
  ratio: jax.Array


def levenberg_marquardt(
  tx: optax.GradientTransformationExtraArgs,
  curvature: Curvature,
  damping: float = 1e-2,
  *,
  weight_decay: optax.ScalarOrSchedule = 0.0,
  decay_mask: Any = None,
  damping_period: int = 5,
  damping_decay: float = 0.95,
  min_damping: float = 1e-8,
  max_damping: float = 1e8,
  max_increase: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Adapts the damping of an optimizer to how well the quadratic model predicts the loss.

  Every `damping_period` updates the damping is multiplied by w = damping_decay^damping_period if
  the reduction ratio is above 3/4, and divided by w if it is below 1/4 or if the model expects no
  reduction (Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671, Section 6.5). The model is
  taken without damping there.

  The update needs the extra argument `value_fn`, which maps parameters to the loss on the same
  batch; `value`, the loss before the step, saves an evaluation.

  Args:
    tx: an optimizer whose update takes the extra argument `damping`.
    curvature: the `Curvature` of the model, whose likelihood is that of the loss.
    damping: the first damping, a number.
    weight_decay: decay of the objective, where `tx` is `by_quadratic_model` with this decay.
    decay_mask: as in `by_quadratic_model`.
    damping_period: updates between changes of the damping.
    damping_decay: change of the damping per update, see above.
    min_damping: least damping.
    max_damping: largest damping.
    max_increase: a step after which the loss of its batch is more than this times the loss before
      is not made, and the damping grows. It is for losses without noise, whose damping may become
      so small that a single step ends the training, and costs an evaluation of the loss an update.

  Returns:
    A transform with a `LevenbergMarquardtState`.

  Raises:
    ValueError: the update gets no `value_fn`.

  Example:
    After the example of `Curvature`:

    ```python
    model = optim.by_quadratic_model(optim.scale_by_kfac(curvature), curvature)
    tx = optim.levenberg_marquardt(model, curvature, damping=0.1)
    told = dict(batch=batch, rng=key, value=value, value_fn=loss)
    updates, state = tx.update(grads, tx.init(params), params, **told)
    ```
  """
  rule = damping_period, damping_decay, min_damping, max_damping, max_increase
  own = _Adapted(tx, curvature, damping, weight_decay, decay_mask, *rule)
  return optax.GradientTransformationExtraArgs(own.init, own.update)


class _Adapted(NamedTuple):
  """The transform; its fields are the arguments of `levenberg_marquardt`."""

  tx: optax.GradientTransformationExtraArgs
  curvature: Curvature
  damping: Any
  weight_decay: Any
  decay_mask: Any
  period: int
  change: Any
  lowest: Any
  highest: Any
  most: float | None

  def init(self, params: Any) -> LevenbergMarquardtState:
    dtype = wide_type(params)
    first = jnp.array(self.damping, dtype)  # a copy: the state may be donated
    count, ratio = jnp.zeros((), jnp.int32), jnp.ones((), dtype)
    return LevenbergMarquardtState(count, self.tx.init(params), first, ratio)

  def update(self, updates, state, params=None, *, batch=None, value=None, value_fn=None, **extra):
    if not callable(value_fn):
      raise ValueError(
        "adaptive_damping needs the loss as a function of the parameters:"
        " tx.update(grads, state, params, batch=batch, value_fn=lambda params: loss)"
      )
    extra |= dict(batch=batch, damping=state.damping)
    step, inner = self.tx.update(updates, state.inner, params, **extra)
    whole = params if extra.get("model_params") is None else extra["model_params"]

    before = lambda: value_fn(whole) if value is None else value
    after = lambda: value_fn(jax.tree.map(jnp.add, whole, tangent(whole, step)))

    later = None if self.most is None else after()

    def adapted():
      change = (after() if later is None else later) - before()
      exact, predicted = self._predicted(updates, step, params, whole, batch, state.count)
      ratio = jnp.where(predicted < 0, (change + exact) / predicted, -1.0)
      ratio = jnp.nan_to_num(ratio.astype(state.ratio.dtype), nan=-1.0)
      less = jnp.asarray(self.change, state.damping.dtype) ** self.period
      factor = jnp.select([ratio > _HIGH, ratio < _LOW], [less, 1 / less], 1.0)
      lowest, highest = (jnp.asarray(x, state.damping.dtype) for x in (self.lowest, self.highest))
      return jnp.clip(factor * state.damping, lowest, highest), ratio

    count = optax.safe_increment(state.count)
    kept = lambda: (state.damping, state.ratio)
    lam, ratio = jax.lax.cond(count % self.period == 0, adapted, kept)
    if later is not None:
      made = later <= self.most * before()  # false of a loss that is no number
      more = state.damping / jnp.asarray(self.change, state.damping.dtype) ** self.period
      lam = jnp.where(made, lam, jnp.maximum(lam, jnp.minimum(more, self.highest)))
      step = jax.tree.map(lambda d: jnp.where(made, d, jnp.zeros_like(d)), step)
    return step, LevenbergMarquardtState(count, inner, lam, ratio)

  def _predicted(self, gradient, step, params, whole, batch, count):
    """The change of the decay's part of the objective, which is exact, and the model's of all."""
    middle = jax.tree.map(lambda p, d: p + d / 2, decayed_part(params, self.decay_mask), step)
    exact = at(self.weight_decay, count) * slopes(middle, [decayed_part(step, self.decay_mask)])[0]
    curve = self.curvature.quadratic(whole, batch, [step])[0, 0] / 2
    return exact, slopes(gradient, [step])[0] + curve + exact
