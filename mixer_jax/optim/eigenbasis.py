"""Optimizers in the eigenbasis of Kronecker factors.

A gradient V [d_in, d_out] becomes U_A^T V U_G, with the eigenvectors U_A, U_G of two factors; an
optax transform makes its step there, element by element, and the step is turned back. Adam in
the basis of V V^T and V^T V is SOAP (Vyas et al., 2024, https://arxiv.org/abs/2409.11321).
"""

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import algebra, averages, trees
from mixer_jax.optim.algebra import Decomposition
from mixer_jax.optim.curvature import patterns
from mixer_jax.optim.curvature.blocks import Block, Diagonals, Kronecker
from mixer_jax.optim.matrices import Matrices
from mixer_jax.optim.trees import by_path, covered_by, taken, with_directions


class InBasisState(NamedTuple):
  """State of SOAP, Shampoo, `scale_by_kfac_adam` and `scale_by_kfac_muon`, by the path of a layer.

  Attributes:
    count: number of updates so far, an int32 scalar.
    factors: moving averages, a `Kronecker` for each layer.
    estimates: how many estimates each layer's averages are of, int32 `[*stacked]`.
    basis: a pair (inputs, outputs) of eigendecompositions for each layer.
    inner: state of the transform of matrices in the basis.
    others: state of the transform of all other parameters, by path.
  """

  count: jax.Array
  factors: dict[str, Any]
  estimates: dict[str, jax.Array]
  basis: dict[str, Any]
  inner: Any
  others: Any


class Source(NamedTuple):
  """Where factors come from.

  Attributes:
    blocks: maps parameters by path to the blocks with a basis.
    estimate: maps (blocks, gradients by path, whole params, batch, rng) to fresh factors by name of
      the block.
    after: whether a step is made before its own gradient enters the factors; a gradient of zeros
      then enters, too.
    check: raises a ValueError for parameters that are not those of the source.
    growth: a basis is renewed before its period is over if a factor's trace has grown by more than
      this, since its eigenvalues are out of date then (behind a head that starts at zero, the trace
      grows from zero); None: it waits for its period.
    compare: looks at (gradients, whole params, batch, count), see `Curvature.compare`.
  """

  blocks: Callable[[dict[str, Any]], list[Block]]
  estimate: Callable[..., dict[str, Kronecker]]
  after: bool
  check: Callable[[Any], None] = lambda params: None
  growth: float | None = None
  compare: Callable[[Any, Any, Any, jax.Array], None] = lambda *arguments: None


def in_basis(
  inner: optax.GradientTransformation,
  others: optax.GradientTransformation,
  source: Source,
  factor_decay: Any,
  factor_period: Any,
  basis_period: Any,
  decomposition: Decomposition,
) -> optax.GradientTransformationExtraArgs:
  """Runs a transform of single elements in the eigenbasis of each layer's factors.

  When a basis changes, the first moments `mu` of the inner state turn with it exactly,
  R mu S^T with R = U_A,new^T U_A,old and S alike, so that they equal moments kept outside of
  the basis, without their two products a step. Second moments `nu` turn by the squares of R
  and S, as variances of uncorrelated elements do, and their means over the inputs, `outputs`, by those
  of S; with refresh="qr" they follow their vectors to other places and do not turn, as in the code of
  SOAP's authors.

  Args:
    inner: of matrices in the basis, such as `optax.scale_by_adam`. It gets the extra argument
      `basis`, and its state may have fields `mu`, `nu` and `outputs`.
    others: of the parameters without a basis.
    source: of the factors. With `after`, the first update is zero: it makes the first basis.
    factor_decay: of the moving averages of the factors, per renewal.
    factor_period: updates between renewals of the factors.
    basis_period: the same of the basis.
    decomposition: how bases are renewed.

  Returns:
    A transform with an `InBasisState`.

  Raises:
    ValueError: of `init`, parameters that are not the source's; of the update, gradients that lack
      some of them.
  """
  transforms = optax.with_extra_args_support(inner), optax.with_extra_args_support(others)
  periods = factor_period, basis_period
  own = _InBasis(*transforms, source, factor_decay, *periods, decomposition)
  return optax.GradientTransformationExtraArgs(own.init, own.update)


class _InBasis(NamedTuple):
  """The transform; its fields are the arguments of `in_basis`."""

  inner: optax.GradientTransformationExtraArgs
  others: optax.GradientTransformationExtraArgs
  source: Source
  factor_decay: Any
  factor_period: Any
  basis_period: Any
  decomposition: Decomposition

  def init(self, params: Any) -> InBasisState:
    if trees.is_placeholder(params):
      return InBasisState(0, 0, 0, 0, 0, 0)
    self.source.check(params)
    leaves = by_path(params)
    blocks = covered_by(self.source.blocks(leaves), leaves)
    rest = {path: jnp.zeros_like(trees.wide(x)) for path, x in _rest(blocks, leaves).items()}
    matrices = {b.name: jnp.zeros((*b.stacked, *b.factor_sizes), b.dtype) for b in blocks}
    return InBasisState(
      count=jnp.zeros((), jnp.int32),
      factors={b.name: algebra.initial_factors(b) for b in blocks},
      estimates={b.name: jnp.zeros(b.stacked, jnp.int32) for b in blocks},
      basis={b.name: algebra.initial_inverses(b, "exact") for b in blocks},
      inner=self.inner.init(matrices),
      others=self.others.init(rest),
    )

  def update(
    self, updates, state, params=None, *, batch=None, rng=None, model_params=None, **extra
  ):
    del extra
    leaves, source = by_path(updates), self.source
    blocks = covered_by(source.blocks(leaves), leaves)
    if missing := state.basis.keys() - {b.name for b in blocks}:
      raise ValueError(
        f"the gradients lack {min(missing)}; allowed: those of all parameters of init"
      )
    gradients = {path: trees.wide(g) for path, g in leaves.items()}
    whole = params if model_params is None else model_params
    source.compare(updates, whole, batch, state.count)
    fresh = lambda: source.estimate(blocks, gradients, whole, batch, rng)
    step = lambda state: self._step(state, blocks, gradients)
    if source.after:
      none = lambda state: (jax.tree.map(jnp.zeros_like, gradients), state)
      directions, state = jax.lax.cond(state.count > 0, step, none, state)
      state = self._renewed(state, fresh)
    else:
      directions, state = step(self._renewed(state, fresh))
    count = optax.safe_increment(state.count)
    return with_directions(updates, directions), state._replace(count=count)

  def _renewed(self, state, fresh):
    """The state with the factors, from `fresh`, and the basis that are due renewed."""
    count, source = state.count, self.source

    def average():
      about = state.estimates, self.factor_decay
      with jax.named_scope(averages.SCOPE):
        return averages.averaged(state.factors, fresh(), *about, skip_zeros=not source.after)

    def new_basis():
      about = state.basis, count, self.decomposition
      with jax.named_scope(algebra.SCOPE):
        basis, reordered = algebra.renewed_bases(factors, *about, floor=0.0)
        return basis, _carried(state.inner, state.basis, basis, reordered)

    kept = lambda: (state.factors, state.estimates)
    factors, estimates = jax.lax.cond(count % self.factor_period == 0, average, kept)
    due = count % self.basis_period == 0
    if source.growth is not None:
      due |= _grown(state.basis, factors, source.growth)
    basis, moments = jax.lax.cond(due, new_basis, lambda: (state.basis, state.inner))
    return state._replace(factors=factors, estimates=estimates, basis=basis, inner=moments)

  def _step(self, state, blocks, gradients):
    """The updates by path, of the blocks' matrices made in the basis, and the state."""
    products = self.decomposition.products
    turned = lambda b: algebra.rotated(_matrix(b, gradients), state.basis[b.name], products)
    given = {b.name: turned(b) for b in blocks}, state.inner
    matrices, moments = trees.typed_as(given, self.inner.update(*given, basis=state.basis))
    given = _rest(blocks, gradients), state.others
    updates, other = trees.typed_as(given, self.others.update(*given))
    for block in blocks:
      back = algebra.rotated_back(matrices[block.name], state.basis[block.name], products)
      trees.add_arrays(updates, block, back)
    return updates, state._replace(inner=moments, others=other)


def _grown(basis: dict[str, Any], factors: dict[str, Any], growth: float) -> jax.Array:
  """Whether a factor, of the inputs' side, has grown since its basis was made."""
  sides = [(basis[name][0], factors[name][0]) for name in basis]
  grown = [algebra.mean_eigenvalue(f) > growth * eigen.values.mean(axis=-1) for eigen, f in sides]
  return jnp.any(jnp.array([jnp.any(x) for x in grown] or [False]))


def _matrix(block: Block, gradients: dict[str, jax.Array]) -> jax.Array:
  return block.matrix(taken(block, gradients))


def _rest(blocks: list[Block], leaves: dict[str, Any]) -> dict[str, Any]:
  covered = {path for block in blocks for path in block.paths}
  return {path: x for path, x in leaves.items() if path not in covered}


def _carried(
  inner: Any, old: dict[str, Any], new: dict[str, Any], reordered: dict[str, Any]
) -> Any:
  """The moments of the inner state after a change of basis.

  `reordered` has the vectors that second moments go to: the new ones, or the old ones in the
  order of the new ones.
  """
  for field, basis, power in (("mu", new, 1), ("nu", reordered, 2), ("outputs", reordered, 2)):
    if hasattr(inner, field):
      pairs = {name: zip(old[name], basis[name]) for name in new}
      turns = {name: [_turn(*sides, power) for sides in pairs[name]] for name in new}
      turned = _turned if field != "outputs" else _turned_outputs
      moments = {n: turned(x, *turns[n]) for n, x in getattr(inner, field).items()}
      inner = inner._replace(**{field: moments})
  return inner


@jax.default_matmul_precision("highest")
def _turned(x: jax.Array, left: jax.Array | None, right: jax.Array | None) -> jax.Array:
  x = x if left is None else left @ x
  return x if right is None else x @ jnp.swapaxes(right, -2, -1)


def _turned_outputs(x: jax.Array, _: Any, right: jax.Array | None) -> jax.Array:
  return _turned(x[..., None, :], None, right)[..., 0, :]


@jax.default_matmul_precision("highest")
def _turn(old: algebra.Eigen, new: algebra.Eigen, power: int) -> jax.Array | None:
  """The rotation from old coordinates to new ones, or its squares; None: both are the identity."""
  if new.vectors is None:
    return None
  return (jnp.swapaxes(new.vectors, -2, -1) @ old.vectors) ** power


def gradient_source(
  max_factor: Any, matrices: Matrices | None = None, growth: float | None = None
) -> Source:
  """Makes the factors V V^T and V^T V of the gradient itself: no model is needed.

  `matrices` says which arrays are matrices, see `matrices.matrix_axes`; a side above max_factor keeps
  its coordinates. Other arrays have no basis.
  """
  matrices = matrices or Matrices()
  if isinstance(max_factor, jax.Array):
    raise ValueError(
      "max_factor is an array, and decides on shapes; allowed: a number, which"
      " optax.inject_hyperparams(..., static_args='max_factor') leaves one"
    )

  def blocks(leaves):
    found = []
    for path, parts in matrices.parts(leaves).items():
      shape = jnp.shape(leaves[path])
      for i, part in enumerate(part for part in parts if part.matrix):
        name = path if len(parts) == 1 else f"{path}[{i}]"
        limit = patterns.limit(max_factor, (path,))
        diagonal = tuple(size > limit for size in part.sizes)
        about = (part.sizes, diagonal, part.stacked, (part.view,))
        dtype = str(trees.wide_type(leaves[path]))
        found.append(Block(name, "kronecker", (path,), (shape,), *about, dtype=dtype))
    return found

  def estimate(blocks, gradients, params, batch, rng):
    del params, batch, rng
    return {b.name: _moments(b, _matrix(b, gradients)) for b in blocks}

  def check(params):
    trees.check_arrays(params)
    matrices.parts(by_path(params))

  return Source(blocks, estimate, True, check, growth)


def _moments(block: Block, v: jax.Array) -> Kronecker:
  """V V^T and V^T V, or their diagonal for a side without a basis."""

  def side(x, diagonal):
    return Diagonals(jnp.sum(x**2, axis=-1)) if diagonal else x @ jnp.swapaxes(x, -2, -1)

  return Kronecker(*map(side, (v, jnp.swapaxes(v, -2, -1)), block.diagonal))
