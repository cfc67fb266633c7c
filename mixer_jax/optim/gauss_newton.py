"""Exact Gauss-Newton steps in the space of residuals, without the Jacobian.

With the residuals r [N] of a batch and their derivative J [N, parameters] (`curvature.residuals`),
the damped Gauss-Newton step is

  -(J^T J + damping I)^-1 J^T r = -J^T (J J^T + damping I)^-1 r,

where the right side needs an N x N matrix alone: it is cheaper where there are fewer residuals than
parameters (Chen and Heyl, 2024, https://arxiv.org/abs/2302.01941; Rende et al., 2024,
https://arxiv.org/abs/2310.05715). J J^T is made from the rows that layers see (`curvature.gram`),
and the product with J^T is one backward pass, so that J is not formed. Where there are at least four
times as many residuals as parameters, J itself is made from these rows, and the left side is solved
by QR decompositions. For equations solved by nets
this is the energy natural gradient of Müller and Zeinhofer (2023,
https://arxiv.org/abs/2302.13163); for any likelihood it is natural gradient descent (Martens, 2010
and 2020, https://arxiv.org/abs/1412.1193). Dangel et al. (2024, https://arxiv.org/abs/2405.15603)
approximate the same matrix for such losses by K-FAC.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

import math
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import axes, first_order, model_steps, trees
from mixer_jax.optim.curvature.curvature import Curvature, tangent

MAX_ROWS = 8192
# With so many residuals for each parameter, decompositions of J [N, P] cost less than those of J J^T.
_TALL = 4
_TRIES = 8  # dampings in one update


class GaussNewtonState(NamedTuple):
  """State of `gauss_newton`.

  Attributes:
    count: number of updates so far, an int32 scalar.
    damping: damping of the next update, a scalar.
    ratio: last reduction ratio, the loss's change over the model's; 1 before the first.
    rate: multiplier at which the next line search begins, a scalar.
    previous: last direction, like the parameters, in the type of sums.
  """

  count: jax.Array
  damping: jax.Array
  ratio: jax.Array
  rate: jax.Array
  previous: Any


def gauss_newton(
  curvature: Curvature,
  *,
  learning_rate: optax.ScalarOrSchedule = 1.0,
  damping: float = 1e-3,
  momentum: float = 0.0,
  bias_correction: bool = False,
  acceleration: bool = False,
  line_search: bool = False,
  damping_decay: float = 0.5,
  min_damping: float = 1e-20,
  max_damping: float = 1e8,
  max_rows: int = MAX_ROWS,
) -> optax.GradientTransformationExtraArgs:
  """Makes exact, damped Gauss-Newton steps, for up to a few thousand residuals or parameters.

  The step is -J^T (J J^T + damping I)^-1 r, with the residuals r [N] of the batch and their
  derivative J (`Curvature.residuals`). It follows from the batch alone: its targets give the
  residuals (without targets, as of equations, they are zero), so the likelihood must be that of the
  loss, and what was done to the gradient before, such as clipping or decay, does not count. The
  first update warns if the gradient is not that of the residuals. Only parameters in the tree of
  the gradient move; others are constants.

  The update takes `batch`. A batch whose residuals are not finite makes no step. The extra argument
  `value_fn` maps parameters to the loss on the same batch (`value`, the loss before the step, saves
  an evaluation). With it the damping adapts in every update to the ratio of the loss's reduction to
  the model's, and a step that does not lessen the loss is tried again with more damping, up to
  eight times for the same matrix, or not made. The rule has no scale of its own: as residuals
  vanish, the model becomes exact, and the damping falls to 1e-16 and below, where rounding hides
  the small eigenvalues of the matrix. Where Cholesky's method fails there, the damping of this
  update is multiplied by ten until it succeeds.

  With a `momentum` mu the direction is that of SPRING (Goldshlager et al., 2024,
  https://arxiv.org/abs/2401.10190, Section 3; for equations arXiv:2505.12149),

      d = argmin |J d + r|^2 + damping |d - mu d_previous|^2
        = mu d_previous - J^T (J J^T + damping I)^-1 (r + mu J d_previous).

  With `acceleration` the direction d becomes d - J^T (J J^T + damping I)^-1 b / 2, with the second
  derivative b of the outputs along d as residuals see it (`Residuals.bend`). It follows the curved
  valley of such losses (Transtrum and Sethna, 2012, https://arxiv.org/abs/1201.5885, Section 2.4),
  for one forward pass of second order and one backward pass. Where b's part without the half is
  longer than 3/4 of d, the damping is too small, and the step is tried again as above. On a small
  net that solves Poisson's equation, 100 steps with it went further than 800 without.

  Args:
    curvature: the `Curvature` of the model, whose likelihood has a factor; of its options
      `likelihood`, `in_axes` and `mesh` count.
    learning_rate: a number or a schedule, multiplies the direction.
    damping: the first damping, in the units of loss / parameter^2.
    momentum: mu above; 0 means none.
    bias_correction: whether the t-th direction, from t = 1 on, is divided by (1 - mu^(2t))^(1/2),
      since directions begin without a previous one. The published code does not.
    acceleration: whether the second order is added, see above.
    line_search: whether the step is multiplied by the power of two with the least loss.
    damping_decay: factor of the damping where the ratio is above 3/4; where it is below 1/4, the
      damping is divided by it.
    min_damping: least damping.
    max_damping: largest damping.
    max_rows: most residuals of a batch, unless there are at least four residuals for each
      parameter; the matrix of 8,192 in float64 takes 512 MiB.

  Returns:
    A transform with a `GaussNewtonState`.

  Raises:
    ValueError: the likelihood has no factor, or the curvature has an axis_name; in the update there
      are more residuals than max_rows, or a line search without `value_fn`.

  Example:
    After the example of `Curvature`:

    ```python
    tx = optim.gauss_newton(curvature)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params, batch=batch, value_fn=loss)
    ```
  """
  if curvature.likelihood.factor is None:
    raise ValueError("gauss_newton needs a likelihood with a factor")
  if curvature.axis_name is not None:
    raise ValueError(
      "gauss_newton needs the residuals of all devices at once: use it under jit, not in a shard_map"
    )
  how = model_steps.Damping(damping_decay, min_damping, max_damping)
  options = momentum, bias_correction, acceleration, line_search, max_rows
  own = _GaussNewton(curvature, learning_rate, damping, how, *options)
  return optax.GradientTransformationExtraArgs(own.init, own.update)


class _GaussNewton(NamedTuple):
  """The transform; its fields are the arguments of `gauss_newton`."""

  curvature: Curvature
  learning_rate: Any
  damping: Any
  how: model_steps.Damping
  momentum: Any
  bias_correction: bool
  acceleration: bool
  line_search: bool
  max_rows: int

  def init(self, params: Any) -> GaussNewtonState:
    if trees.is_placeholder(params):
      return GaussNewtonState(0, 0, 0, 0, params)
    trees.check_names(params, self.curvature.names)
    first_order.checked_rate(self.learning_rate)
    dtype = self.curvature.dtype
    one = lambda: jnp.ones((), dtype)  # one each: the state may be donated
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), dtype), params)
    count, first = jnp.zeros((), jnp.int32), jnp.array(self.damping, dtype)
    return GaussNewtonState(count, first, one(), one(), zeros)

  def update(
    self,
    updates,
    state,
    params=None,
    *,
    batch=None,
    value=None,
    value_fn=None,
    model_params=None,
    **extra,
  ):
    del extra
    curvature = self.curvature
    batch = curvature.some_of(batch, None)
    whole = trees.whole_tree(params if model_params is None else model_params, curvature.names)
    model_steps.check_searchable(self.line_search, value_fn)
    names = tuple(trees.by_path(updates))
    moved = {path: self.momentum * x for path, x in trees.by_path(state.previous).items()}
    over = lambda f: axes.automatic(lambda p, b, *rest: f(p, b, names, *rest), (whole, batch))
    own = lambda: over(self._gradient)(whole, batch)
    curvature.compare(updates, whole, batch, state.count, scale=True, own=own)
    system, rate = over(self._system)(whole, batch, moved), self._rate(state.count)

    def tried(lam):
      given = moved, system, lam, value_fn is not None
      way = model_steps.Direction(whole, *over(self._directed)(whole, batch, *given))
      about = self.how, self.line_search, before, value_fn
      return model_steps.stepped(way, rate, state, *about)

    before = value_fn(whole) if value is None and value_fn is not None else value
    found = tried(state.damping) if value_fn is None else _until_made(tried, state.damping)
    count = optax.safe_increment(state.count)
    previous = trees.with_directions(state.previous, found.kept)
    state = GaussNewtonState(count, found.damping, found.ratio, found.grid, previous)
    return trees.with_directions(updates, found.arrays), state

  def _rate(self, count):
    rate = self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate
    if not self.bias_correction:
      return rate
    mu = jnp.asarray(self.momentum, self.curvature.dtype)
    return rate / jnp.sqrt(1 - mu ** (2 * (count + 1)))

  def _gradient(self, whole, batch, names):
    space = self.curvature.residuals(whole, batch)
    return space.pull(space.vector)

  def _system(self, whole, batch, names, moved):
    """J J^T or, of J = Q R, both, with r, and what r becomes by the moved part of the direction."""
    space = self.curvature.residuals(whole, batch)
    rows, shapes = len(space.vector), trees.by_path(whole)
    still = isinstance(self.momentum, int | float) and self.momentum == 0
    ahead = jnp.zeros_like(space.vector) if still else space.push(tangent(whole, moved))
    if _TALL * sum(math.prod(jnp.shape(shapes[path])) for path in names) <= rows:
      jacobian = self.curvature.jacobian(whole, batch, names)
      return _Tall(*jnp.linalg.qr(jacobian)), space.vector, ahead
    check_rows(rows, self.max_rows)
    return _Wide(self.curvature.gram(whole, batch, names)), space.vector, ahead

  def _directed(self, whole, batch, names, moved, system, lam, told):
    """The direction by path, its slope and curvature, and the damping."""
    matrix, vector, ahead = system
    space = self.curvature.residuals(whole, batch)
    if isinstance(matrix, _Tall):
      back = lambda x: self.curvature.of_columns(x, whole, batch, names)
    else:
      back = lambda v: {path: trees.by_path(space.pull(v))[path] for path in names}
    with jax.default_matmul_precision("highest"):
      solve, lam = matrix.solver(lam)
      solution, change = solve(vector + ahead)
      change = ahead - change  # J d
    direction = {path: moved[path] - d for path, d in back(solution).items()}
    if self.acceleration:
      second = back(solve(space.bend(tangent(whole, direction)))[0])
      direction = model_steps.accelerated(direction, second, told)
    return direction, jnp.vdot(vector, change), jnp.vdot(change, change), lam


class _Wide(NamedTuple):
  """J J^T [N, N], for J^T (J J^T + damping I)^-1 v by Cholesky's method."""

  matrix: jax.Array

  def solver(self, damping: jax.Array) -> tuple[Callable, jax.Array]:
    """A function from v to the x with the step J^T x, and to J J^T x; and the damping that was taken."""
    lower, damping = root(self.matrix, damping)

    def solve(v):
      x = jax.scipy.linalg.cho_solve((lower, True), v)
      return x, self.matrix @ x

    return solve, damping


class _Tall(NamedTuple):
  """Q [N, P] and R [P, P] of J: the same step is argmin |J x - v|^2 + damping |x|^2.

  It is solved by a QR decomposition of R above damping^(1/2) I (Nocedal and Wright, 2006, Section
  10.3), in which the condition of J is not squared.
  """

  q: jax.Array
  r: jax.Array

  def solver(self, damping: jax.Array) -> tuple[Callable, jax.Array]:
    """A function from v to the step x, and to J x; and the damping that was taken."""
    damping = jnp.maximum(damping, jnp.finfo(self.r.dtype).tiny)
    identity = jnp.eye(len(self.r), dtype=self.r.dtype)
    q, r = jnp.linalg.qr(jnp.concatenate([self.r, jnp.sqrt(damping) * identity]))

    def solve(v):
      x = jax.scipy.linalg.solve_triangular(r, q[: len(r)].T @ (self.q.T @ v))
      return x, self.q @ (self.r @ x)

    return solve, damping


def _until_made(tried: Callable[[jax.Array], Any], damping: jax.Array) -> Any:
  """The step of `tried` with more and more damping, until one is made."""
  shapes = jax.eval_shape(tried, damping)
  none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)._replace(damping=damping)
  going = lambda own: ~own[1].made & (own[0] < _TRIES)
  again = lambda own: (own[0] + 1, tried(own[1].damping))
  return jax.lax.while_loop(going, again, (0, none))[1]


def check_rows(rows: int, most: int) -> None:
  """Raises a ValueError for too many residuals."""
  if rows > most:
    raise ValueError(
      f"the batch has {rows:,} residuals (rows times outputs), and their matrix {rows:,} rows; allowed:"
      f" up to max_rows, {most:,}; optim.hessian_free has no limit"
    )


def root(matrix: jax.Array, damping: jax.Array) -> tuple[jax.Array, jax.Array]:
  """L with L L^T = matrix + damping I, and the damping, tenfold until Cholesky's method succeeds."""
  identity = jnp.eye(len(matrix), dtype=matrix.dtype)
  lower = lambda shift: jnp.linalg.cholesky(matrix + shift * identity)
  failed = lambda own: ~jnp.isfinite(own[0]).all() & (own[1] < jnp.trace(matrix))
  more = lambda own: (lower(10 * own[1]), 10 * own[1])
  shift = jnp.maximum(damping, jnp.finfo(matrix.dtype).tiny)
  return jax.lax.while_loop(failed, more, (lower(shift), shift))
