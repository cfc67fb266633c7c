"""K-FAC as an optax transform.

Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671. Per dense layer the
gradient V [d_in + 1, d_out] becomes (A (x) G + damping I)^-1 V, with the factors
A, G of `curvature.py` averaged over steps. The defaults are the settings of
"Analyzing the Effectiveness of K-FAC on Training MLP-Mixers" and of its code.
"""

import inspect
from typing import Annotated, Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax import options as options_lib
from mixer_jax.optim import algebra, axes, curvature_blocks
from mixer_jax.optim.curvature_blocks import check_choice, path_name
from mixer_jax.optim.factors import curvature_of
from mixer_jax.options import COUNT, TINY, Option

Schedule = Callable[[jax.Array], jax.Array]


# Options for runs of hundreds of steps; the defaults are made for tens of thousands.
SHORT_RUN = {"damping": 1e-2, "factor_decay": 0.8, "factor_period": 5, "inverse_period": 20}


class ScaleByKfacState(NamedTuple):
  """State of `scale_by_kfac`, a pytree of float32 arrays by layer path.

  Attributes:
    count: number of updates so far, an int32 scalar.
    factors: `Kronecker` (or `Diagonal`) moving averages.
    inverses: per Kronecker block (inputs, outputs): `Eigen` pairs for exact
      damping, damped inverse matrices for factored damping.
  """

  count: jax.Array
  factors: dict[str, Any]
  inverses: dict[str, Any]


_Damping = Annotated[float, Option("added to the curvature", TINY)]
_FactorDecay = Annotated[float, Option("decay of the averages of the factors", 0, 0.99999999)]
# Weight decay may wait for 20 factor periods.
_FactorPeriod = Annotated[int, Option("updates between renewals of the factors", 1, COUNT // 20)]
_InversePeriod = Annotated[int, Option("updates between renewals of the inverses", 1, COUNT)]
_DECAY_FROM = Option("first update that decays; None: 20 factor periods", 0, COUNT)
_IdentityStart = Annotated[bool, Option("start the averages of the factors at the identity")]
_MAX_FACTOR = 8192
_MaxFactor = Annotated[
  int | None, Option("rows above which a factor is kept as its diagonal; None: 8,192", 1, COUNT)
]
_ARGUMENTS = ("learning_rate", "predict", "params", "batch")
_PLAIN = "regular expression of parameter paths that take the plain gradient"


def scale_by_kfac(
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  damping: _Damping = 1e-3,
  damping_type: curvature_blocks.DampingType = "exact",
  factor_decay: _FactorDecay = 0.95,
  factor_period: _FactorPeriod = 10,
  inverse_period: _InversePeriod = 100,
  norm_constraint: float | None = None,
  learning_rate: float | Schedule | None = None,
  identity_start: _IdentityStart = True,
  likelihood: Any = "categorical",
  estimation: curvature_blocks.Estimation = "sampled",
  token_averaging: curvature_blocks.TokenAveraging = "published",
  norms: curvature_blocks.Norms = "gradient",
  plain: Annotated[str, Option(_PLAIN)] = "",
  max_factor: _MaxFactor = None,
  precondition_dtype: curvature_blocks.PreconditionDtype = "float32",
  mesh: jax.sharding.Mesh | None = None,
  axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Preconditions gradients with Kronecker-factored curvature.

  The update function needs two extra arguments: `batch`, which `predict` gets,
  and `rng`, a key for the sampled targets. Everything happens under `lax.cond`
  inside the caller's `jit`, `lax.scan` or mesh, so a step that renews neither
  factors nor inverses pays for the preconditioning products alone. Where a
  wrapper such as `optax.multi_transform` hides part of the parameters, the whole
  tree is passed as a third extra argument, `model_params`.

  Args:
    predict: maps (params, batch) to the model's outputs [batch, n] or
      [batch, tokens, n], to (outputs, targets) or to (outputs, targets, weights).
      `estimation="empirical"` needs targets: int labels, or floats like the outputs.
      Weights [batch] or [batch, tokens] (or like "normal" outputs) are those of the
      loss; rows of weight 0 count in no factor.
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes; later batches may have any size.
    damping: added to the curvature, which has the units of loss / parameter^2;
      positive, or a schedule of the update count.
    damping_type: "exact" adds it to the eigenvalues of the product A (x) G, as
      published; "factored" adds pi sqrt(damping) to A and sqrt(damping) / pi to
      G (Martens and Grosse, Section 6.3), which needs two matrix products a step
      instead of four.
    factor_decay: of the moving averages of the factors, per renewal.
    factor_period: updates between renewals of the factors.
    inverse_period: the same of the inverses.
    norm_constraint: kl_clip: the update v is scaled by min(1,
      sqrt(norm_constraint / (learning_rate^2 <v, g>))), sums over the
      preconditioned parameters; None: no constraint.
    learning_rate: the rate that the chain applies later; the norm constraint
      needs it.
    identity_start: start the averages at the identity, as published. It keeps the first
      inverses finite where a zero head makes all other gradient factors zero. False: the
      averages are of the estimates alone, each weighted by factor_decay^age, and the weights
      sum to 1.
    likelihood: the predictive distribution of a row of outputs, "categorical" (logits),
      "normal" (means; minus the log-likelihood is the sum of squares, without one half),
      "bernoulli" (logits) or "normal_variance" (a tuple of means and variances); a
      `Likelihood` of one's own; or, for outputs that are a mapping, a mapping of these or of
      pairs (weight, likelihood).
    estimation: "sampled", "exact" or "empirical" Fisher.
    token_averaging: "published" or "expand", see `curvature.py`.
    norms: "gradient" leaves normalisation parameters to the plain gradient, as
      published; "diagonal" divides it by their Fisher diagonal plus damping.
    plain: a regular expression, or several, of the paths of parameters that are left to
      the gradient: parameters that no layer announces, and layers that shall have no
      curvature ("^head/"). "": none.
    max_factor: a factor of more rows is kept as its diagonal (a head of 21,841 classes);
      None is 8,192.
    precondition_dtype: of the operands of the products that precondition,
      "float32" or "bfloat16"; sums are float32, and factors and inverses are kept
      so. NVIDIA GPUs round float32 operands to TF32, unless
      `jax_default_matmul_precision` says otherwise.
    mesh: the devices of the caller's step, which share the inversions: each
      matrix on one of them. None: every device inverts all.
    axis_name: name of the axis, or names, of `pmap` or `shard_map` over which the batch is
      spread; not needed under `jit`.

  Returns:
    A transform with a `ScaleByKfacState`. Chain it with momentum and a learning rate,
    or use `kfac`.

  Raises:
    ValueError: an option out of range, a prediction that does not fit the likelihood, or a
      parameter that no block covers.
    ImportError: the installed kfac-jax does not work with the installed JAX.
  """
  _check_options(damping, damping_type, factor_decay, factor_period, inverse_period)
  check_choice("precondition_dtype", precondition_dtype)
  max_factor = max_factor or _MAX_FACTOR  # no number by default: inject_hyperparams traces these
  if norm_constraint is not None and learning_rate is None:
    raise ValueError("norm_constraint needs the learning_rate that the chain applies")
  curvature = curvature_of(
    predict,
    params,
    batch,
    likelihood=likelihood,
    estimation=estimation,
    token_averaging=token_averaging,
    norms=norms,
    plain=plain,
    max_factor=max_factor,
    axis_name=axis_name,
  )
  exact = damping_type == "exact"
  invert = algebra.exact_inverses if exact else algebra.factored_inverses

  def init_fn(params):
    covered = _covered(curvature.blocks, _by_path(params))
    factors = {b.name: algebra.initial_factors(b) for b in covered if b.kind != "gradient"}
    inverses = {
      b.name: algebra.initial_inverses(b, damping_type) for b in covered if b.kind == "kronecker"
    }
    return ScaleByKfacState(jnp.zeros((), jnp.int32), factors, inverses)

  def update_fn(updates, state, params=None, *, batch, rng=None, model_params=None, **extra):
    del extra
    whole = _whole(params if model_params is None else model_params, curvature.names)
    axes.check(axis_name)
    lam = damping(state.count) if callable(damping) else damping

    def renewed_factors():
      fresh = axes.automatic(curvature.estimate, (whole, batch))(whole, batch, rng)
      # The weight of the newest of n + 1 estimates, (1 - decay) / (1 - decay^(n + 1)), is 1
      # exactly for the first: the identity would not vanish otherwise.
      log, renewals = jnp.log(jnp.float32(factor_decay)), state.count // factor_period + 1
      unbiased = jnp.expm1(log) / jnp.expm1(renewals * log)
      weight = jnp.where(identity_start, jnp.float32(1.0 - factor_decay), unbiased)
      mix = lambda old, new: (1.0 - weight) * old + weight * new
      return {name: jax.tree.map(mix, old, fresh[name]) for name, old in state.factors.items()}

    factors = jax.lax.cond(state.count % factor_period == 0, renewed_factors, lambda: state.factors)
    inverses = jax.lax.cond(
      state.count % inverse_period == 0,
      lambda: invert({name: factors[name] for name in state.inverses}, lam, mesh),
      lambda: state.inverses,
    )
    gradients, directions = _by_path(updates), {}
    for block in curvature.blocks:
      if block.kind != "gradient" and (own := factors.get(block.name)):
        inverse = inverses.get(block.name)
        directions |= algebra.precondition(block, gradients, own, inverse, lam, precondition_dtype)
    if norm_constraint is not None:
      rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
      directions = _constrain(directions, gradients, rate, norm_constraint)
    updates = jax.tree_util.tree_map_with_path(
      lambda path, g: directions.get(path_name(path), g).astype(g.dtype), updates
    )
    return updates, ScaleByKfacState(optax.safe_increment(state.count), factors, inverses)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def kfac(
  learning_rate: float | Schedule,
  predict: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  momentum: Annotated[float, Option("decay of the momentum", 0, 0.99999)] = 0.9,
  weight_decay: Annotated[float, Option("weight decay, after preconditioning", 0)] = 1e-4,
  decay_mask: Any = None,
  decay_from: Annotated[int | None, _DECAY_FROM] = None,
  norm_constraint: Annotated[float | None, Option("kl_clip; 0 allows no step", 0)] = 1e-2,
  factor_period: _FactorPeriod = 10,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """The published K-FAC optimizer, complete: precondition, clip, decay, momentum, step.

  Args:
    learning_rate: a number or a schedule of the update count.
    predict: see `scale_by_kfac`, as are all arguments that are not named here.
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes.
    momentum: decay of the momentum buffer (no dampening, no Nesterov).
    weight_decay: added times the parameters to the preconditioned gradient.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    decay_from: the first update that decays; None is 20 factor periods, as in
      the published code, which lets the curvature settle first.
  """
  allowed = [name for name in inspect.signature(kfac).parameters if name not in _ARGUMENTS]
  if unknown := sorted(set(options) - set(allowed)):
    raise TypeError(f"K-FAC has no option {unknown[0]!r}; allowed: {', '.join(allowed)}")
  if decay_from is None:
    decay_from = 20 * factor_period
  decay = lambda count: weight_decay * (count >= decay_from)
  undecayed = isinstance(weight_decay, int | float) and not weight_decay
  options |= dict(norm_constraint=norm_constraint, factor_period=factor_period)
  return optax.chain(
    scale_by_kfac(predict, params, batch, learning_rate=learning_rate, **options),
    optax.identity() if undecayed else optax.add_decayed_weights(decay, decay_mask),
    optax.trace(momentum),
    optax.scale_by_learning_rate(learning_rate),
  )


kfac.__signature__ = options_lib.signature(kfac, scale_by_kfac)


def _check_options(damping, damping_type, factor_decay, factor_period, inverse_period):
  known = lambda x: isinstance(x, int | float)  # not traced
  if known(damping) and not damping > 0:
    raise ValueError(f"damping is {damping}; it must be above 0")
  check_choice("damping_type", damping_type)
  if known(factor_decay) and not 0 <= factor_decay < 1:
    raise ValueError(f"factor_decay is {factor_decay}; it must be in [0, 1)")
  for name, period in (("factor_period", factor_period), ("inverse_period", inverse_period)):
    if known(period) and period < 1:
      raise ValueError(f"{name} is {period}; it must be at least 1")


def _whole(params: Any, names: tuple[str, ...]) -> Any:
  """The parameters of the model, all of them."""
  if params is None:
    raise ValueError("K-FAC's update needs params: tx.update(grads, state, params, batch=batch)")
  if missing := set(names) - set(_by_path(params)):
    raise ValueError(
      f"K-FAC's update needs all parameters, but {sorted(missing)[0]} is hidden; pass the whole"
      " tree as the extra argument model_params"
    )
  return params


def _constrain(directions, gradients, rate, norm_constraint):
  """Shortens the update so that rate^2 <v, g> stays within the constraint."""
  inner = sum(jnp.vdot(v, gradients[path]) for path, v in directions.items())
  inner = jnp.maximum(rate**2 * inner, jnp.finfo(jnp.float32).tiny)
  scale = jnp.minimum(1.0, jnp.sqrt(norm_constraint / inner))
  return {path: v * scale for path, v in directions.items()}


def _by_path(tree: Any) -> dict[str, jax.Array]:
  return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _covered(all_blocks, leaves):
  """The blocks whose parameters are all in a (possibly masked) tree."""
  covered = []
  for block in all_blocks:
    present = [path in leaves for path in block.paths]
    if any(present) and not all(present):
      raise ValueError(f"the K-FAC block {block.name} needs all of {', '.join(block.paths)}")
    if all(present):
      covered.append(block)
  return covered
