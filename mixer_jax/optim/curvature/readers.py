"""Equations that read parameters: products, tables, biases, scales and shifts.

A reader maps (found, equation, values of its inputs, path) to the value of its result, and adds the
use to what is found; NotImplemented: it is no use.
"""

import math
from typing import Any, Callable

import numpy as np

from mixer_jax.optim.curvature import products, views
from mixer_jax.optim.curvature.uses import Constant, Found, Output, Path, Use
from mixer_jax.optim.curvature.views import View


def _add_use(found: Found, use: Use, equation: Any) -> Output:
  found.uses.append(use)
  shape, matrix = equation.outvars[0].aval.shape, use.view.positions.shape
  use.rows = math.prod(shape) / max(math.prod((*matrix[:-2], matrix[-1])), 1) * found.runs
  stack = math.prod(matrix[: use.view.stacked])
  # Which layer an index takes out of a stack is not known here: it may take one twice.
  use.once = found.runs == stack and not found.branches and not found.selections
  return Output(use, use.product.output_positions(shape))


def _product(arranged: Callable, kind: str) -> Callable:
  """A reader whose parameter is one of two operands; `arranged` gives matrix view and product."""

  def read(found, equation, given, path):
    seen = [i for i, x in enumerate(given) if isinstance(x, View)]
    if len(seen) != 1:
      return NotImplemented
    shapes = [v.aval.shape for v in equation.invars]
    made = arranged(equation.params, shapes, given[seen[0]], seen[0])
    if made is None:
      return NotImplemented
    return _add_use(found, Use(path, kind, made[0], 1 - seen[0], made[1]), equation)

  return read


def _gather(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  view, shape = given[0], equation.outvars[0].aval.shape
  if not isinstance(view, View) or isinstance(given[1], View):
    return NotImplemented
  if (how := products.lookup(equation.params, view.shape, len(shape))) is None:
    return NotImplemented
  if (
    how.axis == 0 and shape == view.shape[1:] and len(shape) > 1
  ):  # a loop takes one layer out of a stack
    found.selections.add(path)
    return views.stacked(view)
  if len(view.shape) < 2:
    return NotImplemented
  return _embedding(found, equation, view, path, how)


def _dynamic_slice(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  view, starts, sizes = given[0], given[1:], equation.params["slice_sizes"]
  if not isinstance(view, View):
    return NotImplemented
  if all(isinstance(s, Constant) for s in starts):
    at = [int(np.clip(s.value(), 0, n - k)) for s, n, k in zip(starts, view.shape, sizes)]
    limits = [s + k for s, k in zip(at, sizes)]
    return views.after(view, "slice", dict(start_indices=at, limit_indices=limits, strides=None))
  fixed = all(isinstance(s, Constant) for s in starts[1:]) and sizes[1:] == view.shape[1:]
  if not fixed or sizes[0] != 1 or len(view.shape) < 2:
    return NotImplemented
  if len(view.shape) > 2:
    found.selections.add(path)
    inner = views.stacked(view)
    return views.after(inner, "reshape", {"new_sizes": (1, *inner.shape)})
  return _embedding(found, equation, view, path, products.Lookup())


def _embedding(found, equation, view, path, how):
  matrix, product = products.table(view, how)
  return _add_use(found, Use(path, "embedding", matrix, 1, product), equation)


def _broadcast(equation: Any, given: list[Any]) -> list[Any]:
  """Values of the shape of the result: axes of size 1 are repeated without an equation."""
  shape = equation.outvars[0].aval.shape

  def one(x):
    if isinstance(x, Output):
      return Output(x.use, np.broadcast_to(x.positions, shape))
    if isinstance(x, View) and x.shape != shape:
      places = dict(shape=shape, broadcast_dimensions=tuple(range(len(shape))))
      return views.after(x, "broadcast_in_dim", places)
    return x

  return list(map(one, given))


def _add(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  """A bias, if it is added to the outputs of a product; else a shift."""
  given = _broadcast(equation, given)
  outputs = [x for x in given if isinstance(x, Output)]
  seen = [i for i, x in enumerate(given) if isinstance(x, View)]
  if not seen:
    return outputs[-1]  # both have the cotangent of the sum: a later bias belongs to either
  for output in outputs:
    bias = products.bias_of(output.use.view, output.positions, given[seen[0]])
    if bias is not None and output.use.bias is None:
      output.use.bias = bias
      return output
  for i in seen:
    found.uses.append(Use(path, "shift", given[i], 1 - i))
  return None


def _multiply(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  """A scale, or a constant mask of zeros and ones."""
  given = _broadcast(equation, given)
  seen = [i for i, x in enumerate(given) if isinstance(x, View)]
  if len(seen) != 1:
    return NotImplemented if seen else None
  view, other = given[seen[0]], given[1 - seen[0]]
  if isinstance(other, Constant):
    value = other.value()
    if np.isin(value, (0, 1)).all():
      return views.masked(view, value != 0)
    if max(view.shape, default=1) < math.prod(view.shape):  # not a scale beside running averages
      return NotImplemented
  found.uses.append(Use(path, "scale", view, 1 - seen[0]))
  return None


def _select(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  """`jnp.where(mask, parameter, 0)` of a constant mask."""
  which, *cases = given
  seen = [i for i, x in enumerate(cases) if isinstance(x, View)]
  rest = [x for x in cases if not isinstance(x, View)]
  zeros = all(isinstance(x, Constant) and not np.any(x.value()) for x in rest)
  if len(seen) != 1 or not zeros or not isinstance(which, Constant):
    return NotImplemented
  return views.masked(cases[seen[0]], which.value().astype(int) == seen[0])


def _follow(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  """The outputs of a product after an operation that moves them."""
  [output] = given
  if not isinstance(output, Output):
    return NotImplemented
  after = views.after(View(0, output.positions), equation.primitive.name, equation.params)
  return None if after is None else Output(output.use, after.positions)


_MOVES = "reshape transpose squeeze expand_dims broadcast_in_dim convert_element_type copy"
READERS = {
  **dict.fromkeys(_MOVES.split(), _follow),
  "dot_general": _product(products.dot, "dense"),
  "conv_general_dilated": _product(products.convolution, "conv"),
  "gather": _gather,
  "dynamic_slice": _dynamic_slice,
  "add": _add,
  "add_any": _add,
  "mul": _multiply,
  "select_n": _select,
}
