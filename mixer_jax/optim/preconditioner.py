"""K-FAC's preconditioner as an optax transform, and EK-FAC's.

Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671. Per layer the gradient
V [d_in + 1, d_out] becomes (A (x) G + damping I)^-1 V, with the factors A, G of
`curvature` averaged over steps.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import algebra, averages, axes, ekfac, trees
from mixer_jax.optim.algebra import Decomposition
from mixer_jax.optim.curvature.curvature import Curvature
from mixer_jax.optim.curvature.patterns import check_choice

Schedule = optax.Schedule


class ScaleByKfacState(NamedTuple):
  """State of `scale_by_kfac` and `scale_by_ekfac`, a pytree of arrays by the path of a layer.

  All are of `Curvature.dtype` but for the counts.

  Attributes:
    count: number of updates so far, an int32 scalar.
    factors: moving averages, a `Kronecker` (or `Diagonal`) for each layer.
    estimates: how many estimates each layer's averages are of, int32 `[*stacked]`.
    inverses: a pair (inputs, outputs) for each Kronecker block: `Eigen` for exact damping, damped
      inverse matrices for factored damping.
    second_moments: EK-FAC's [..., d_in, d_out] for each Kronecker block; {} for K-FAC.
  """

  count: jax.Array
  factors: dict[str, Any]
  estimates: dict[str, jax.Array]
  inverses: dict[str, Any]
  second_moments: dict[str, jax.Array]


def scale_by_kfac(
  curvature: Curvature,
  *,
  damping: optax.ScalarOrSchedule = 1e-2,
  damping_type: str = "exact",
  factor_decay: float = 0.8,
  factor_period: int = 10,
  inverse_period: int = 20,
  factor_fraction: float | None = None,
  identity_start: bool = True,
  decomposition: Decomposition = Decomposition(),
) -> optax.GradientTransformationExtraArgs:
  """Preconditions gradients by Kronecker-factored curvature: (A (x) G + damping I)^-1 V.

  Martens and Grosse, 2015, https://arxiv.org/abs/1503.05671. V [d_in + 1, d_out] is the gradient of
  a layer's kernel and bias, A and G are moving averages of the factors of `Curvature.estimate`.

  The update needs two extra arguments: `batch`, which the curvature's function gets, and `rng`, a
  key for the sampled targets; an extra argument `damping` takes the place of the option. Renewals
  happen under `lax.cond` inside the caller's `jit`, `lax.scan` or mesh, so that a step which renews
  neither factors nor inverses pays for the preconditioning products alone. Where a wrapper such as
  `optax.multi_transform` hides part of the parameters, the whole tree is passed as a third extra
  argument, `model_params`.

  Args:
    curvature: the `Curvature` of the model.
    damping: positive number added to the curvature, in the units of loss / parameter^2, or a
      schedule of the update count.
    damping_type: "exact" adds it to the eigenvalues of the product A (x) G, as published;
      "factored" adds pi sqrt(damping) to A and sqrt(damping) / pi to G (Martens and Grosse,
      Section 6.3), which needs two matrix products a step instead of four.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    inverse_period: updates between renewals of the inverses.
    factor_fraction: share 1/n of the batch that factors are estimated from, every n-th example;
      None: all of it.
    identity_start: whether the averages start at the identity, as published. This keeps the first
      inverses finite where a zero head makes all other gradient factors zero. False: averages of
      the estimates alone, with weights factor_decay^age that sum to 1.
    decomposition: how bases are renewed; its `refresh="qr"` needs exact damping.

  Returns:
    A transform with a `ScaleByKfacState`, to be chained with momentum and a learning rate.

  Raises:
    ValueError: damping_type is unknown or does not fit the decomposition; in the update, `batch`
      or parameters are missing.

  Example:
    After the example of `Curvature`:

    ```python
    import optax

    tx = optax.chain(optim.scale_by_kfac(curvature, damping=1e-3), optax.scale(-0.1))
    updates, state = tx.update(grads, tx.init(params), params, batch=batch, rng=key)
    ```
  """
  check_choice("damping_type", damping_type, ("exact", "factored"))
  if damping_type == "factored" and decomposition.refresh == "qr":
    raise ValueError('refresh="qr" needs damping_type="exact"')
  periods = factor_period, inverse_period
  averages = factor_decay, factor_fraction, identity_start
  own = _Preconditioner(curvature, damping, *periods, *averages, decomposition, damping_type)
  return optax.GradientTransformationExtraArgs(own.init, own.update)


def scale_by_ekfac(
  curvature: Curvature,
  *,
  damping: optax.ScalarOrSchedule = 1e-2,
  moments: str = "batch",
  moment_decay: float = 0.95,
  factor_decay: float = 0.8,
  factor_period: int = 10,
  inverse_period: int = 20,
  factor_fraction: float | None = None,
  identity_start: bool = True,
  decomposition: Decomposition = Decomposition(),
) -> optax.GradientTransformationExtraArgs:
  """Preconditions gradients by their second moments in the eigenbasis of K-FAC's factors (EK-FAC).

  George et al., 2018, https://arxiv.org/abs/1806.03884. The extra arguments of the update are those
  of `scale_by_kfac`.

  Args:
    curvature: the `Curvature` of the model.
    damping: number added to the second moments, or a schedule of the update count.
    moments: "batch": second moments of every update's gradient; "examples": those of single
      examples when factors are renewed, for which inverse_period is a multiple of factor_period.
    moment_decay: decay of the second moments' averages.
    factor_decay: decay of the factors' moving averages, per renewal.
    factor_period: updates between renewals of the factors.
    inverse_period: updates between renewals of the eigenbasis.
    factor_fraction: share 1/n of the batch that factors are estimated from; None: all of it.
    identity_start: whether the averages of the factors start at the identity.
    decomposition: how bases are renewed.

  Returns:
    A transform with a `ScaleByKfacState`.

  Raises:
    ValueError: moments is unknown, the periods do not fit it, or (with "batch") outputs differ in
      their rows; in the update, `batch` or parameters are missing.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.scale_by_ekfac(curvature, moments="examples")
    updates, state = tx.update(grads, tx.init(params), params, batch=batch, rng=key)
    ```
  """
  check_choice("moments", moments, ("batch", "examples"))
  known = isinstance(factor_period, int) and isinstance(inverse_period, int)
  if moments == "examples" and known and inverse_period % factor_period:
    raise ValueError(
      f"inverse_period is {inverse_period}; with moments='examples' allowed: a multiple of"
      f" factor_period, {factor_period}, so that each basis has second moments at once"
    )
  if moments == "batch":
    curvature.check_common_rows()
  periods = factor_period, inverse_period
  averages = factor_decay, factor_fraction, identity_start
  own = _Preconditioner(
    curvature, damping, *periods, *averages, decomposition, "exact", moments, moment_decay
  )
  return optax.GradientTransformationExtraArgs(own.init, own.update)


class _Preconditioner(NamedTuple):
  """The transform; its fields are the arguments of `scale_by_kfac` and `scale_by_ekfac`."""

  curvature: Curvature
  damping: Any
  factor_period: Any
  inverse_period: Any
  factor_decay: Any
  factor_fraction: float | None
  identity_start: Any
  decomposition: Decomposition
  damping_type: str
  moments: str | None = None  # None: K-FAC
  moment_decay: Any = 0.0

  def init(self, params: Any) -> ScaleByKfacState:
    if trees.is_placeholder(params):
      return ScaleByKfacState(0, 0, 0, 0, 0)
    trees.check_names(params, self.curvature.names)
    blocks = [b for b in self.curvature.blocks if b.kind != "gradient"]
    covered = trees.covered_by(blocks, trees.by_path(params))
    initial = functools.partial(algebra.initial_inverses, damping_type=self.damping_type)
    inverses = {b.name: initial(b) for b in covered if b.kind == "kronecker"}
    return ScaleByKfacState(
      count=jnp.zeros((), jnp.int32),
      factors={b.name: algebra.initial_factors(b) for b in covered},
      estimates={b.name: jnp.zeros(b.stacked, jnp.int32) for b in covered},
      inverses=inverses,
      second_moments={n: algebra.eigenvalues(x) for n, x in inverses.items() if self.moments},
    )

  def update(
    self, updates, state, params=None, *, batch=None, rng=None, model_params=None, **extra
  ):
    curvature = self.curvature
    whole = trees.whole_tree(params if model_params is None else model_params, curvature.names)
    axes.check(curvature.axis_name, batch)
    curvature.compare(updates, whole, batch, state.count)
    lam = extra.get("damping", self.damping)
    lam = jnp.asarray(lam(state.count) if callable(lam) else lam, curvature.dtype)
    state = self._renewed(state, whole, batch, rng, lam)
    scales = curvature.moment_scales(whole, batch) if self.moments == "batch" else {}
    directions, moments = self._directions(trees.by_path(updates), state, scales, lam)
    state = state._replace(count=optax.safe_increment(state.count), second_moments=moments)
    return trees.with_directions(updates, directions), state

  def _renewed(self, state, whole, batch, rng, lam):
    """The state with the factors, inverses and second moments that are due renewed."""
    some = self.curvature.some_of(batch, self.factor_fraction)

    def new_factors():
      estimate = axes.automatic(self.curvature.estimate, (whole, some))
      about = state.estimates, self.factor_decay, self.identity_start
      with jax.named_scope(averages.SCOPE):
        return averages.averaged(state.factors, estimate(whole, some, rng), *about)

    def new_inverses():
      with jax.named_scope(algebra.SCOPE):
        inverses = self._inverses({name: factors[name] for name in state.inverses}, state, lam)
      return inverses, {n: algebra.eigenvalues(inverses[n]) for n in state.second_moments}

    def new_moments():
      estimate = axes.automatic(self.curvature.second_moments, (whole, some, inverses))
      with jax.named_scope(averages.SCOPE):
        fresh = estimate(whole, some, rng, inverses)
      age = state.count % self.inverse_period // self.factor_period
      return ekfac.averaged_moments(moments, fresh, age, self.moment_decay)

    due = state.count % self.factor_period == 0
    kept = lambda: (state.factors, state.estimates)
    factors, estimates = jax.lax.cond(due, new_factors, kept)
    kept = lambda: (state.inverses, state.second_moments)
    inverses, moments = jax.lax.cond(state.count % self.inverse_period == 0, new_inverses, kept)
    if self.moments == "examples":
      moments = jax.lax.cond(due, new_moments, lambda: moments)
    return ScaleByKfacState(state.count, factors, estimates, inverses, moments)

  def _inverses(self, factors, state, lam):
    mesh = self.decomposition.mesh or self.curvature.mesh
    if self.damping_type == "factored":
      return algebra.factored_inverses(factors, lam, mesh, self.decomposition.linear_algebra)
    return algebra.renewed_bases(
      factors, state.inverses, state.count, self.decomposition._replace(mesh=mesh)
    )[0]

  def _directions(self, gradients, state, scales, lam):
    """The directions by parameter path, and the second moments with these gradients."""
    directions, moments = {}, dict(state.second_moments)
    products = self.decomposition.products
    for block in self.curvature.blocks:
      pair = state.inverses.get(block.name)
      if block.kind == "diagonal" and block.name in state.factors:
        [path], [values] = block.paths, state.factors[block.name].values
        directions[path] = trees.taken(block, gradients)[0] / (values + lam)
      elif block.name in moments:
        v, moments[block.name] = ekfac.precondition(
          *(block, gradients, pair, moments[block.name], scales.get(block.name)),
          *(self.moment_decay, lam, products),
        )
        trees.add_arrays(directions, block, v)
      elif pair is not None:
        v = algebra.precondition(block, gradients, pair, lam, products)
        trees.add_arrays(directions, block, v)
    return directions, moments


def constrain_norm(
  tx: optax.GradientTransformationExtraArgs,
  curvature: Curvature,
  norm_constraint: Any,
  learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
  """Scales the update v of a preconditioner by `min(1, sqrt(limit / (learning_rate^2 <v, g>)))`.

  This is the kl_clip of the K-FAC study's code; `<v, g>` sums over the parameters with curvature.

  Args:
    tx: a preconditioner such as `scale_by_kfac`, whose state has a `count`.
    curvature: the `Curvature` of the model.
    norm_constraint: the limit, a number.
    learning_rate: the number or schedule that is applied to the update later.

  Returns:
    A transform with the state of `tx`.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.constrain_norm(optim.scale_by_kfac(curvature), curvature, 1e-2, learning_rate=0.1)
    updates, state = tx.update(grads, tx.init(params), params, batch=batch, rng=key)
    ```
  """
  names = {path for b in curvature.blocks if b.kind != "gradient" for path in b.paths}

  def update_fn(updates, state, params=None, **extra):
    count, gradients = state.count, trees.by_path(updates)
    found, state = tx.update(updates, state, params, **extra)
    directions = {path: v for path, v in trees.by_path(found).items() if path in names}
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    directions = algebra.constrained(directions, gradients, rate, norm_constraint)
    return trees.with_directions(found, directions), state

  return optax.GradientTransformationExtraArgs(tx.init, update_fn)
