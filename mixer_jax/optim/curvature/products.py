"""Products of rows with a parameter as a matrix: dot_general, convolutions, tables of embeddings.

Every product is brought to the form y = a W with rows a [*blocks, rows, d_in], W [*blocks, d_in,
d_out] and y [*blocks, rows, d_out]: contracted axes of the parameter are its inputs, free ones its
outputs, batched ones and groups of a convolution are blocks, matrices of their own.
"""

import math
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.optim.curvature import views
from mixer_jax.optim.curvature.views import View


class Product(NamedTuple):
  """How operand and result of an equation are rows.

  Attributes:
    inputs: from the operand to rows a [*blocks, rows, d_in]; of a table to ids [rows].
    outputs: from the result, or its gradient, to rows [*blocks, rows, d_out].
    place: for each axis of the result how far one step moves the output, block * d_out + i.
    patches: whether rows are a convolution's patches.
    table: whether inputs are ids of one-hot rows.
  """

  inputs: Callable[[jax.Array], jax.Array]
  outputs: Callable[[jax.Array], jax.Array]
  place: tuple[int, ...]
  patches: bool = False
  table: bool = False

  def output_positions(self, shape: tuple[int, ...]) -> np.ndarray:
    """Which output, block * d_out + i, each element of a result of that shape is."""
    total = np.zeros((1,) * len(shape), np.int32)
    for axis, (size, step) in enumerate(zip(shape, self.place)):
      if step:
        total = total + np.expand_dims(
          np.arange(size, dtype=np.int32) * step, [i for i in range(len(shape)) if i != axis]
        )
    return np.broadcast_to(total, shape)


def dot(
  params: dict[str, Any], shapes: list[tuple[int, ...]], view: View, side: int
) -> tuple[View, Product]:
  """A `dot_general` whose operand of number `side` is the parameter."""
  contracted, batched = params["dimension_numbers"]
  own, other = shapes[side], shapes[1 - side]
  pairs = sorted(zip(contracted[side], contracted[1 - side]))  # in the parameter's order
  own_in, other_in = [a for a, _ in pairs], [b for _, b in pairs]
  own_batch, other_batch = batched[side], batched[1 - side]
  own_free = [i for i in range(len(own)) if i not in (*own_in, *own_batch)]
  other_free = [i for i in range(len(other)) if i not in (*other_in, *other_batch)]
  size = lambda axes: math.prod(own[i] for i in axes)
  blocks, d_in, d_out = (size(own_batch),) * bool(own_batch), size(own_in), size(own_free)
  order = (*own_batch, *own_in, *own_free)
  matrix = _arranged(view, order, (*blocks, d_in, d_out))
  n, rank = len(own_batch), len(own_batch) + len(own_free) + len(other_free)
  free = range(n, n + len(own_free)) if side == 0 else range(n + len(other_free), rank)
  rows = [i for i in range(n, rank) if i not in free]

  def inputs(a):
    return a.transpose(*other_batch, *other_free, *other_in).reshape(*blocks, -1, d_in)

  def outputs(y):
    return y.transpose(*range(n), *rows, *free).reshape(*blocks, -1, d_out)

  place = [0] * rank
  _fill(place, free, [own[i] for i in own_free], 1)
  _fill(place, range(n), [own[i] for i in own_batch], d_out)
  return matrix, Product(inputs, outputs, tuple(place))


def convolution(
  params: dict[str, Any], shapes: list[tuple[int, ...]], view: View, side: int
) -> tuple[View, Product] | None:
  """A `conv_general_dilated` whose kernel is the parameter."""
  if side != 1 or params["batch_group_count"] != 1:
    return None
  numbers, groups, shape = params["dimension_numbers"], params["feature_group_count"], shapes[1]
  out, channel, *space = numbers.rhs_spec
  split = lambda axes: [i + (i > out) for i in axes]  # the axis of outputs becomes two
  inner = sorted([channel, *space])
  d_in, d_out = math.prod(shape[i] for i in inner), shape[out] // groups
  apart = views.after(
    view, "reshape", {"new_sizes": (*shape[:out], groups, d_out, *shape[out + 1 :])}
  )
  order = (out, *split(inner), out + 1)
  blocks = (groups,) if groups > 1 else ()
  matrix = _arranged(apart, order, (*blocks, d_in, d_out))
  kernel_order = [[channel, *space].index(i) for i in inner]
  patches = _patches(params, tuple(shape[i] for i in space))

  def inputs(x):
    rows = patches(x)  # [rows, channels, *kernel]
    rows = rows.reshape(len(rows), groups, -1, *rows.shape[2:])
    rows = rows.transpose(1, 0, *(2 + i for i in kernel_order))
    return rows.reshape(*blocks, rows.shape[1], d_in)

  def outputs(y):
    y = jnp.moveaxis(y, numbers.out_spec[1], -1)
    y = y.reshape(-1, groups, d_out).swapaxes(0, 1)
    return y.reshape(*blocks, -1, d_out)

  place = [0] * len(shape)
  place[numbers.out_spec[1]] = 1
  return matrix, Product(inputs, outputs, tuple(place), patches=True)


def _patches(params: dict[str, Any], size: tuple[int, ...]) -> Callable:
  """A function from the operand of a convolution to its patches, [rows, channels, *size]."""
  rank = len(size)
  plain = {*params["lhs_dilation"], *params["rhs_dilation"]} <= {1}
  unpadded = not any(map(any, params["padding"]))
  apart = plain and unpadded and tuple(params["window_strides"]) == size
  batch, channel, *space = params["dimension_numbers"].lhs_spec
  spec = "".join(chr(ord("a") + i) for i in range(rank))
  numbers = (f"N{spec}C", f"{spec}IO", f"N{spec}C")

  def of_blocks(x):
    counts = [n // k for n, k in zip(x.shape[1:], size)]
    x = x[(slice(None), *(slice(n * k) for n, k in zip(counts, size)))]
    x = x.reshape(len(x), *(s for pair in zip(counts, size) for s in pair), x.shape[-1])
    order = [0, *range(1, 2 * rank, 2), 2 * rank + 1, *range(2, 2 * rank + 1, 2)]
    return x.transpose(order).reshape(-1, x.shape[-1], *size)

  def of_any(x):
    # A kernel that copies each entry of a patch; every channel is a group of its own.
    channels, entries = x.shape[-1], math.prod(size)
    kernel = jnp.eye(entries, dtype=x.dtype).reshape(*size, 1, 1, entries)
    kernel = jnp.broadcast_to(kernel, (*size, 1, channels, entries))
    kernel = kernel.reshape(*size, 1, channels * entries)
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    copied = jax.lax.conv_general_dilated(
      x,
      kernel,
      **{name: params[name] for name in names},
      dimension_numbers=numbers,
      feature_group_count=channels,
      precision="highest",
    )
    return copied.reshape(-1, channels, *size)

  def patches(x):
    x = x.transpose(batch, *space, channel)
    return of_blocks(x) if apart else of_any(x)

  return patches


class Lookup(NamedTuple):
  """How a gather takes whole entries of a table.

  Attributes:
    axis: of the table, along which the entries lie.
    column: which number of an index is the entry.
    order: of the result's axes: those of the ids, then those of an entry.
  """

  axis: int = 0
  column: int | None = None
  order: tuple[int, ...] | None = None


def lookup(params: dict[str, Any], shape: tuple[int, ...], rank: int) -> Lookup | None:
  """How a gather with a result of this rank takes whole entries, or None.

  An index may have numbers for the other axes, too, which are taken whole from their start.
  """
  numbers, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
  columns, collapsed = map(tuple, (numbers.start_index_map, numbers.collapsed_slice_dims))
  cut = [i for i, (k, n) in enumerate(zip(sizes, shape)) if k != n] or list(columns)
  dropped = params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
  simple = (
    len(cut) == 1
    and cut[0] in columns
    and sizes[cut[0]] == 1
    and collapsed in ((), (cut[0],))
    and (len(columns) == 1 or not dropped)
    and not getattr(numbers, "operand_batching_dims", ())
  )
  if not simple:
    return None
  offsets = tuple(numbers.offset_dims)
  order = (*(i for i in range(rank) if i not in offsets), *offsets)
  return Lookup(cut[0], columns.index(cut[0]), order)


def table(view: View, how: Lookup) -> tuple[View, Product]:
  """A table from which ids take entries, as [words, entry]."""
  axes = [how.axis, *(i for i in range(len(view.shape)) if i != how.axis)]
  words = view.shape[how.axis]
  d_out = math.prod(view.shape) // max(words, 1)
  matrix = _arranged(view, axes, (words, d_out))
  ids = lambda x: (x if how.column is None else x[..., how.column]).reshape(-1)
  rows = lambda y: (y if how.order is None else y.transpose(how.order)).reshape(-1, d_out)
  return matrix, Product(ids, rows, (), table=True)


def bias_of(matrix: View, positions: np.ndarray, view: View) -> View | None:
  """The view [*blocks, d_out] of what is added to the outputs of a product, or None.

  `positions` says which output each element of the sum is, `view` is what is added there. Each
  output must get one element of its own.
  """
  if positions.shape != view.shape or matrix.stacked != view.stacked:
    return None
  *blocks, _, d_out = matrix.shape
  count = math.prod(blocks) * d_out
  places = positions.reshape(-1)
  if not count:
    return None
  first = np.full(count, -1, np.int64)
  first[places[::-1]] = np.arange(len(places))[::-1]
  if (first < 0).any():
    return None
  lead = view.positions.shape[: view.stacked]
  flat = view.positions.reshape(*lead, -1)
  taken = flat[..., first]
  if (flat != taken[..., places]).any():
    return None
  if any(len(np.unique(row)) < count for row in taken.reshape(-1, count)):
    return None
  pick = lambda x: x.reshape(-1)[first].reshape(*blocks, d_out)
  return view._then(taken.reshape(*lead, *blocks, d_out), pick)


def _arranged(view: View, order: Sequence[int], shape: tuple[int, ...]) -> View:
  view = views.after(view, "transpose", {"permutation": tuple(order)})
  uncut = view.uncut
  matrix = views.after(view, "reshape", {"new_sizes": shape})
  if uncut is not None and len(uncut.shape) == len(shape):
    matrix = matrix._replace(uncut=uncut)
  return matrix


def _fill(place: list[int], axes: Sequence[int], sizes: Sequence[int], step: int) -> None:
  for axis, size in reversed(list(zip(axes, sizes))):
    place[axis] = step
    step *= size
