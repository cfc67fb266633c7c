"""K-FAC as an optax transform.

Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671. Per dense layer the
gradient V [d_in + 1, d_out] becomes (A (x) G + damping I)^-1 V, with the factors
A, G of `curvature.py` averaged over steps. The defaults are the settings of
"Analyzing the Effectiveness of K-FAC on Training MLP-Mixers" and of its code.
"""

import functools
from importlib import metadata
from typing import Annotated, Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import algebra, curvature_blocks
from mixer_jax.optim.curvature_blocks import check_choice, path_name
from mixer_jax.options import COUNT, TINY, Option, OptionsOf
from mixer_jax.runtime.imports import without

Schedule = Callable[[jax.Array], jax.Array]


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
  likelihood: str = "categorical",
  estimation: curvature_blocks.Estimation = "sampled",
  token_averaging: curvature_blocks.TokenAveraging = "published",
  norms: curvature_blocks.Norms = "gradient",
  plain: Annotated[str, Option(_PLAIN)] = "",
  precondition_dtype: curvature_blocks.PreconditionDtype = "float32",
  mesh: jax.sharding.Mesh | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Preconditions gradients with Kronecker-factored curvature.

  The update function needs two extra arguments: `batch`, which `predict` gets,
  and `rng`, a key for the sampled targets. Everything happens under `lax.cond`
  inside the caller's `jit`, `lax.scan` or mesh, so a step that renews neither
  factors nor inverses pays for the preconditioning products alone. Where a
  wrapper such as `optax.multi_transform` hides part of the parameters, the whole
  tree is passed as a third extra argument, `model_params`.

  Args:
    predict: maps (params, batch) to the model's outputs [batch, n], or to
      (outputs, targets) for `estimation="empirical"`. Linen layers inside it
      register themselves.
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes; later batches have the same shapes.
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
    identity_start: start the averages at the identity, as published, instead of
      at the first estimate. It keeps the first inverses finite where a zero head
      makes all other gradient factors zero.
    likelihood: "categorical" or "normal", the predictive distribution.
    estimation: "sampled", "exact" or "empirical" Fisher.
    token_averaging: "published" or "expand", see `curvature.py`.
    norms: "gradient" leaves normalisation parameters to the plain gradient, as
      published; "diagonal" divides it by their Fisher diagonal plus damping.
    plain: a regular expression, or several, of the paths of parameters that are left to
      the gradient: parameters that no layer announces, and layers with factors too large
      to invert, such as a head of 21,841 classes ("^head/"). "": none.
    precondition_dtype: of the operands of the products that precondition,
      "float32" or "bfloat16"; sums are float32, and factors and inverses are kept
      so. NVIDIA GPUs round float32 operands to TF32, unless
      `jax_default_matmul_precision` says otherwise.
    mesh: the devices of the caller's step, which share the inversions: each
      matrix on one of them. None: every device inverts all.

  Returns:
    A transform with a `ScaleByKfacState`. Chain it with momentum and a learning rate,
    or use `kfac`.

  Raises:
    ValueError: an option out of range, or a parameter that no block covers.
    ImportError: the installed kfac-jax does not work with the installed JAX.
  """
  _check_options(damping, damping_type, factor_decay, factor_period, inverse_period)
  check_choice("precondition_dtype", precondition_dtype)
  if norm_constraint is not None and learning_rate is None:
    raise ValueError("norm_constraint needs the learning_rate that the chain applies")
  options = dict(estimation=estimation, token_averaging=token_averaging, norms=norms, plain=plain)
  curvature = _curvature(predict, params, batch, likelihood=likelihood, **options)
  exact = damping_type == "exact"
  invert = algebra.exact_inverses if exact else algebra.factored_inverses

  def init_fn(params):
    covered = _covered(curvature.blocks, _by_path(params))
    factors = {b.name: algebra.initial_factors(b) for b in covered if b.kind != "gradient"}
    inverses = {
      b.name: algebra.initial_inverses(b, damping_type) for b in covered if b.kind == "kronecker"
    }
    return ScaleByKfacState(jnp.zeros((), jnp.int32), factors, inverses)

  def update_fn(updates, state, params=None, *, batch, rng, model_params=None, **extra):
    del extra
    if params is None and model_params is None:
      raise ValueError(optax.NO_PARAMS_MSG)
    whole = params if model_params is None else model_params
    lam = damping(state.count) if callable(damping) else damping

    def renewed_factors():
      fresh = curvature.estimate(whole, batch, rng)
      weight = 1.0 - factor_decay
      if not identity_start:  # an average without bias towards its start
        weight = weight / (1.0 - factor_decay ** (state.count // factor_period + 1.0))
      mix = lambda old, new: old + weight * (new - old)
      return {name: jax.tree.map(mix, old, fresh[name]) for name, old in state.factors.items()}

    factors = jax.lax.cond(state.count % factor_period == 0, renewed_factors, lambda: state.factors)
    inverses = jax.lax.cond(
      state.count % inverse_period == 0,
      lambda: invert({name: factors[name] for name in state.inverses}, lam, mesh),
      lambda: state.inverses,
    )
    gradients, directions = _by_path(updates), {}
    for block in curvature.blocks:
      if own := factors.get(block.name):
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
  **options: Annotated[Any, OptionsOf(scale_by_kfac)],
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
  if decay_from is None:
    decay_from = 20 * factor_period
  decay = lambda count: weight_decay * (count >= decay_from)
  options |= dict(norm_constraint=norm_constraint, factor_period=factor_period)
  return optax.chain(
    scale_by_kfac(predict, params, batch, learning_rate=learning_rate, **options),
    optax.add_decayed_weights(decay, decay_mask) if weight_decay else optax.identity(),
    optax.trace(momentum),
    optax.scale_by_learning_rate(learning_rate),
  )


def kfac_blocks(predict: Callable, params: Any, batch: Any, **options: Any):
  """The tuple of `curvature_blocks.Block` that `scale_by_kfac` of these arguments uses."""
  return _curvature(predict, params, batch, **options).blocks


def kfac_factors(predict: Callable, params: Any, batch: Any, rng: jax.Array, **options: Any):
  """Estimates the factors of one batch, without any average over steps.

  Arguments are as of `scale_by_kfac`, and `rng`, a key for sampled targets.

  Returns:
    By layer, `Kronecker`: A [d_in + 1, d_in + 1] (with a bias) and G [d_out, d_out]; or
    `Diagonal`.
  """
  return _curvature(predict, params, batch, **options).estimate(params, batch, rng)


def _curvature(predict: Callable, params: Any, batch: Any, plain: Any = "", **options: Any):
  """The curvature of a model, traced once for all optimizers of the same model and batch."""
  plain = (plain,) * bool(plain) if isinstance(plain, str) else tuple(plain)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
  leaves, structure = jax.tree.flatten(shapes)
  arguments = predict, structure, tuple(leaves), tuple(sorted({**options, "plain": plain}.items()))
  try:
    return _traced(*arguments)
  except TypeError:  # a callable without a hash
    return _traced.__wrapped__(*arguments)


@functools.lru_cache(maxsize=4)
def _traced(predict, structure, leaves, options):
  params, batch = jax.tree.unflatten(structure, leaves)
  return _curvature_module().Curvature(predict, params, batch, **dict(options))


def _curvature_module():
  """Imports kfac-jax on demand: all else runs without it."""
  try:
    with without("tensorflow"):  # its TensorFlow Probability would import it
      from mixer_jax.optim import curvature
  except (ImportError, AttributeError) as e:
    raise ImportError(
      f"K-FAC needs a kfac-jax that works with JAX {jax.__version__} ({_kfac_version()} is"
      f" installed; 0.0.8 works with jax >= 0.8.3, < 0.9.2): {e}"
    ) from e
  return curvature


def _kfac_version() -> str:
  try:
    return f"kfac-jax {metadata.version('kfac-jax')}"
  except metadata.PackageNotFoundError:
    return "no kfac-jax"


def _check_options(damping, damping_type, factor_decay, factor_period, inverse_period):
  if isinstance(damping, int | float) and not damping > 0:
    raise ValueError(f"damping is {damping}; it must be above 0")
  check_choice("damping_type", damping_type)
  if not 0 <= factor_decay < 1:
    raise ValueError(f"factor_decay is {factor_decay}; it must be in [0, 1)")
  for name, period in (("factor_period", factor_period), ("inverse_period", inverse_period)):
    if period < 1:
      raise ValueError(f"{name} is {period}; it must be at least 1")


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
