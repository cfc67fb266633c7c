"""A model's predictions, as curvature sees them: outputs, targets, and weights of rows."""

import math
from typing import Any, Callable, Mapping, NamedTuple

import jax
import jax.numpy as jnp

from mixer_jax.errors import reason
from mixer_jax.optim.curvature.likelihoods import likelihood_of

Params = Batch = Any
# Their squares are 0 in their type, and gradients through them are not.
_TINY = {"float32": 1e-24, "float64": 1e-180}


class Answer(NamedTuple):
  """The parts of a model's prediction."""

  outputs: Any
  targets: Any = None
  weights: Any = None
  tokens: Any = None


class Predictor:
  """A model whose outputs are those of a distribution.

  Args:
    predict: see `curvature.Curvature`.
    likelihood: the same.
    dtype: of outputs and weights.
  """

  def __init__(
    self, predict: Callable[[Params, Batch], Any], likelihood: Any, dtype: Any = jnp.float32
  ):
    self._predict, self.dtype = predict, dtype
    self.likelihood = None if likelihood is None else likelihood_of(likelihood)

  def answer(self, params: Params, batch: Batch) -> Answer:
    """The parts of a prediction (traceable); a ValueError if it is none."""
    answer = self._asked(params, batch)
    if self.likelihood is None:  # any outputs will do
      return Answer(answer)
    if not isinstance(answer, tuple) or self.likelihood.is_output(answer):
      answer = (answer,)
    first, *rest = answer
    if rest and isinstance(first, Mapping) and isinstance(rest[0], Mapping):
      rest = rest[set(rest[0]) == set(first) :]  # targets of several outputs
    if len(answer) > 2 and isinstance(answer[2], Mapping) and set(answer[2]) <= set(first):
      rest = [x for x in rest if x is not answer[2]]  # weights of outputs with batches of their own
    if len(answer) > 4 or any(isinstance(x, Mapping) for x in rest):
      raise ValueError(
        "predict returned a tuple that is not (outputs, targets) or (outputs, targets, weights),"
        " maybe with tokens; an apply with `mutable` returns its collections too: leave them out"
      )
    if complex_ones := [x.dtype for x in jax.tree.leaves(answer[0]) if jnp.iscomplexobj(x)]:
      raise ValueError(
        f"outputs are {complex_ones[0]}; allowed: real numbers, such as the real and imaginary parts"
      )
    return Answer(*answer)

  def _asked(self, params: Params, batch: Batch) -> Any:
    try:
      return self._predict(params, batch)
    except NameError as e:  # JAX's, of a collective
      if "unbound axis name" not in str(e):
        raise
      raise ValueError(
        f"predict uses an axis that is not bound here ({reason(e)}); build the optimizer inside of"
        " the shard_map or pmap, too"
      ) from e

  def outputs(self, params: Params, batch: Batch) -> Any:
    outputs = self.answer(params, batch).outputs
    return jax.tree.map(lambda y: y.astype(self.dtype), outputs)

  def weights(self, answer: Answer) -> tuple[Any, Any]:
    """The weights of outputs, and whether examples (or, of tokens, rows) count; or two None.

    Of an answer whose `tokens` alone tell padding, the second has ones.
    """
    if answer.weights is None:
      return None, None if answer.tokens is None else jnp.ones(len(answer.tokens), jnp.float32)
    weights = jnp.reshape(jax.tree.leaves(answer.weights)[0], self.weights_shape(answer))
    weights = weights.astype(self.dtype)
    rows = max(max(y.ndim for y in jax.tree.leaves(answer.outputs)) - 1, 1)
    counts = (weights.reshape(*weights.shape[:rows], -1) != 0).any(axis=-1)
    return weights, counts.astype(jnp.float32)

  def weights_shape(self, answer: Answer) -> tuple[int, ...]:
    """That of the weights without trailing axes of 1, which must begin those of the outputs."""
    shape = jax.tree.leaves(answer.weights)[0].shape
    while len(shape) > 1 and shape[-1] == 1:
      shape = shape[:-1]
    for outputs, labelled in self.likelihood.arrays(answer.outputs):
      allowed = [outputs.shape[:n] for n in range(1, outputs.ndim + 1 - labelled)]
      if shape not in allowed:
        raise ValueError(
          f"weights have shape {tuple(jax.tree.leaves(answer.weights)[0].shape)}; allowed for outputs"
          f" {tuple(outputs.shape)}: {', '.join(map(str, allowed))}"
        )
    return shape


def opened(x: jax.Array) -> jax.Array:
  """A matrix of zeros, such as a head at its start, as one of tiny numbers, which change no sum.

  Rows below it then tell by their gradients whether an output that counts depends on them.
  """
  if x.ndim < 2 or x.dtype.name not in _TINY:
    return x
  tiny = _TINY[x.dtype.name] * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
  return jnp.where((x == 0).all(), tiny, x)


def root_weights(weights: jax.Array | None, outputs: Any, axis_name: Any) -> Any:
  """The square roots of the weights that rows have in the mean, to multiply outputs by."""
  rows = jax.tree.map(lambda y: _row_sum(weights, y), outputs)
  if axis_name is not None:
    rows = jax.lax.psum(rows, axis_name)
  return jax.tree.map(lambda y, n: _row_scales(weights, y) * n**-0.5, outputs, rows)


def sums_of_weights(
  weights: jax.Array | None, rows: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
  """The sums of the weights, and of their squares, of rows of that shape; None: weights of 1."""
  if weights is None:
    weights = jnp.ones(rows, jnp.float32)
  if weights.ndim > len(rows):
    weights = weights.max(axis=-1)
  weights = weights.reshape(*weights.shape, *(1,) * (len(rows) - weights.ndim))
  whole = jnp.broadcast_to(weights, rows)
  return whole.sum(), jnp.square(whole).sum()


def _row_sum(weights: jax.Array | None, outputs: jax.Array) -> jax.Array:
  """The sum of the weights of rows; a row of outputs with weights of their own has the largest."""
  if weights is None:
    return jnp.asarray(math.prod(outputs.shape[:-1]), outputs.dtype)
  if weights.ndim == outputs.ndim:
    total = weights.max(axis=-1).sum()
  else:
    total = weights.sum() * math.prod(outputs.shape[weights.ndim : -1])
  return jnp.maximum(total, 1e-30)  # a batch of padding alone


def _row_scales(weights: jax.Array | None, y: jax.Array) -> jax.Array:
  """The square roots of the weights, as outputs y are scaled by them."""
  if weights is None:
    return jnp.ones((), jnp.float32)
  return jnp.sqrt(weights).reshape(*weights.shape, *(1,) * (y.ndim - weights.ndim))
