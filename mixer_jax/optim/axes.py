"""Axes of devices around K-FAC: manual ones, where a batch is spread by hand, and explicit ones."""

from typing import Any, Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec


def check(axis_name: Any, batch: Any) -> None:
  """Raises a ValueError if devices would drift apart, each with statistics of its own part of a batch.

  A checked `shard_map` knows over which axes the batch is spread; `axis_name` must have exactly these.
  """
  before_0_10 = getattr(jax.core, "unsafe_get_axis_names_DO_NOT_USE", tuple)  # pmap's, there
  manual, names = _manual(), set(_names(axis_name))
  for name in names:
    try:
      jax.lax.axis_size(name)
    except NameError:
      raise ValueError(
        f"axis_name is {name!r}, no axis of a shard_map or pmap around the update; allowed under"
        " jit: None"
      ) from None
  copies = (manual if is_checked() else set()) - _spread_over(batch)
  shown = lambda axes: ", ".join(sorted(map(str, axes)))
  if ({*manual, *before_0_10()} - copies) - names:
    raise ValueError(
      f"K-FAC is inside shard_map or pmap over {shown({*manual, *before_0_10()})}; name the axes"
      " over which the batch is spread: axis_name (a `jax.vmap` over independent runs has none:"
      " leave out its own axis_name)"
    )
  if names & copies:
    raise ValueError(
      f"axis_name has {shown(names & copies)}, over which the batch is not spread; allowed:"
      f" {shown(manual - copies) or 'None'}"
    )


def check_distinct(axis_name: Any) -> None:
  """Raises a ValueError for several axes whose devices may hold copies of an example: it would count twice."""
  several = [
    name for name in _names(axis_name) if name in _manual() and jax.lax.axis_size(name) > 1
  ]
  if len(several) > 1 and not is_checked():
    raise ValueError(
      f'eigenvalues="batch" over the axes {", ".join(map(str, several))} needs a shard_map with'
      " check_vma=True, which tells over which of them the batch is spread"
    )


def _names(axis_name: Any) -> tuple:
  return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())


def _manual() -> set:
  """The axes of devices of the `shard_map` around the call, or of a pmap from JAX 0.10 on."""
  return set(jax.sharding.get_abstract_mesh().manual_axes)


def is_checked() -> bool:
  """Whether the `shard_map` around the call is checked: it then knows over which axes an array varies."""
  return any(_varying_over(jax.lax.axis_index(name)) for name in _manual())


def _spread_over(batch: Any) -> frozenset:
  return frozenset().union(*map(_varying_over, jax.tree.leaves(batch)))


def automatic(estimate: Callable, arrays: Any) -> Callable:
  """Under a mesh of explicit axes, leaves the sharding inside a function to the compiler."""
  for x in jax.tree.leaves(arrays):
    mesh = jax.typeof(x).sharding.mesh
    if axes := mesh.explicit_axes:
      whole = NamedSharding(mesh, PartitionSpec())
      return jax.sharding.auto_axes(estimate, axes=axes, out_sharding=whole)
  return estimate


def is_split(x: jax.Array) -> bool:
  """Whether explicit axes of a mesh split an array."""
  sharding = jax.typeof(x).sharding
  names = (part if isinstance(part, tuple) else (part,) for part in sharding.spec)
  return any(name in sharding.mesh.explicit_axes for part in names for name in part)


def _varying_over(x: jax.Array) -> frozenset:
  """The manual axes whose devices have arrays of their own, as a checked `shard_map` sees it."""
  array = jax.typeof(x)
  kind = getattr(array, "manual_axis_type", None)  # from JAX 0.10 on
  return array.vma if kind is None else kind.varying


def varying(tree: Any, axis_name: Any) -> Any:
  """Arrays that every device of a manual axis has of its own, as a checked `shard_map` asks."""
  if axis_name is None or not jax.sharding.get_abstract_mesh().manual_axes:
    return tree

  def cast(x):
    others = tuple(name for name in _names(axis_name) if name not in _varying_over(x))
    if not others:
      return x
    if hasattr(jax.lax, "pcast"):
      return jax.lax.pcast(x, others, to="varying")
    return jax.lax.pvary(x, others)

  return jax.tree.map(cast, tree)


def summed(x: jax.Array, like: Any, arrays: Any) -> jax.Array:
  """The sum of x over the axes of devices over which `arrays` vary and `like` does not."""
  over = tuple(_spread_over(arrays) - _spread_over(like))
  return jax.lax.psum(varying(x, over), over) if over else x
