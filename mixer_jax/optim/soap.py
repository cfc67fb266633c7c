"""SOAP and Shampoo: optimizers in the eigenbasis of factors V V^T, V^T V of the gradient.

  SOAP     Adam in their basis (Vyas et al., 2024, https://arxiv.org/abs/2409.11321, Algorithm 3)
  Shampoo  L^-p V R^-p with p = 1/4 (Gupta et al., 2018, https://arxiv.org/abs/1802.09568), or each
           element divided by the root of its second moment in the basis (Eschenhagen et al., 2025,
           https://arxiv.org/abs/2506.03595), which takes the place of grafting

Parameters without a basis (biases, norms) take Adam, under `scale_by_shampoo` Adam without
momentum; `shampoo` averages these steps, too.
"""

from typing import Annotated, Any, Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import curvature_options, first_order
from mixer_jax.optim.eigenbasis import gradient_source, in_basis
from mixer_jax.options import Option

# Defaults of `scale_by_shampoo`; corrected=True refuses other values.
_POWER, _RIDGE = 0.25, 1e-6
# Shampoo renews its bases where the squares of a gradient have grown by more since they were made: by
# the old eigenvalues its steps would be more than twice too long.
_GROWTH = 4.0


@curvature_options.checked(in_basis)
def scale_by_soap(
  *,
  b1: first_order.B1 = 0.95,
  b2: first_order.B2 = 0.95,
  eps: first_order.Eps = 1e-8,
  max_factor: curvature_options.MaxFactor = None,
  full_factors: curvature_options.FullFactors = "",
  stacked: Mapping[str, int] | None = None,
  refresh: curvature_options.Refresh = "qr",
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Adam in the eigenbasis of Shampoo's factors; the defaults are the authors' but for max_factor.

  The first update is zero and makes the first basis. A later one is made in the basis of the
  gradients before it, as by the authors. The options are those of `in_basis`. An array of more
  than two axes is a matrix [inputs, outputs]. Its outputs are the last axis; of a kernel they are
  as many last axes as its bias has, or, without a bias in sight, two of a query, key or value of
  Linen's attention. `stacked` says how many leading axes of a parameter, by path, count layers (of
  `nn.scan` or `nn.vmap`), each a matrix of its own. A kernel's bias has no basis, and a side of more
  than max_factor rows has one only in parameters that `full_factors` matches.

  Returns:
    A transform with an `InBasisState`.

  Raises:
    ValueError: an option out of range.
  """
  rule = optax.scale_by_adam(b1, b2, eps)
  source = gradient_source(max_factor, full_factors, stacked)
  return in_basis(rule, rule, source, refresh=refresh, **options)


@curvature_options.checked(scale_by_soap)
def soap(
  learning_rate: Any,
  *,
  weight_decay: first_order.Decay = 1e-2,
  decay_mask: Any = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """SOAP with decoupled weight decay; for the options see `scale_by_soap`.

  The first update is zero: there is no decay in it either, as in the code of SOAP's authors.
  """
  rule = scale_by_soap(**options)
  tx = first_order.with_decoupled_decay(rule, learning_rate, weight_decay, decay_mask)
  return _from_second(tx, lambda state: state[0].count)


def _from_second(
  tx: optax.GradientTransformation, count: Callable[[Any], jax.Array]
) -> optax.GradientTransformationExtraArgs:
  """An optimizer whose first update is zero; `count` gives that of the updates of its state."""
  tx = optax.with_extra_args_support(tx)

  def update_fn(updates, state, params=None, **extra):
    first = count(state) == 0
    updates, state = tx.update(updates, state, params, **extra)
    return jax.tree.map(lambda u: jnp.where(first, jnp.zeros_like(u), u), updates), state

  return optax.GradientTransformationExtraArgs(tx.init, update_fn)


@curvature_options.checked(in_basis)
def scale_by_shampoo(
  *,
  b2: first_order.B2 = 0.95,
  eps: first_order.Eps = 1e-8,
  power: Annotated[float, Option("exponent p of the factors: L^-p V R^-p", 0.01, 1)] = _POWER,
  ridge: Annotated[float, Option("added to a factor, times its largest eigenvalue", 0, 1)] = _RIDGE,
  corrected: Annotated[bool, Option("second moments in the place of eigenvalues")] = False,
  max_factor: curvature_options.MaxFactor = None,
  full_factors: curvature_options.FullFactors = "",
  stacked: Mapping[str, int] | None = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Shampoo, with moving averages of its factors.

  Args:
    b2: decay of second moments, of parameters without a basis and, if corrected, of all.
    eps: added to the roots of second moments.
    power: p of L^-p V R^-p.
    ridge: eigenvalues get this part of the factor's largest one added.
    corrected: divides by roots of second moments in the eigenbasis; `power` and `ridge` are left at
      their defaults. Without it bases are also renewed when the squares of gradients have grown
      fourfold.
    max_factor: a side of more rows has no basis; None is 8,192.
    full_factors: a regular expression of the paths of parameters whose sides all have one.
    stacked: see `scale_by_soap`.
    options: keywords of `in_basis`.

  Returns:
    A transform with an `InBasisState`; its first update is zero, as SOAP's.

  Raises:
    ValueError: an option out of range, or `power` or `ridge` with `corrected`.
  """
  for name, value, default in (("power", power, _POWER), ("ridge", ridge, _RIDGE)):
    if corrected and not isinstance(value, jax.core.Tracer) and value != default:
      raise ValueError(f"{name} is {value}; it needs corrected=False")
  rms = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)
  inner = rms if corrected else _by_eigenvalues(power, ridge)
  growth = None if corrected else _GROWTH
  source = gradient_source(max_factor, full_factors, stacked, growth)
  return in_basis(inner, rms, source, **options)


def _by_eigenvalues(power: float, ridge: float) -> optax.GradientTransformationExtraArgs:
  def root(values):
    shifted = values + ridge * values.max(axis=-1, keepdims=True)
    return jnp.where(shifted > 0, shifted, jnp.inf) ** -power

  def update_fn(updates, state, params=None, *, basis, **extra):
    del params, extra
    roots = {name: [root(side.values) for side in basis[name]] for name in updates}
    scaled = {
      n: x * roots[n][0][..., :, None] * roots[n][1][..., None, :] for n, x in updates.items()
    }
    return scaled, state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


@curvature_options.checked(scale_by_shampoo)
def shampoo(
  learning_rate: Any,
  *,
  momentum: first_order.Momentum = 0.9,
  weight_decay: first_order.Decay = 1e-4,
  decay_mask: Any = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Shampoo with an average of its steps as momentum, and decoupled weight decay.

  For the options see `scale_by_shampoo`. Its steps have other lengths than Adam's: graft it,
  `graft(adam(...), shampoo(...))`, or take corrected=True. The first update is zero.
  """
  rule = optax.chain(scale_by_shampoo(**options), _average_from_second(momentum))
  tx = first_order.with_decoupled_decay(rule, learning_rate, weight_decay, decay_mask)
  return _from_second(tx, lambda state: state[0][0].count)


def _average_from_second(decay: float) -> optax.GradientTransformation:
  """The moving average of all updates but the first, which is zero; weights sum to 1."""
  average = optax.ema(decay, debias=False)

  def update_fn(updates, state, params=None):
    updates, state = average.update(updates, state, params)
    weight = 1 - decay ** jnp.maximum(state.count - 1, 1)
    return jax.tree.map(lambda u: (u / weight).astype(u.dtype), updates), state

  return optax.GradientTransformation(average.init, update_fn)
