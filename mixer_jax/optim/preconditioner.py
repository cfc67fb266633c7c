"""K-FAC's preconditioner as an optax transform.

Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671. Per dense layer the
gradient V [d_in + 1, d_out] becomes (A (x) G + damping I)^-1 V, with the factors
A, G of `curvature.py` averaged over steps.
"""

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import algebra, axes, curvature_options, ekfac
from mixer_jax.optim import block_trees as trees
from mixer_jax.optim.factors import averaged, curvature_of, some_of

Schedule = Callable[[jax.Array], jax.Array]


class ScaleByKfacState(NamedTuple):
  """State of `scale_by_kfac`, a pytree of arrays by layer path, float32 but for the counts.

  Attributes:
    count: number of updates so far, an int32 scalar.
    factors: `Kronecker` (or `Diagonal`) moving averages.
    estimates: how many estimates each layer's averages are of, int32 [*stacked].
    inverses: per Kronecker block (inputs, outputs): `Eigen` pairs for exact
      damping, damped inverse matrices for factored damping.
    second_moments: per Kronecker block those of EK-FAC [..., d_in, d_out]; {} for K-FAC.
  """

  count: jax.Array
  factors: dict[str, Any]
  estimates: dict[str, jax.Array]
  inverses: dict[str, Any]
  second_moments: dict[str, jax.Array]


@curvature_options.checked(curvature_of)
def scale_by_kfac(
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  damping: curvature_options.Damping = 1e-2,
  damping_type: curvature_options.DampingType = "exact",
  factor_decay: curvature_options.FactorDecay = 0.8,
  factor_period: curvature_options.FactorPeriod = 10,
  inverse_period: curvature_options.InversePeriod = 20,
  norm_constraint: curvature_options.NormConstraint = None,
  learning_rate: float | Schedule | None = None,
  identity_start: curvature_options.IdentityStart = True,
  refresh: curvature_options.Refresh = "eigh",
  tolerance: curvature_options.Tolerance = None,
  eigenvalues: curvature_options.Eigenvalues = "factors",
  moment_decay: curvature_options.MomentDecay = curvature_options.MOMENT_DECAY,
  factor_fraction: curvature_options.FactorFraction = None,
  precondition_dtype: curvature_options.PreconditionDtype = "float32",
  mesh: jax.sharding.Mesh | None = None,
  axis_name: Any = None,
  part: Callable[[Any, int], Any] | None = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Preconditions gradients with Kronecker-factored curvature.

  The update function needs two extra arguments: `batch`, which `predict` gets, and `rng`, a key for
  the sampled targets; an extra argument `damping` takes the place of the option. Everything happens
  under `lax.cond` inside the caller's `jit`, `lax.scan` or mesh, so a step that renews neither
  factors nor inverses pays for the preconditioning products alone. Where a wrapper such as
  `optax.multi_transform` hides part of the parameters, the whole tree is passed as a third extra
  argument, `model_params`.

  Args:
    predict: maps (params, batch) to the model's outputs [batch, n] or
      [batch, tokens, n], to (outputs, targets) or to (outputs, targets, weights).
      `estimation="empirical"` needs targets: int labels, or floats like the outputs.
      Weights [batch] or [batch, tokens] (or like "normal" outputs) are those of the
      loss; rows of weight 0 count in no factor. A fourth part, tokens, bool
      [batch, tokens], marks the padding of sequences with one answer each.
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes; later batches may have any size.
    damping: added to the curvature, which has the units of loss / parameter^2; positive, or a
      schedule of the update count.
    damping_type: "exact" adds it to the eigenvalues of the product A (x) G, as published;
      "factored" adds pi sqrt(damping) to A and sqrt(damping) / pi to G (Martens and Grosse,
      Section 6.3), which needs two matrix products a step instead of four.
    factor_decay: of the moving averages of the factors, per renewal.
    factor_period: updates between renewals of the factors.
    inverse_period: the same of the inverses.
    norm_constraint: kl_clip: the update v is scaled by min(1,
      sqrt(norm_constraint / (learning_rate^2 <v, g>))), sums over the
      preconditioned parameters; None: no constraint.
    learning_rate: the one that the chain applies later; the norm constraint needs it.
    identity_start: start the averages at the identity, as published. It keeps the first
      inverses finite where a zero head makes all other gradient factors zero. False: averages of
      the estimates alone, with weights factor_decay^age that sum to 1.
    likelihood: the predictive distribution of a row of outputs, "categorical" (logits),
      "normal" (means; minus the log-likelihood is the sum of squares, without one half),
      "bernoulli" (logits) or "normal_variance" (a tuple of means and variances); a
      `Likelihood` of one's own; a pair (weight, likelihood), whose loss is the weight times
      minus the log-likelihood; or, for outputs that are a mapping, a mapping of these.
    estimation: targets of the Fisher matrix: "sampled" from the model, "exact" over all classes (up
      to random signs if outputs depend on other examples), or "empirical", the given ones.
    token_averaging: of B examples with T tokens A = sum a a^T / (B T) and, "published",
      G = T / B sum g g^T or, "expand", G = sum g g^T / B.
    norms: "gradient" leaves normalisation parameters to the plain gradient, as
      published; "diagonal" divides it by their Fisher diagonal plus damping.
    plain: a regular expression, or several, of the paths of parameters that are left to
      the gradient: parameters that no layer announces, and layers that shall have no
      curvature ("^head/"). "": none.
    max_factor: a factor of more rows is kept as its diagonal (a head of 21,841 classes);
      None is 8,192.
    full_factors: as `plain`, of the paths of parameters whose factors max_factor does not cut.
    refresh: "eigh" decomposes each factor anew; "qr", with exact damping, makes one warm-started
      step of orthogonal iteration.
    tolerance: "qr" leaves a basis whose relative off-diagonal part is at most this; None: none.
    eigenvalues: "factors" takes the products of the eigenvalues of A and G; "batch" and
      "examples" replace them by averages of the squared gradients, of a batch or of each
      example, in the eigenbasis (George et al., 2018, https://arxiv.org/abs/1806.03884).
    moment_decay: of the averages of these second moments, see `ekfac`.
    factor_fraction: of the batch whose examples the factors are estimated from: every n-th.
    precondition_dtype: of the operands of the products that precondition, "float32" or
      "bfloat16"; sums, factors and inverses stay float32. NVIDIA GPUs round float32 operands to
      TF32, unless `jax_default_matmul_precision` says otherwise.
    mesh: devices that share the inversions, a matrix on each; None: every device inverts all.
    axis_name: name of the axis, or names, of `pmap` or `shard_map` over which the batch is
      spread; not needed under `jit`.
    part: maps (batch, n) to the batch of every n-th example; None: all of its arrays have the
      examples first.

  Returns:
    A transform with a `ScaleByKfacState`, to be chained with momentum and a learning rate.

  Raises:
    ValueError: an option out of range, a prediction that does not fit the likelihood, a parameter
      that no block covers; of `init`, other parameters than these.
    ImportError: the installed kfac-jax does not work with the installed JAX.
  """
  if norm_constraint is not None and learning_rate is None:
    raise ValueError("norm_constraint needs the learning_rate that the chain applies")
  curvature = curvature_of(predict, params, batch, axis_name=axis_name, **options)
  curvature_options.check_fraction(factor_fraction)
  curvature_options.check_refresh(refresh, tolerance)
  curvature_options.check_combination(
    damping_type, refresh, eigenvalues, moment_decay, factor_period, inverse_period
  )
  if eigenvalues == "batch":
    curvature.common_rows(params, batch)
  exact, corrected = damping_type == "exact", eigenvalues != "factors"

  def init_fn(params):
    trees.check_names(params, curvature.names)
    blocks = [b for b in curvature.blocks if b.kind != "gradient"]
    covered = trees.covered_by(blocks, trees.by_path(params))
    factors = {b.name: algebra.initial_factors(b) for b in covered}
    estimates = {b.name: jnp.zeros(b.stacked, jnp.int32) for b in covered}
    inverses = {
      b.name: algebra.initial_inverses(b, damping_type) for b in covered if b.kind == "kronecker"
    }
    moments = {name: algebra.eigenvalues(pair) for name, pair in inverses.items() if corrected}
    return ScaleByKfacState(jnp.zeros((), jnp.int32), factors, estimates, inverses, moments)

  def renewed(state, whole, batch, rng, lam):
    """The state with the factors, inverses and second moments that are due renewed."""
    fraction = some_of(batch, factor_fraction, part)

    def renewed_factors():
      estimate = axes.automatic(curvature.estimate, (whole, fraction))
      fresh = estimate(whole, fraction, rng)
      return averaged(state.factors, fresh, state.estimates, factor_decay, identity_start)

    def renewed_inverses():
      matrices = {name: factors[name] for name in state.inverses}
      anew = lambda: algebra.eigendecompositions(matrices, mesh)
      warm = lambda: algebra.warm_started_bases(matrices, state.inverses, tolerance, mesh)[0]
      if not exact:
        inverses = algebra.factored_inverses(matrices, lam, mesh)
      else:
        inverses = anew() if refresh == "eigh" else jax.lax.cond(state.count == 0, anew, warm)
      return inverses, {n: algebra.eigenvalues(inverses[n]) for n in state.second_moments}

    def renewed_moments():
      estimate = axes.automatic(curvature.second_moments, (whole, fraction, inverses))
      fresh = estimate(whole, fraction, rng, inverses)
      age = state.count % inverse_period // factor_period
      return ekfac.averaged_moments(moments, fresh, age, moment_decay)

    due = state.count % factor_period == 0
    kept = lambda: (state.factors, state.estimates)
    factors, estimates = jax.lax.cond(due, renewed_factors, kept)
    kept = lambda: (state.inverses, state.second_moments)
    inverses, moments = jax.lax.cond(state.count % inverse_period == 0, renewed_inverses, kept)
    if eigenvalues == "examples":
      moments = jax.lax.cond(due, renewed_moments, lambda: moments)
    return ScaleByKfacState(state.count, factors, estimates, inverses, moments)

  def preconditioned(gradients, state, scales, lam):
    """The directions by parameter path, and the second moments with these gradients."""
    directions, moments = {}, dict(state.second_moments)
    for block in curvature.blocks:
      pair = state.inverses.get(block.name)
      if block.kind == "kronecker" and block.name in moments:  # not its layer's plain parameters
        found, moments[block.name] = ekfac.precondition(
          *(block, gradients, pair, moments[block.name], scales.get(block.name)),
          *(moment_decay, lam, precondition_dtype),
        )
        directions |= found
      elif block.kind != "gradient" and (own := state.factors.get(block.name)):
        directions |= algebra.precondition(block, gradients, own, pair, lam, precondition_dtype)
    return directions, moments

  def update_fn(updates, state, params=None, *, batch=None, rng=None, model_params=None, **extra):
    whole = trees.whole_tree(params if model_params is None else model_params, curvature.names)
    axes.check(axis_name, batch)
    lam = extra.get("damping", damping)
    lam = jnp.asarray(lam(state.count) if callable(lam) else lam, jnp.float32)
    state = renewed(state, whole, batch, rng, lam)
    gradients = trees.by_path(updates)
    scales = curvature.moment_scales(whole, batch) if eigenvalues == "batch" else {}
    directions, moments = preconditioned(gradients, state, scales, lam)
    if norm_constraint is not None:
      rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
      directions = algebra.constrained(directions, gradients, rate, norm_constraint)
    state = state._replace(count=optax.safe_increment(state.count), second_moments=moments)
    return trees.with_directions(updates, directions), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
