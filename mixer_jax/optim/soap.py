"""SOAP and Shampoo: optimizers in the eigenbasis of factors V V^T, V^T V of the gradient.

  SOAP     Adam in their basis (Vyas et al., 2024, https://arxiv.org/abs/2409.11321, Algorithm 3)
  Shampoo  L^-p V R^-p with p = 1/4 (Gupta et al., 2018, https://arxiv.org/abs/1802.09568), or each
           element divided by the root of its second moment in the basis (Eschenhagen et al., 2025,
           https://arxiv.org/abs/2506.03595), which takes the place of grafting

Parameters without a basis (biases, norms) take Adam, under `scale_by_shampoo` Adam without
momentum; `shampoo` averages these steps, too.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import first_order
from mixer_jax.optim.algebra import Decomposition
from mixer_jax.optim.eigenbasis import gradient_source, in_basis
from mixer_jax.optim.matrices import Matrices

MAX_FACTOR = 8192
# Shampoo renews a basis early if the squares of the gradient have grown by more than this since it was
# made: with the old eigenvalues a step would be more than twice too long.
_GROWTH = 4.0


def scale_by_soap(
  *,
  b1: float = 0.95,
  b2: float = 0.95,
  eps: float = 1e-8,
  max_factor: int | None = MAX_FACTOR,
  matrices: Matrices | None = None,
  factor_decay: float = 0.95,
  factor_period: int = 1,
  basis_period: int = 10,
  decomposition: Decomposition = Decomposition("qr"),
) -> optax.GradientTransformationExtraArgs:
  """Adam in the eigenbasis of Shampoo's factors (SOAP).

  Vyas et al., 2024, https://arxiv.org/abs/2409.11321, Algorithm 3; the defaults are the authors'
  but for max_factor. The first update is zero and makes the first basis. Every later update is made
  in the basis of the gradients before it, as in the authors' code. Parameters without a basis
  (biases, norms) take Adam.

  Args:
    b1: decay of the first moments.
    b2: decay of the second moments.
    eps: number added to the root of the second moments.
    max_factor: a side of more rows keeps its coordinates; None: no limit.
    matrices: which axes are inputs, outputs and layers of stacks, see `matrix_axes`; None: guessed
      from names and shapes, see `Matrices`.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    basis_period: updates between renewals of the basis.
    decomposition: how bases are renewed.

  Returns:
    A transform with an `InBasisState`.

  Example:
    ```python
    import jax.numpy as jnp
    import optax
    from mixer_jax import optim

    params, grads = {"w": jnp.ones((2, 3))}, {"w": jnp.full((2, 3), 0.1)}
    tx = optax.chain(optim.scale_by_soap(), optax.scale(-1e-3))
    updates, state = tx.update(grads, tx.init(params), params)  # zero: it makes the first basis
    ```
  """
  rule = optax.scale_by_adam(b1, b2, eps)
  source = gradient_source(max_factor, matrices)
  return in_basis(rule, rule, source, factor_decay, factor_period, basis_period, decomposition)


def soap(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.95,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: optax.ScalarOrSchedule = 1e-2,
  decay_mask: Any = None,
  max_factor: int | None = MAX_FACTOR,
  matrices: Matrices | None = None,
  factor_decay: float = 0.95,
  factor_period: int = 1,
  basis_period: int = 10,
  decomposition: Decomposition = Decomposition("qr"),
) -> optax.GradientTransformationExtraArgs:
  """SOAP with decoupled weight decay: Adam in the eigenbasis of Shampoo's factors.

  Vyas et al., 2024, https://arxiv.org/abs/2409.11321, Algorithm 3. The first update is zero: there
  is no decay in it either, as in the code of SOAP's authors.

  Args:
    learning_rate: a number, or a schedule of the update count.
    b1: decay of the first moments.
    b2: decay of the second moments.
    eps: number added to the root of the second moments.
    weight_decay: decoupled, a number or a schedule.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    max_factor: a side of more rows keeps its coordinates; None: no limit.
    matrices: which axes are inputs, outputs and layers of stacks, see `matrix_axes`; None: guessed
      from names and shapes, see `Matrices`.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    basis_period: updates between renewals of the basis.
    decomposition: how bases are renewed.

  Returns:
    A transform whose update needs parameters.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"w": jnp.ones((2, 3))}, {"w": jnp.full((2, 3), 0.1)}
    tx = optim.soap(3e-3)
    updates, state = tx.update(grads, tx.init(params), params)  # zero: it makes the first basis
    ```
  """
  rule = scale_by_soap(
    b1=b1,
    b2=b2,
    eps=eps,
    max_factor=max_factor,
    matrices=matrices,
    factor_decay=factor_decay,
    factor_period=factor_period,
    basis_period=basis_period,
    decomposition=decomposition,
  )
  return from_second(rule, learning_rate, weight_decay, decay_mask)


def from_second(
  rule: optax.GradientTransformation, learning_rate: Any, weight_decay: Any, decay_mask: Any
) -> optax.GradientTransformationExtraArgs:
  """A rule whose first update is zero, with decay and a learning rate from the second on."""
  tx = first_order.with_decoupled_decay(rule, learning_rate, weight_decay, decay_mask)
  return _from_second(tx, lambda state: state[0].count)


def _from_second(
  tx: optax.GradientTransformation, count: Callable[[Any], jax.Array]
) -> optax.GradientTransformationExtraArgs:
  """Makes an optimizer's first update zero; `count(state)` is the number of its updates so far."""
  tx = optax.with_extra_args_support(tx)

  def update_fn(updates, state, params=None, **extra):
    first = count(state) == 0
    updates, state = tx.update(updates, state, params, **extra)
    return jax.tree.map(lambda u: jnp.where(first, jnp.zeros_like(u), u), updates), state

  return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def scale_by_shampoo(
  *,
  b2: float = 0.95,
  eps: float = 1e-8,
  power: float = 0.25,
  ridge: float = 1e-6,
  corrected: bool = False,
  max_factor: int | None = MAX_FACTOR,
  matrices: Matrices | None = None,
  factor_decay: float = 0.95,
  factor_period: int = 1,
  basis_period: int = 10,
  decomposition: Decomposition = Decomposition(),
) -> optax.GradientTransformationExtraArgs:
  """Shampoo with moving averages of its factors: L^-p V R^-p.

  Gupta et al., 2018, https://arxiv.org/abs/1802.09568; corrected as by Eschenhagen et al., 2025,
  https://arxiv.org/abs/2506.03595. The first update is zero and makes the first basis. Parameters
  without a basis (biases, norms) take Adam without momentum.

  Args:
    b2: decay of second moments, of parameters without a basis and, if corrected, of all.
    eps: number added to the roots of second moments.
    power: p of L^-p V R^-p; not used if corrected.
    ridge: this share of a factor's largest eigenvalue is added to all of them; not used if
      corrected.
    corrected: whether steps are divided by roots of second moments in the eigenbasis. Otherwise
      bases are also renewed when the squares of gradients have grown fourfold.
    max_factor: a side of more rows keeps its coordinates; None: no limit.
    matrices: which axes are inputs, outputs and layers of stacks, see `matrix_axes`; None: guessed
      from names and shapes, see `Matrices`.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    basis_period: updates between renewals of the basis.
    decomposition: how bases are renewed.

  Returns:
    A transform with an `InBasisState`.

  Example:
    ```python
    import jax.numpy as jnp
    import optax
    from mixer_jax import optim

    params, grads = {"w": jnp.ones((2, 3))}, {"w": jnp.full((2, 3), 0.1)}
    tx = optax.chain(optim.scale_by_shampoo(corrected=True), optax.scale(-1e-3))
    updates, state = tx.update(grads, tx.init(params), params)  # zero: it makes the first basis
    ```
  """
  rms = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)
  inner = rms if corrected else _by_eigenvalues(power, ridge)
  source = gradient_source(max_factor, matrices, None if corrected else _GROWTH)
  return in_basis(inner, rms, source, factor_decay, factor_period, basis_period, decomposition)


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


def shampoo(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b2: float = 0.95,
  eps: float = 1e-8,
  corrected: bool = False,
  momentum: float = 0.9,
  weight_decay: optax.ScalarOrSchedule = 1e-4,
  decay_mask: Any = None,
  max_factor: int | None = MAX_FACTOR,
  matrices: Matrices | None = None,
  factor_decay: float = 0.95,
  basis_period: int = 10,
  decomposition: Decomposition = Decomposition(),
) -> optax.GradientTransformationExtraArgs:
  """Shampoo with an average of its steps as momentum, and decoupled weight decay.

  Gupta et al., 2018, https://arxiv.org/abs/1802.09568; corrected as by Eschenhagen et al., 2025,
  https://arxiv.org/abs/2506.03595. Its steps have other lengths than Adam's: graft it,
  `graft(adam(...), shampoo(...))`, or take corrected=True. The first update is zero.

  Args:
    learning_rate: a number, or a schedule of the update count.
    b2: decay of second moments, of parameters without a basis and, if corrected, of all.
    eps: number added to the roots of second moments.
    corrected: whether steps are divided by roots of second moments in the eigenbasis.
    momentum: decay of the average of steps.
    weight_decay: decoupled, a number or a schedule.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    max_factor: a side of more rows keeps its coordinates; None: no limit.
    matrices: which axes are inputs, outputs and layers of stacks, see `matrix_axes`; None: guessed
      from names and shapes, see `Matrices`.
    factor_decay: decay of the factors' moving averages, per renewal.
    basis_period: updates between renewals of the basis.
    decomposition: how bases are renewed.

  Returns:
    A transform whose update needs parameters.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"w": jnp.ones((2, 3))}, {"w": jnp.full((2, 3), 0.1)}
    tx = optim.shampoo(3e-3, corrected=True)
    updates, state = tx.update(grads, tx.init(params), params)  # zero: it makes the first basis
    ```
  """
  rule = scale_by_shampoo(
    b2=b2,
    eps=eps,
    corrected=corrected,
    max_factor=max_factor,
    matrices=matrices,
    factor_decay=factor_decay,
    basis_period=basis_period,
    decomposition=decomposition,
  )
  return with_averaged_steps(rule, learning_rate, momentum, weight_decay, decay_mask)


def with_averaged_steps(
  rule: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule,
  momentum: Any,
  weight_decay: optax.ScalarOrSchedule,
  decay_mask: Any,
) -> optax.GradientTransformationExtraArgs:
  """A rule whose first update is zero, with an average of the others, decay and a learning rate."""
  rule = optax.chain(rule, _average_from_second(momentum))
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
