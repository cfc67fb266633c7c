"""Adam and Muon in the eigenbasis of K-FAC's factors.

Both are transforms like `scale_by_kfac`, of whose blocks they take those with Kronecker factors:
kernel and bias of a layer are one matrix [d_in + 1, d_out]. All other parameters take Adam.
"""

import re
from typing import Annotated, Any, Callable

import optax

from mixer_jax.optim import axes, curvature_options, first_order, polar
from mixer_jax.optim.block_trees import by_path, check_names, whole_tree
from mixer_jax.optim.eigenbasis import Source, in_basis
from mixer_jax.optim.factors import curvature_of, some_of
from mixer_jax.options import Option

_Plain = Annotated[str, Option("regular expression of parameter paths without a basis")]


@curvature_options.checked(in_basis)
def _in_kfac_basis(
  rule: optax.GradientTransformation,
  others: optax.GradientTransformation,
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  plain: str,
  *,
  factor_decay: curvature_options.FactorDecay = 0.8,
  factor_period: curvature_options.FactorPeriod = 10,
  basis_period: curvature_options.BasisPeriod = 20,
  likelihood: Any = "categorical",
  estimation: curvature_options.Estimation = "sampled",
  max_factor: curvature_options.MaxFactor = None,
  full_factors: curvature_options.FullFactors = "",
  factor_fraction: curvature_options.FactorFraction = None,
  axis_name: Any = None,
  part: Callable[[Any, int], Any] | None = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """A rule for matrices in K-FAC's eigenbasis, and one for the parameters without a basis."""
  curvature_options.check_fraction(factor_fraction)
  curvature = curvature_of(
    predict,
    params,
    batch,
    likelihood=likelihood,
    estimation=estimation,
    token_averaging="expand",  # it acts neither on eigenvectors nor on ratios of eigenvalues
    plain=plain,
    max_factor=max_factor,
    full_factors=full_factors,
    axis_name=axis_name,
  )
  some = lambda batch: some_of(batch, factor_fraction, part)
  return in_basis(
    rule,
    others,
    _curvature_source(curvature, axis_name, some),
    factor_decay=factor_decay,
    factor_period=factor_period,
    basis_period=basis_period,
    **options,
  )


def _curvature_source(curvature: Any, axis_name: Any, reduced: Callable[[Any], Any]) -> Source:
  kronecker = [block for block in curvature.blocks if block.kind == "kronecker"]
  if curvature.names and not kronecker:
    raise ValueError(
      f"no parameter is left for K-FAC's basis; the parameters are {', '.join(curvature.names)}: name"
      " fewer of them as plain or adam_paths, or take adamw"
    )

  def estimate(blocks, gradients, params, batch, rng):
    del blocks, gradients
    whole, some = whole_tree(params, curvature.names), reduced(batch)
    axes.check(axis_name, batch)
    return axes.automatic(curvature.estimate, (whole, some))(whole, some, rng)

  check = lambda params: check_names(params, curvature.names)
  return Source(lambda leaves: kronecker, estimate, False, check)


@curvature_options.checked(_in_kfac_basis)
def scale_by_kfac_adam(
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  b1: first_order.B1 = 0.9,
  b2: first_order.B2 = 0.95,
  eps: first_order.Eps = 1e-8,
  plain: _Plain = "",
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Adam in the eigenbasis of K-FAC's factors.

  The update takes `batch`, `rng` and `model_params` as that of `scale_by_kfac`.

  Args:
    predict: see `scale_by_kfac`, as are all options that are named neither here nor by `in_basis`.
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes.
    b1: decay of the first moments.
    b2: decay of the second moments.
    eps: added to the root of the second moments.
    plain: paths of parameters without a basis, which take Adam as norms and biases alone do.
    options: of `scale_by_kfac` and `in_basis`.

  Returns:
    A transform with an `InBasisState`.

  Raises:
    ValueError: see `scale_by_kfac`; or no parameter is left for the basis.
  """
  rule = optax.scale_by_adam(b1, b2, eps)
  return _in_kfac_basis(rule, rule, predict, params, batch, plain, **options)


@curvature_options.checked(scale_by_kfac_adam)
def kfac_adam(
  learning_rate: Any,
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  weight_decay: first_order.Decay = 1e-4,
  decay_mask: Any = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Adam in K-FAC's eigenbasis with decoupled weight decay; see `scale_by_kfac_adam`."""
  rule = scale_by_kfac_adam(predict, params, batch, **options)
  return first_order.with_decoupled_decay(rule, learning_rate, weight_decay, decay_mask)


@curvature_options.checked(_in_kfac_basis)
def scale_by_kfac_muon(
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  momentum: first_order.Momentum = 0.9,
  nesterov: Annotated[bool, Option("Nesterov's momentum")] = True,
  ridge: polar.Ridge = 1.0,
  rms: first_order.Rms = 0.2,
  newton_schulz: polar.NewtonSchulz = 3,
  b1: first_order.B1 = 0.9,
  b2: first_order.B2 = 0.999,
  eps: first_order.Eps = 1e-8,
  adam_paths: first_order.AdamPaths = first_order.NOT_BY_MUON,
  plain: _Plain = "",
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Muon in K-FAC's metric: its steps are orthogonal where K-FAC's curvature is the identity.

  Of all steps U with a spectral norm of A^(1/2) U G^(1/2) of at most 1, that along which a loss with
  the gradient M falls most is

    U = A^(-1/2) polar(A^(-1/2) M G^(-1/2)) G^(-1/2),

  with polar(X) = X (X^T X)^(-1/2). Zhang et al. (2026, https://arxiv.org/abs/2603.09697) take factors
  of the gradient; A and G are K-FAC's here, of mean eigenvalue 1, `ridge` added. M is the momentum, and
  U is scaled to the root mean square `rms`. A factor of zeros, as behind a head that starts at
  zero, counts as the identity. With a large `ridge` (1e6) and `newton_schulz=5` this is Muon.

  The update takes `batch`, `rng` and `model_params` as that of `scale_by_kfac`.

  Args:
    predict: see `scale_by_kfac_adam`, as are params, batch, and the options that are not named here.
    momentum: decay of the momentum.
    nesterov: whether it is Nesterov's, that of Adam, too.
    ridge: added to the eigenvalues of a factor, whose mean is 1.
    rms: root mean square of the update of a kernel with its bias, at a rate of 1.
    newton_schulz: steps of the iteration to the polar factor.
    b1: of Adam for the parameters without a basis, as are b2 and eps.
    adam_paths: a regular expression of parameters that take Adam with their layers, as those of
      `plain` do, "" for none; by default of paths with a part `head` or `embedding`. A head of
      another name takes Muon's steps.
    plain: see `scale_by_kfac_adam`.

  Returns:
    A transform with an `InBasisState`.

  Raises:
    ValueError: see `scale_by_kfac_adam`.
  """
  rule = polar.orthogonal(momentum, nesterov, ridge, rms, newton_schulz)
  others = optax.scale_by_adam(b1, b2, eps, nesterov=nesterov)
  listed = (plain,) if isinstance(plain, str) else tuple(plain)
  first_order.check_adam_paths(adam_paths, params)
  found = (path for path in by_path(params) if first_order.takes_adam(path, adam_paths))
  layers = sorted({path[: path.rfind("/") + 1] for path in found})
  listed = (*filter(None, listed), *(f"^{re.escape(layer)}[^/]+$" for layer in layers))
  return _in_kfac_basis(rule, others, predict, params, batch, listed, **options)


@curvature_options.checked(scale_by_kfac_muon)
def kfac_muon(
  learning_rate: Any,
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  weight_decay: first_order.Decay = 1e-2,
  decay_mask: Any = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Muon in K-FAC's metric with decoupled weight decay; see `scale_by_kfac_muon`."""
  rule = scale_by_kfac_muon(predict, params, batch, **options)
  return first_order.with_decoupled_decay(rule, learning_rate, weight_decay, decay_mask)
