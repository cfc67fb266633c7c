"""How a part of a program sees a parameter: through reshapes, transposes, slices, masks.

A `View` pushes an array of positions (`arange` of the parameter) through the chain of operations
between a parameter and the product that reads it. Whatever the chain is, the array then says
which elements the product multiplies: kernels in PyTorch's layout, slices of fused heads, stacks
of `scan` and a parameter that is used twice are all told apart by positions alone.
"""

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PARTS = ("split", "unstack")  # operations of several results
MASKED = -1  # the position of an element that a constant mask has set to zero


class View(NamedTuple):
  """Some elements of a parameter, in the order in which a program sees them.

  Attributes:
    leaf: number of the parameter among the leaves of the tree.
    positions: int32 [*stacked, *shape], the place in the flat parameter of each element.
    stacked: number of leading axes that a scan around the program has taken off.
    chain: operations that lead from the parameter to this array, each a function of an array.
    uncut: the view before a leading part was cut off ([:n], as for shorter sequences), or None.
  """

  leaf: int
  positions: np.ndarray
  stacked: int = 0
  chain: tuple[Callable, ...] = ()
  uncut: "View | None" = None

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape that the program sees."""
    return self.positions.shape[self.stacked :]

  def read(self, x: jax.Array) -> jax.Array:
    """The parameter as the program sees it, [*stacked, *shape]."""
    for operation in self.chain:
      x = operation(x)
    return x

  def _then(
    self, positions: np.ndarray, operation: Callable, uncut: "View | None" = None
  ) -> "View":
    mapped = operation
    for _ in range(self.stacked):
      mapped = jax.vmap(mapped)
    return self._replace(positions=positions, chain=(*self.chain, mapped), uncut=uncut)


def whole(leaf: int, shape: tuple[int, ...]) -> View:
  """The view of all of a parameter."""
  size = int(np.prod(shape, dtype=np.int64))
  return View(leaf, np.arange(size, dtype=np.int32).reshape(shape))


def after(view: View, name: str, params: dict[str, Any]) -> View | None:
  """The view after an operation with the name and parameters of its equation, or None."""
  handler = _OPERATIONS.get(name)
  return handler(view, params) if handler else None


def parts(view: View, name: str, params: dict[str, Any]) -> list[View]:
  """The views that one of `PARTS` makes of one; those of `unstack` lose the axis."""
  axis, keeps_axis = params["axis"], name == "split"
  sizes = params["sizes"] if keeps_axis else (1,) * view.shape[axis]
  ends = np.cumsum(sizes)
  cut = [_range(view, axis, int(end) - size, int(end)) for size, end in zip(sizes, ends)]
  return cut if keeps_axis else [without_axis(part, axis) for part in cut]


def masked(view: View, mask: np.ndarray) -> View:
  """The view with zeros where a constant mask of its shape is not set."""
  mask = np.broadcast_to(mask, view.shape)
  return view._then(
    np.where(mask, view.positions, MASKED),
    lambda x: jnp.where(mask, x, jnp.zeros_like(x)),
    view.uncut,
  )


def columns(view: View, places: np.ndarray) -> View:
  """The view of some columns of a matrix."""
  start = int(places[0])
  if np.array_equal(places, np.arange(start, start + len(places))):
    return _range(view, 1, start, start + len(places))
  return view._then(view.positions[..., places], lambda x: x[..., places])


def stacked(view: View) -> View:
  """The view of one layer of a stack, inside of a scan over the leading axis."""
  return view._replace(stacked=view.stacked + 1, uncut=None)


def without_axis(view: View, axis: int) -> View:
  """The view without an axis of size 1."""
  return _reshape(view, {"new_sizes": view.shape[:axis] + view.shape[axis + 1 :]})


def _lead(view: View) -> tuple[int, ...]:
  return view.positions.shape[: view.stacked]


def _same(view: View, params: dict[str, Any]) -> View:
  return view


def _convert(view: View, params: dict[str, Any]) -> View | None:
  """Products of complex rows have no real factors."""
  return None if jnp.issubdtype(params["new_dtype"], jnp.complexfloating) else view


def _reshape(view: View, params: dict[str, Any]) -> View:
  sizes = tuple(params["new_sizes"])
  return view._then(view.positions.reshape(*_lead(view), *sizes), lambda x: x.reshape(sizes))


def _transpose(view: View, params: dict[str, Any]) -> View:
  order, n = tuple(params["permutation"]), view.stacked
  positions = view.positions.transpose(*range(n), *(n + i for i in order))
  uncut = view.uncut and _transpose(view.uncut, params)
  return view._then(positions, lambda x: x.transpose(order), uncut)


def _squeeze(view: View, params: dict[str, Any]) -> View:
  dropped = {d % len(view.shape) for d in params["dimensions"]}
  return _reshape(view, {"new_sizes": [n for i, n in enumerate(view.shape) if i not in dropped]})


def _expand_dims(view: View, params: dict[str, Any]) -> View:
  shape = list(view.shape)
  for d in sorted(params["dimensions"]):
    shape.insert(d, 1)
  return _reshape(view, {"new_sizes": shape})


def _broadcast(view: View, params: dict[str, Any]) -> View:
  shape, places = tuple(params["shape"]), params["broadcast_dimensions"]
  inner = [1] * len(shape)
  for size, place in zip(view.shape, places):
    inner[place] = size
  positions = view.positions.reshape(*_lead(view), *inner)
  positions = np.broadcast_to(positions, (*_lead(view), *shape))
  return view._then(positions, lambda x: jnp.broadcast_to(x.reshape(inner), shape))


def _slice(view: View, params: dict[str, Any]) -> View:
  strides = params["strides"] or (1,) * len(view.shape)
  cut = tuple(map(slice, params["start_indices"], params["limit_indices"], strides))
  positions = view.positions[(slice(None),) * view.stacked + cut]
  leading = not any(params["start_indices"]) and set(strides) == {1}
  return view._then(positions, lambda x: x[cut], (view.uncut or view) if leading else None)


def _range(view: View, axis: int, start: int, end: int) -> View:
  rank = len(view.shape)
  starts, ends = [0] * rank, list(view.shape)
  starts[axis], ends[axis] = start, end
  return _slice(view, {"start_indices": starts, "limit_indices": ends, "strides": None})


def _reverse(view: View, params: dict[str, Any]) -> View:
  axes = tuple(params["dimensions"])
  positions = np.flip(view.positions, [view.stacked + a for a in axes])
  return view._then(positions, lambda x: jnp.flip(x, axes))


_IDENTITIES = (
  "copy copy_p reduce_precision optimization_barrier sharding_constraint"
  " pvary pcast name reshard mesh_cast"
)
_OPERATIONS = dict.fromkeys(_IDENTITIES.split(), _same) | {
  "convert_element_type": _convert,
  "reshape": _reshape,
  "transpose": _transpose,
  "squeeze": _squeeze,
  "expand_dims": _expand_dims,
  "broadcast_in_dim": _broadcast,
  "slice": _slice,
  "rev": _reverse,
}
