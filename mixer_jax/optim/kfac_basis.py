"""Adam and Muon in the eigenbasis of K-FAC's factors.

Both take the layers of a `Curvature`: kernel and bias are one matrix [d_in + 1, d_out]. All other
parameters take Adam.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

import re
from typing import Any

import optax

from mixer_jax.optim import axes, first_order, polar
from mixer_jax.optim.algebra import Decomposition
from mixer_jax.optim.curvature.curvature import Curvature
from mixer_jax.optim.eigenbasis import Source, in_basis
from mixer_jax.optim.trees import check_names, whole_tree


def scale_by_kfac_adam(
  curvature: Curvature,
  *,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  factor_decay: float = 0.8,
  factor_period: int = 10,
  basis_period: int = 20,
  factor_fraction: float | None = None,
  decomposition: Decomposition = Decomposition(),
) -> optax.GradientTransformationExtraArgs:
  """Adam in the eigenbasis of K-FAC's factors.

  A layer's gradient [d_in + 1, d_out], of kernel and bias, is turned into the basis, Adam makes its
  step there element by element, and the step is turned back. Parameters without a layer take Adam
  as they are. The extra arguments of the update are those of `scale_by_kfac`.

  Args:
    curvature: the `Curvature` of the model, with at least one layer.
    b1: decay of the first moments.
    b2: decay of the second moments.
    eps: number added to the root of the second moments.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    basis_period: updates between renewals of the basis.
    factor_fraction: share 1/n of the batch that factors are estimated from; None: all of it.
    decomposition: how bases are renewed.

  Returns:
    A transform with an `InBasisState`.

  Raises:
    ValueError: the curvature has no layer; in the update, `batch` or parameters are missing.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.scale_by_kfac_adam(curvature)
    updates, state = tx.update(grads, tx.init(params), params, batch=batch, rng=key)
    ```
  """
  rule = optax.scale_by_adam(b1, b2, eps)
  source = _source(curvature, factor_fraction)
  return in_basis(
    rule, rule, source, factor_decay, factor_period, basis_period, _on(curvature, decomposition)
  )


def kfac_adam(
  learning_rate: optax.ScalarOrSchedule,
  curvature: Curvature,
  *,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: optax.ScalarOrSchedule = 1e-4,
  decay_mask: Any = None,
  factor_decay: float = 0.8,
  factor_period: int = 10,
  basis_period: int = 20,
  factor_fraction: float | None = None,
  decomposition: Decomposition = Decomposition(),
) -> optax.GradientTransformationExtraArgs:
  """Adam in the eigenbasis of K-FAC's factors, with decoupled weight decay and a learning rate.

  Args:
    learning_rate: a number, or a schedule of the update count.
    curvature: the `Curvature` of the model, with at least one layer.
    b1: decay of the first moments.
    b2: decay of the second moments.
    eps: number added to the root of the second moments.
    weight_decay: decoupled, a number or a schedule.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    basis_period: updates between renewals of the basis.
    factor_fraction: share 1/n of the batch that factors are estimated from; None: all of it.
    decomposition: how bases are renewed.

  Returns:
    A transform whose update needs parameters, `batch` and `rng`.

  Raises:
    ValueError: the curvature has no layer; in the update, `batch` or parameters are missing.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.kfac_adam(1e-2, curvature)
    updates, state = tx.update(grads, tx.init(params), params, batch=batch, rng=key)
    ```
  """
  rule = scale_by_kfac_adam(
    curvature,
    b1=b1,
    b2=b2,
    eps=eps,
    factor_decay=factor_decay,
    factor_period=factor_period,
    basis_period=basis_period,
    factor_fraction=factor_fraction,
    decomposition=decomposition,
  )
  return first_order.decoupled(rule, learning_rate, weight_decay, decay_mask)


def scale_by_kfac_muon(
  curvature: Curvature,
  *,
  momentum: float = 0.9,
  ridge: float = 1.0,
  rms: float = 0.2,
  newton_schulz: int = 3,
  normuon: bool = False,
  adam_paths: str = first_order.NOT_BY_MUON,
  others: optax.GradientTransformation | None = None,
  factor_decay: float = 0.8,
  factor_period: int = 10,
  basis_period: int = 20,
  factor_fraction: float | None = None,
  decomposition: Decomposition = Decomposition(),
) -> optax.GradientTransformationExtraArgs:
  """Muon in K-FAC's metric: its steps are orthogonal where K-FAC's curvature is the identity.

  Of all steps U with a spectral norm of A^(1/2) U G^(1/2) of at most 1, that along which a loss
  with the gradient M falls most is

      U = A^(-1/2) polar(A^(-1/2) M G^(-1/2)) G^(-1/2),

  with polar(X) = X (X^T X)^(-1/2). Zhang et al. (2026, https://arxiv.org/abs/2603.09697) take
  factors of the gradient; A and G are K-FAC's here, of mean eigenvalue 1, `ridge` added. M is the
  momentum, and U is scaled to the root mean square `rms`. A factor of zeros, as behind a head that
  starts at zero, counts as the identity. With a large `ridge` (1e6) and `newton_schulz=5` this is
  Muon. The extra arguments of the update are those of `scale_by_kfac`.

  Args:
    curvature: the `Curvature` of the model, with at least one layer.
    momentum: decay of the momentum, which is Nesterov's.
    ridge: number added to the eigenvalues of a factor, whose mean is 1.
    rms: root mean square of the update of a kernel with its bias, at a rate of 1.
    newton_schulz: steps of the iteration to the polar factor.
    normuon: whether each output direction of U, in the basis, is divided by its running root mean
      square, as each neuron's is in NorMuon (Li et al., 2025, https://arxiv.org/abs/2510.05491).
    adam_paths: a regular expression of layers that take `others`, "" for none; by default of paths
      with a part `head` or `embedding`. A head of another name takes Muon's steps.
    others: transform of parameters without a basis; None: Nesterov's Adam.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    basis_period: updates between renewals of the basis.
    factor_fraction: share 1/n of the batch that factors are estimated from; None: all of it.
    decomposition: how bases are renewed.

  Returns:
    A transform with an `InBasisState`.

  Raises:
    ValueError: no layer is left for the basis; in the update, `batch` or parameters are missing.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.scale_by_kfac_muon(curvature, ridge=0.1)
    updates, state = tx.update(grads, tx.init(params), params, batch=batch, rng=key)
    ```
  """
  rule = polar.orthogonal(momentum, ridge, rms, newton_schulz, normuon)
  others = optax.scale_by_adam(0.9, 0.999, 1e-8, nesterov=True) if others is None else others
  source = _source(curvature, factor_fraction, adam_paths)
  return in_basis(
    rule, others, source, factor_decay, factor_period, basis_period, _on(curvature, decomposition)
  )


def kfac_muon(
  learning_rate: optax.ScalarOrSchedule,
  curvature: Curvature,
  *,
  momentum: float = 0.9,
  ridge: float = 1.0,
  rms: float = 0.2,
  normuon: bool = False,
  adam_paths: str = first_order.NOT_BY_MUON,
  weight_decay: optax.ScalarOrSchedule = 1e-2,
  decay_mask: Any = None,
  factor_decay: float = 0.8,
  factor_period: int = 10,
  basis_period: int = 20,
  factor_fraction: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Muon in K-FAC's metric, with decoupled weight decay and a learning rate.

  The step is that of `scale_by_kfac_muon`; parameters without a layer take Nesterov's Adam.

  Args:
    learning_rate: a number, or a schedule of the update count.
    curvature: the `Curvature` of the model, with at least one layer.
    momentum: decay of the momentum, which is Nesterov's.
    ridge: number added to the eigenvalues of a factor, whose mean is 1.
    rms: root mean square of the update of a kernel with its bias, at a rate of 1.
    normuon: whether each output direction of a step is divided by its running root mean square, see
      `scale_by_kfac_muon`.
    adam_paths: a regular expression of layers that take Adam, "" for none; by default of paths with
      a part `head` or `embedding`.
    weight_decay: decoupled, a number or a schedule.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    basis_period: updates between renewals of the basis.
    factor_fraction: share 1/n of the batch that factors are estimated from; None: all of it.

  Returns:
    A transform whose update needs parameters, `batch` and `rng`.

  Raises:
    ValueError: no layer is left for the basis; in the update, `batch` or parameters are missing.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.kfac_muon(1e-2, curvature)
    updates, state = tx.update(grads, tx.init(params), params, batch=batch, rng=key)
    ```
  """
  rule = scale_by_kfac_muon(
    curvature,
    momentum=momentum,
    ridge=ridge,
    rms=rms,
    normuon=normuon,
    adam_paths=adam_paths,
    factor_decay=factor_decay,
    factor_period=factor_period,
    basis_period=basis_period,
    factor_fraction=factor_fraction,
  )
  return first_order.decoupled(rule, learning_rate, weight_decay, decay_mask)


def _on(curvature: Curvature, how: Decomposition) -> Decomposition:
  return how if how.mesh is not None else how._replace(mesh=curvature.mesh)


def _source(curvature: Curvature, fraction: float | None, adam_paths: str = "") -> Source:
  """Factors of the layers of a curvature, but for those whose paths match."""
  left_out = lambda block: adam_paths and any(re.search(adam_paths, path) for path in block.paths)
  blocks = [b for b in curvature.blocks if b.kind == "kronecker" and not left_out(b)]
  if curvature.names and not blocks:
    raise ValueError(
      f"no parameter is left for K-FAC's basis; take adamw, or see why:\n{curvature}"
    )
  only = [block.name for block in blocks]

  def estimate(blocks, gradients, params, batch, rng):
    del blocks, gradients
    whole, some = whole_tree(params, curvature.names), curvature.some_of(batch, fraction)
    axes.check(curvature.axis_name, batch)
    fresh = lambda whole, some, rng: curvature.estimate(whole, some, rng, only)
    return axes.automatic(fresh, (whole, some))(whole, some, rng)

  check = lambda params: check_names(params, curvature.names)
  return Source(lambda leaves: blocks, estimate, False, check, compare=curvature.compare)
