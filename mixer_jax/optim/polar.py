"""Orthogonal steps in the metric of Kronecker factors, for matrices in the factors' eigenbasis."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim.algebra import TINY, Eigen

# Coefficients of Muon's quintic iteration (Jordan, 2024, https://kellerjordan.github.io/posts/muon).
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
_TINY = 1e-20
# Added to the norm of the momentum, as in optax's Muon: where gradients vanish, so do the steps.
_EPS = 1e-8
# NorMuon's decay of the mean squares of neurons, and what is added to their roots, whose mean square is 1:
# a direction in which gradients hold rounding errors alone, 1e-5 of the others, makes no full step.
_NEURON_DECAY, _NEURON_EPS = 0.95, 1e-3


class MomentumState(NamedTuple):
  """State of `orthogonal`.

  Attributes:
    mu: the momentum of each matrix, [..., d_in, d_out] in the basis.
    outputs: the mean squares of its output directions, [..., d_out]; {} without `normuon`.
  """

  mu: Any
  outputs: Any


def orthogonal(
  momentum: float, ridge: float, rms: float, newton_schulz: int, normuon: bool
) -> optax.GradientTransformationExtraArgs:
  """A transform of matrices [..., d_in, d_out] in a basis; see `scale_by_kfac_muon`."""

  def step(matrix, sides, squares):
    left, right = (_inverse_root(side, ridge) for side in sides)
    unit, size = _normalised(matrix)
    whitened = left[..., :, None] * unit * right[..., None, :]
    found = left[..., :, None] * polar(whitened, newton_schulz) * right[..., None, :]
    if normuon:
      found, squares = neurons_balanced(found, squares)
    square = jnp.mean(jnp.square(found), axis=(-2, -1), keepdims=True)
    share = size / (size + _EPS)
    return found * (share * rms / jnp.sqrt(jnp.maximum(square, _TINY))), squares

  def update_fn(updates, state, params=None, *, basis, **extra):
    del params, extra
    moved = lambda mu, x: momentum * mu + x
    mu = jax.tree.map(moved, state.mu, updates)
    ahead = jax.tree.map(moved, mu, updates)  # Nesterov's
    found = {n: step(x, basis[n], state.outputs.get(n)) for n, x in ahead.items()}
    outputs = {n: squares for n, (_, squares) in found.items()} if normuon else {}
    return {n: x for n, (x, _) in found.items()}, MomentumState(mu, outputs)

  def init_fn(params):
    outputs = jax.tree.map(_no_squares, params) if normuon else {}
    return MomentumState(jax.tree.map(jnp.zeros_like, params), outputs)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def balance_neurons() -> optax.GradientTransformation:
  """`neurons_balanced` of a tree of matrices; its state is their mean squares."""

  def update_fn(updates, state, params=None):
    del params
    pairs = jax.tree.map(neurons_balanced, updates, state)
    return jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0, 0)), pairs)

  return optax.GradientTransformation(lambda params: jax.tree.map(_no_squares, params), update_fn)


def _no_squares(matrix: jax.Array) -> jax.Array:
  return jnp.zeros_like(matrix[..., 0, :])


def neurons_balanced(step: jax.Array, squares: jax.Array) -> tuple[jax.Array, jax.Array]:
  """NorMuon's normalisation (Li et al., 2025, https://arxiv.org/abs/2510.05491), of one step.

  Each neuron's part of the step, a column here, is divided by the root of its running mean square.
  The Frobenius norm stays as it is; mean squares are those of a step of mean square 1.

  Args:
    step: [..., d_in, d_out], orthogonalised.
    squares: running mean squares of the neurons, [..., d_out].

  Returns:
    The step and the mean squares, renewed.
  """
  lengths = jnp.sum(jnp.square(step), axis=-2)  # squared, as is the whole one
  whole = jnp.sum(lengths, axis=-1, keepdims=True)
  fresh = step.shape[-1] * lengths / jnp.maximum(whole, _TINY)
  squares = _NEURON_DECAY * squares + (1 - _NEURON_DECAY) * fresh
  scales = 1.0 / (jnp.sqrt(squares) + _NEURON_EPS)
  new = jnp.sum(lengths * jnp.square(scales), axis=-1, keepdims=True)
  scales = scales * jnp.sqrt(whole / jnp.maximum(new, _TINY))
  return step * scales[..., None, :], squares


def _inverse_root(side: Eigen, ridge: float) -> jax.Array:
  """(s / mean(s) + ridge)^(-1/2) of the eigenvalues s [..., d], over its value at their mean.

  They are ones if all eigenvalues are 0. The division changes no step, and keeps those of a large
  ridge in the range of float32.
  """
  mean = side.values.mean(axis=-1, keepdims=True)
  relative = side.values / jnp.where(mean > 0, mean, 1.0)
  return jnp.where(mean > 0, (relative + ridge) / (1.0 + ridge), 1.0) ** -0.5


def polar(x: jax.Array, steps: int) -> jax.Array:
  """Approximates X (X^T X)^(-1/2) for X [..., n, m]; its singular values are between 0.7 and 1.2.

  Small singular values need more steps: five do not bring those below 1e-3 of the Frobenius norm there.
  With n at most half of m, or the reverse, the steps run in threes on X X^T [n, n] alone, in
  fewer operations (0.63 for m = 4 n): X p(X X^T) has the same polynomial p.
  """
  if x.shape[-2] > x.shape[-1]:
    return _transposed(polar(_transposed(x), steps))
  x, _ = _normalised(x)
  # No more than three: a rounding error below zero grows twelvefold in each, and a new X X^T has none.
  group = 3 if 2 * x.shape[-2] <= x.shape[-1] else 1
  x = jax.lax.fori_loop(0, steps // group, lambda _, x: _steps(x, group), x)
  if not isinstance(steps, int):  # traced, as by optax.inject_hyperparams
    return jax.lax.fori_loop(0, steps % group, lambda _, x: _steps(x, 1), x)
  return _steps(x, steps % group) if steps % group else x


def _steps(x: jax.Array, count: int) -> jax.Array:
  """Steps of Newton and Schulz on X, all but the last product on X X^T."""
  gram = x @ _transposed(x)
  total = factor = _polynomial(gram)
  for _ in range(count - 1):
    gram = factor @ gram @ factor
    factor = _polynomial(gram)
    total = factor @ total
  return total @ x


def _normalised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """X [..., n, m] divided by its Frobenius norm, and the norm [..., 1, 1]; no square overflows."""
  largest = jnp.maximum(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True), TINY)
  x = x / largest
  norm = jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)), 1.0)
  return x / norm, jnp.where(largest > TINY, norm * largest, 0.0)


def _polynomial(gram: jax.Array) -> jax.Array:
  eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
  return _LINEAR * eye + _CUBIC * gram + _QUINTIC * (gram @ gram)


def _transposed(x: jax.Array) -> jax.Array:
  return jnp.swapaxes(x, -2, -1)
