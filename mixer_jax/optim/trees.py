"""Trees of parameters and gradients by path, as blocks of a curvature see them."""

from typing import Any, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mixer_jax.optim import axes
from mixer_jax.optim.curvature.blocks import Block, path_name

_ATTENDING = ("query", "key", "value")  # layers of nn.MultiHeadDotProductAttention


def by_path(tree: Any) -> dict[str, jax.Array]:
  """The leaves by path.

  Raises a ValueError if a leaf is complex or split over explicit axes of a mesh, or if two leaves
  have one path.
  """
  leaves = {}
  for key, x in jax.tree_util.tree_leaves_with_path(tree):
    if (path := path_name(key)) in leaves:
      raise ValueError(f"two parameters have the path {path}; allowed: one")
    leaves[path] = x
  for path, x in leaves.items():
    if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
      raise ValueError(
        f"{path} is {x.dtype}; allowed: real numbers, such as its real and imaginary parts"
      )
    if isinstance(x, jax.Array) and axes.is_split(x):
      raise ValueError(
        f"{path} is split over explicit axes of a mesh, {jax.typeof(x)}; allowed: whole ones there, or"
        " a mesh of AxisType.Auto"
      )
  return leaves


def _placeholder() -> type:
  """The type that `optax.tree_map_params` hands to `init` in place of parameters."""
  seen: list[type] = []
  optax.tree_map_params(lambda params: seen.append(type(params)) or {}, lambda x: x, {})
  return seen[0]


_PLACEHOLDER = _placeholder()


def is_placeholder(params: Any) -> bool:
  """Whether `optax.tree_map_params` asks which parts of a state are trees like the parameters.

  A state then has a number for each part that is none, whatever structure the part has.
  """
  return isinstance(params, _PLACEHOLDER)


def check_arrays(params: Any) -> None:
  """Raises a ValueError for a single vector without a name: `optax.flatten` makes it of arrays."""
  leaves = by_path(params)
  if leaves.keys() == {""} and jnp.ndim(leaves[""]) == 1:
    raise ValueError(
      "the parameters are one vector without a name, as optax.flatten makes them, and this optimizer"
      " takes each array by itself: leave optax.flatten out, or name the vector, {'w': vector}"
    )


def covered_by(all_blocks: Sequence[Block], leaves: dict[str, Any]) -> list[Block]:
  """The blocks whose parameters are all in a (possibly masked) tree."""
  covered = []
  for block in all_blocks:
    present = [path in leaves for path in block.paths]
    if any(present) and not all(present):
      raise ValueError(f"the K-FAC block {block.name} needs all of {', '.join(block.paths)}")
    if all(present):
      covered.append(block)
  return covered


def whole_tree(params: Any, names: tuple[str, ...]) -> Any:
  """The parameters of the model, all of them."""
  if params is None:
    raise ValueError("the update needs params: tx.update(grads, state, params, batch=batch)")
  if missing := set(names) - set(by_path(params)):
    raise ValueError(
      f"the update needs all parameters, but {min(missing)} is hidden; pass the whole"
      " tree as the extra argument model_params"
    )
  return params


def check_names(params: Any, names: Collection[str]) -> None:
  """Raises a ValueError for a parameter that is not among `names`, those of the model."""
  if unknown := by_path(params).keys() - set(names):
    found = min(unknown) or "no names, as one array (optax.flatten hides them)"
    raise ValueError(
      f"the parameters have {found}, which the model has not; it has {', '.join(names)}"
    )


def wide(x: jax.Array) -> jax.Array:
  """The array in float32 if it is a float of 16 bits."""
  x = jnp.asarray(x)
  floating = jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if floating else x


def wide_type(tree: Any) -> np.dtype:
  """The type of sums over a tree of parameters: float64 if one of them is, else float32."""
  return jnp.result_type(jnp.float32, *(jnp.result_type(x) for x in jax.tree.leaves(tree)))


def typed_as(like: Any, tree: Any) -> Any:
  """Casts the floats of a tree to the types of another: injected numbers have those of parameters."""

  def one(x, y):
    types = jnp.result_type(x), jnp.result_type(y)
    return jnp.asarray(y, types[0]) if all(jnp.issubdtype(t, jnp.floating) for t in types) else y

  return jax.tree.map(one, like, tree)


def output_axes(path: str, leaves: Mapping[str, Any], stacked: int = 0) -> int:
  """How many last axes of a kernel, beside `stacked` leading ones, are outputs.

  A kernel that ends in the shape of its bias has as many as the bias (in Linen one for each of a
  layer's `features`). Without a bias in sight (a wrapper such as `optax.masked` may hide it), a query,
  key or value of Linen's attention [inputs, heads, features] has two. Any other array has one.
  """
  shape = jnp.shape(leaves[path])[stacked:]
  *layers, name = path.split("/")
  if name != "kernel":
    return 1
  if (bias := leaves.get(_sibling(path, "bias"))) is not None:
    outputs = jnp.shape(bias)[stacked:]
    return len(outputs) if outputs and shape[1:][-len(outputs) :] == outputs else 1
  return 2 if len(shape) == 3 and layers[-1:] and layers[-1] in _ATTENDING else 1


def is_bias(path: str, leaves: Mapping[str, Any]) -> bool:
  """Whether a parameter is named bias and stands beside a kernel."""
  return path == _sibling(path, "bias") and _sibling(path, "kernel") in leaves


def _sibling(path: str, name: str) -> str:
  return "/".join([*path.split("/")[:-1], name])


def with_directions(updates: Any, directions: dict[str, jax.Array]) -> Any:
  """The tree of updates with some leaves replaced by path; types stay."""
  return jax.tree_util.tree_map_with_path(
    lambda path, g: directions.get(path_name(path), g).astype(g.dtype), updates
  )


def add_arrays(updates: dict[str, jax.Array], block: Block, matrix: jax.Array) -> None:
  """Puts the arrays of a block's matrix among the updates; slices of one parameter add up."""
  for path, x in zip(block.paths, block.arrays(matrix)):
    updates[path] = updates[path] + x if path in updates else x


def taken(block: Block, gradients: dict[str, jax.Array]) -> list[jax.Array]:
  """The gradients of a block in its type. Raises a ValueError if one is missing or has another shape."""
  for path, shape in zip(block.paths, block.shapes):
    if path not in gradients:
      raise ValueError(f"the gradients lack {path}; allowed: those of all parameters of init")
    if gradients[path].shape != shape:
      given = f"{path} has shape {gradients[path].shape}"
      raise ValueError(f"the gradient of {given}; allowed: {shape}, that of the parameter")
  return [gradients[path].astype(block.dtype) for path in block.paths]
