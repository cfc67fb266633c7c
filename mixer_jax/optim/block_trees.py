"""Trees of parameters and gradients, as the blocks of a Kronecker-factored curvature see them."""

from typing import Any, Sequence

import jax
import jax.numpy as jnp

from mixer_jax.optim import axes
from mixer_jax.optim.curvature_blocks import Block, path_name


def by_path(tree: Any) -> dict[str, jax.Array]:
  """The leaves by path; a ValueError if one is complex, or split over explicit axes of a mesh."""
  leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
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
    raise ValueError("K-FAC's update needs params: tx.update(grads, state, params, batch=batch)")
  if missing := set(names) - set(by_path(params)):
    raise ValueError(
      f"K-FAC's update needs all parameters, but {sorted(missing)[0]} is hidden; pass the whole"
      " tree as the extra argument model_params"
    )
  return params


def with_directions(updates: Any, directions: dict[str, jax.Array]) -> Any:
  """The tree of updates, some of its leaves replaced by path; types stay."""
  return jax.tree_util.tree_map_with_path(
    lambda path, g: directions.get(path_name(path), g).astype(g.dtype), updates
  )


def to_matrix(block: Block, arrays: Sequence[jax.Array]) -> jax.Array:
  """The kernel, and below it the bias, of a Kronecker block as one matrix [..., d_in, d_out]."""
  kernel, *bias = arrays
  d_out = block.factor_sizes[1]
  matrix = kernel.transpose(_order(block)).reshape(*block.stacked, -1, d_out)
  return jnp.concatenate([matrix, *(b.reshape(*block.stacked, 1, d_out) for b in bias)], axis=-2)


def from_matrix(block: Block, matrix: jax.Array) -> list[jax.Array]:
  """The inverse of `to_matrix`."""
  order, shape = _order(block), block.shapes[0]
  d_in = matrix.shape[-2] - (len(block.shapes) - 1)
  kernel = matrix[..., :d_in, :].reshape([shape[i] for i in order])
  back = sorted(range(len(order)), key=lambda i: order[i])
  rest = [matrix[..., d_in:, :].reshape(s) for s in block.shapes[1:]]
  return [kernel.transpose(back), *rest]


def _order(block: Block) -> tuple[int, ...]:
  """The permutation of the kernel's axes, stacked ones first, then inputs, then outputs."""
  n = len(block.stacked)
  inside = block.axes or range(len(block.shapes[0]) - n)
  return (*range(n), *(n + i for i in inside))
