"""The curvature blocks of kfac-jax, fed with captured rows.

kfac-jax makes blocks for equations that its tracer finds in a program. Here an equation of
the wanted shape is written down alone, so that neither its tracer nor its registration runs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mixer_jax.runtime.imports import moved_names

with moved_names():
  import kfac_jax

# From here on a symmetric product in four parts is quicker than a whole one
# (measured on CPU, 4,096 rows: 0.91 of the time at 1,024, 0.87 at 2,048, 0.83 at 3,073).
_WIDE = 1024


class DenseRows(kfac_jax.DenseTwoKroneckerFactored):
  """A block of one matrix [d_in, d_out] over rows, as sums; a wide side may be diagonal.

  Args:
    inputs: shape of the input factor, [d_in, d_in] or [d_in].
    outputs: the same of the output factor.
    dtype: of the factors.
  """

  def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], dtype: Any):
    self._shapes, self._dtype = (inputs, outputs), dtype
    super().__init__(_equation((1, inputs[0]), (inputs[0], outputs[0])))

  def _init(self, rng, exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues):
    zeros = kfac_jax.utils.WeightedMovingAverage.zeros_array
    return self.State(cache={}, factors=tuple(zeros(s, self._dtype) for s in self._shapes))

  def update_curvature_matrix_estimate(
    self, state, estimation_data, ema_old, ema_new, identity_weight, batch_size
  ):
    """Adds sums of a a^T and d d^T in the type of factors, whatever precision the rows have."""
    state = state.copy()
    rows = estimation_data.primals.inputs[0], estimation_data.tangents.outputs[0]
    for factor, shape, x in zip(state.factors, self._shapes, rows):
      factor.update(_moment(x, self._dtype, diagonal=len(shape) == 1), ema_old, ema_new)
    return state


def second_moments(
  a: jax.Array,
  d: jax.Array,
  inputs: tuple[int, ...],
  outputs: tuple[int, ...],
  dtype: Any = "float32",
) -> tuple[jax.Array, jax.Array]:
  """The sums of a a^T and of d d^T over rows a [rows, d_in], d [rows, d_out], see `DenseRows`."""
  state = _updated(DenseRows(inputs, outputs, dtype), a, d)
  return tuple(factor.value for factor in state.factors)


def _updated(block, x, dy):
  """The state of a block after one batch, without any average over steps."""
  data = lambda inputs, outputs: kfac_jax.LayerData(inputs=inputs, outputs=outputs, params=())
  rows = kfac_jax.LayerVjpData(primals=data((x,), ()), tangents=data((), (dy,)))
  start = block.init(None, [], [], False)
  return block.update_curvature_matrix_estimate(start, rows, 0.0, 1.0, 0.0, len(x))


@functools.cache
def _equation(*shapes: tuple[int, ...]) -> Any:
  """The equation that the tag of a dense layer of arrays x, w of these shapes leaves in a program."""
  arrays = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
  tag = lambda x, w: kfac_jax.register_dense(x @ w, x, w, variant="dense")
  with moved_names():
    program = jax.make_jaxpr(tag)(*arrays)
  [found] = [e for e in program.eqns if isinstance(e.primitive, kfac_jax.LayerTag)]
  return found


_equation((1, 1), (1, 1))  # with another JAX it fails here, not in a run's first step


def moment_numbers(width: int) -> int:
  """How many numbers of x^T x, [width, width], are computed, and summed over devices."""
  if width < _WIDE:
    return width * width
  left, right = width // 2, width - width // 2
  return moment_numbers(left) + left * right + moment_numbers(right)


def _moment(x: jax.Array, dtype: Any, diagonal: bool = False) -> jax.Array:
  """x^T x in a type, or its diagonal; of a wide x the lower half is mirrored, not computed."""
  if diagonal:
    return jnp.square(x.astype(dtype)).sum(axis=0)
  whole = functools.partial(_product, dtype=dtype)
  if x.shape[1] < _WIDE:
    return whole(x, x)
  # For a TPU the parts of the factors of a Mixer-S/4 take XLA twice as long to compile.
  parts = functools.partial(_in_parts, dtype=dtype)
  return jax.lax.platform_dependent(x, tpu=lambda x: whole(x, x), default=parts)


def _in_parts(x: jax.Array, dtype: Any) -> jax.Array:
  width = x.shape[1]
  if width < _WIDE:
    return _product(x, x, dtype)
  left, right = x[:, : width // 2], x[:, width // 2 :]
  corner = _product(left, right, dtype)
  return jnp.block([[_in_parts(left, dtype), corner], [corner.T, _in_parts(right, dtype)]])


def _product(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
  return jnp.einsum("na,nb->ab", a, b, preferred_element_type=dtype)
