"""Gauss-Newton steps by conjugate gradients: products with the exact matrix, preconditioned by K-FAC.

Martens (2010), "Deep learning via Hessian-free optimization", and Martens and Sutskever (2012),
"Training deep and recurrent networks with Hessian-free optimization". The matrix F = J^T J
(`curvature.residuals`) is never formed: a product with it is one pass in forward mode and one in
reverse. Unlike `gauss_newton`, it has no limit to the number of residuals.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import algebra, axes, first_order, model_steps, trees
from mixer_jax.optim.curvature.curvature import Curvature, tangent
from mixer_jax.optim.preconditioner import scale_by_kfac

# The model's progress is measured over the last 10 iterations, or over the last tenth of all of them.
_LEAST_SPAN = 10

Vector = dict[str, jax.Array]  # by the path of a parameter


class HessianFreeState(NamedTuple):
  """State of `hessian_free`.

  Attributes:
    count: number of updates so far, an int32 scalar.
    inner: state of the preconditioner.
    damping: damping of the next update, a scalar.
    ratio: last reduction ratio, the loss's change over the model's; 1 before the first.
    rate: multiplier at which the next line search begins, a scalar.
    previous: last solution, like the parameters, in the type of sums.
    iterations: number of iterations of the last solution, an int32 scalar.
  """

  count: jax.Array
  inner: Any
  damping: jax.Array
  ratio: jax.Array
  rate: jax.Array
  previous: Any
  iterations: jax.Array


def hessian_free(
  curvature: Curvature,
  *,
  learning_rate: optax.ScalarOrSchedule = 1.0,
  damping: float = 1e-3,
  max_iterations: int = 50,
  cg_tolerance: float = 5e-4,
  warm_start: float = 0.95,
  acceleration: bool = False,
  line_search: bool = False,
  precondition: optax.GradientTransformationExtraArgs | None = None,
  damping_decay: float = 0.5,
  min_damping: float = 1e-20,
  max_damping: float = 1e8,
) -> optax.GradientTransformationExtraArgs:
  """Makes Gauss-Newton steps -(F + damping I)^-1 g by conjugate gradients, preconditioned by K-FAC.

  F is the exact Gauss-Newton matrix of the batch; it is never formed, and there is no limit to the
  number of residuals. Unlike in `gauss_newton`, g is the gradient that the caller gives. The
  iterations end where the model of the loss falls by less than a share of k `cg_tolerance` over the
  last k, with k = max(10, i / 10) at iteration i (Martens, 2010, Section 4.4).

  The update takes `batch` and, for sampled factors, `rng`. With `value_fn`, and maybe `value`, the
  damping adapts and steps that do not lessen the loss are not made, as in `gauss_newton`.

  Args:
    curvature: the `Curvature` of the model, whose likelihood is that of the loss.
    learning_rate: a number or a schedule, multiplies the solution.
    damping: the first damping, in the units of loss / parameter^2.
    max_iterations: most products with F for a step.
    cg_tolerance: progress, for each iteration, at which iterations end, see above; 0 makes all.
    warm_start: the iterations begin at the last solution times this (Martens and Sutskever, 2012,
      Section 20.9.3), or at 0 if the model is better there.
    acceleration: whether the second order of `gauss_newton` is added, where it is not too large, by
      as many iterations.
    line_search: whether the step is multiplied by the power of two with the least loss.
    precondition: a `scale_by_kfac` of the same curvature with exact damping, whose factors and
      inverses precondition; its own damping does not count. None: one that renews both in every
      update, which costs less than the products with F.
    damping_decay: factor of the damping where the reduction ratio is above 3/4; where it is below
      1/4, the damping is divided by it.
    min_damping: least damping.
    max_damping: largest damping.

  Returns:
    A transform with a `HessianFreeState`.

  Raises:
    ValueError: the likelihood has no factor; in the update, a line search has no `value_fn`.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.hessian_free(curvature, max_iterations=5)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params, batch=batch, rng=key, value_fn=loss)
    ```
  """
  if curvature.likelihood.factor is None:
    raise ValueError("hessian_free needs a likelihood with a factor")
  if precondition is None:
    options = dict(factor_period=1, inverse_period=1, factor_decay=0.5, identity_start=False)
    precondition = scale_by_kfac(curvature, **options)
  how = model_steps.Damping(damping_decay, min_damping, max_damping)
  options = max_iterations, cg_tolerance, warm_start, acceleration, line_search
  own = _HessianFree(curvature, learning_rate, damping, how, precondition, *options)
  return optax.GradientTransformationExtraArgs(own.init, own.update)


class _HessianFree(NamedTuple):
  """The transform; its fields are the arguments of `hessian_free`."""

  curvature: Curvature
  learning_rate: Any
  damping: Any
  how: model_steps.Damping
  precondition: optax.GradientTransformationExtraArgs
  max_iterations: int
  cg_tolerance: Any
  warm_start: Any
  acceleration: bool
  line_search: bool

  def init(self, params: Any) -> HessianFreeState:
    inner = self.precondition.init(params)
    if trees.is_placeholder(params):
      return HessianFreeState(0, inner, 0, 0, 0, params, 0)
    first_order.checked_rate(self.learning_rate)
    dtype = self.curvature.dtype
    one = lambda: jnp.ones((), dtype)  # one each: the state may be donated
    zero = lambda: jnp.zeros((), jnp.int32)
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), dtype), params)
    first = jnp.array(self.damping, dtype)
    return HessianFreeState(zero(), inner, first, one(), one(), zeros, zero())

  def update(
    self, updates, state, params=None, *, batch=None, rng=None, value=None, value_fn=None, **extra
  ):
    curvature, model_params = self.curvature, extra.get("model_params")
    batch = curvature.some_of(batch, None)
    whole = trees.whole_tree(params if model_params is None else model_params, curvature.names)
    model_steps.check_searchable(self.line_search, value_fn)
    curvature.compare(updates, whole, batch, state.count, scale=True)
    lam = state.damping
    given = dict(batch=batch, rng=rng, model_params=model_params, damping=lam)
    _, inner = self.precondition.update(updates, state.inner, params, **given)
    gradient = {path: trees.wide(g) for path, g in trees.by_path(updates).items()}
    start = {path: self.warm_start * x for path, x in trees.by_path(state.previous).items()}
    step = axes.automatic(self._solved, (whole, batch))
    *found, number = step(whole, batch, gradient, start, inner, lam)
    way = model_steps.Direction(whole, *found, lam)
    rate = self.learning_rate
    rate = rate(state.count) if callable(rate) else rate
    about = self.how, self.line_search, value, value_fn
    made = model_steps.stepped(way, rate, state, *about)
    count = optax.safe_increment(state.count)
    previous = trees.with_directions(state.previous, made.kept)
    ends = made.damping, made.ratio, made.grid, previous, number
    return trees.with_directions(updates, made.arrays), HessianFreeState(count, inner, *ends)

  def _solved(self, whole, batch, gradient, start, inner, lam):
    """The solution by path, its slope and curvature, and how many iterations it took."""
    of_tree = self.curvature.products(whole, batch)
    own = lambda tree: {path: trees.wide(trees.by_path(tree)[path]) for path in gradient}
    product = lambda v: own(of_tree(tangent(whole, v)))
    damped = lambda v: jax.tree.map(lambda x, y: x + lam * y, product(v), v)
    inverse = _preconditioner(self.curvature, inner, lam)
    target = jax.tree.map(jnp.negative, gradient)
    how_long = self.max_iterations, self.cg_tolerance
    found, residual, number = conjugate_gradients(damped, inverse, target, start, *how_long)
    image = _add(_add(target, residual, -1.0), found, -lam)  # F times it
    model = _dot(gradient, found), _dot(found, image)
    if self.acceleration:
      bent = own(self.curvature.bent(whole, batch, tangent(whole, found)))
      second, _, more = conjugate_gradients(damped, inverse, bent, None, *how_long)
      found, number = model_steps.accelerated(found, second, refused=False), number + more
    return found, *model, number


def conjugate_gradients(
  product: Callable[[Vector], Vector],
  precondition: Callable[[Vector], Vector],
  target: Vector,
  start: Vector | None,
  most: int,
  tolerance: Any,
) -> tuple[Vector, Vector, jax.Array]:
  """Solves product(x) = target; returns x, the residual target - product(x), and the iterations.

  It begins at `start`, or at 0 (None) if the model is better there; see `hessian_free`.
  """
  residual = target
  if start is not None:
    residual = _add(target, product(start), -1.0)
    better = _model(start, target, residual) < 0
    residual = jax.tree.map(lambda r, b: jnp.where(better, r, b), residual, target)
    start = {path: jnp.where(better, x, 0.0) for path, x in start.items()}
  start = jax.tree.map(jnp.zeros_like, target) if start is None else start
  ahead = precondition(residual)
  size = _dot(residual, ahead)

  def goes_on(carry):
    i, _x, _residual, _, size, values = carry
    span = jnp.maximum(_LEAST_SPAN, i // 10)
    value = values[i]
    slow = (value < 0) & (value - values[jnp.maximum(i - span, 0)] > span * tolerance * value)
    return (i < most) & (size > 0) & ~((i > span) & slow)

  def go(carry):
    i, x, residual, direction, size, values = carry
    image = product(direction)
    curve = _dot(direction, image)
    rate = jnp.where(curve > 0, size / jnp.where(curve > 0, curve, 1.0), 0.0)
    x, residual = _add(x, direction, rate), _add(residual, image, -rate)
    ahead = precondition(residual)
    new = jnp.where(curve > 0, _dot(residual, ahead), 0.0)
    direction = _add(ahead, direction, new / size)
    return i + 1, x, residual, direction, new, values.at[i + 1].set(_model(x, target, residual))

  values = jnp.zeros(most + 1, size.dtype).at[0].set(_model(start, target, residual))
  begin = jnp.zeros((), jnp.int32), start, residual, ahead, size, values
  number, x, residual, *_ = jax.lax.while_loop(goes_on, go, begin)
  return x, residual, number


def _model(x: Vector, target: Vector, residual: Vector) -> jax.Array:
  """x^T A x / 2 - target^T x, with A x = target - residual."""
  return -_dot(x, _add(target, residual, 1.0)) / 2


def _add(x: Vector, y: Vector, factor: Any) -> Vector:
  return {path: x[path] + factor * y[path] for path in x}


def _dot(x: Vector, y: Vector) -> jax.Array:
  return sum(jnp.vdot(x[path], y[path]) for path in x)


def _preconditioner(curvature: Curvature, state: Any, damping: jax.Array) -> Callable:
  """(A (x) G + damping I)^-1 of all layers; other parameters have the mean curvature of these."""
  blocks = {b.name: b for b in curvature.blocks if b.name in state.factors}
  inverses = state.inverses
  means = [
    (f.values[0] if block.kind == "diagonal" else algebra.eigenvalues(inverses[name])).ravel()
    for name, block in blocks.items()
    for f in [state.factors[name]]
  ]
  mean = jnp.concatenate(means).mean() if means else jnp.ones(())

  def inverse(v):
    found = {}
    for name, block in blocks.items():
      if block.kind == "diagonal":
        [path] = block.paths
        found[path] = v[path] / (state.factors[name].values[0] + damping)
      else:
        own = algebra.precondition(block, v, inverses[name], damping)
        trees.add_arrays(found, block, own)
    return {path: found.get(path, x / (mean + damping)) for path, x in v.items()}

  return inverse
