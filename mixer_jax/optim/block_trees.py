"""Trees of parameters and gradients, as the blocks of a Kronecker-factored curvature see them."""

from typing import Any, Collection, Mapping, Sequence

from flax.core import meta
import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import axes
from mixer_jax.optim.curvature_blocks import Block, path_name

_ATTENDING = ("query", "key", "value")  # layers of nn.MultiHeadDotProductAttention


def by_path(tree: Any) -> dict[str, jax.Array]:
  """The leaves by path.

  A ValueError if one is complex, or split over explicit axes of a mesh, or if two have one path.
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


def check_names(params: Any, names: Collection[str]) -> None:
  """Raises a ValueError for a parameter that is not among `names`, those of the model."""
  if unknown := by_path(params).keys() - set(names):
    found = min(unknown) or "no names, as one array (optax.flatten hides them)"
    raise ValueError(
      f"the parameters have {found}, which the model has not; it has {', '.join(names)}"
    )


def check_params(params: Any) -> None:
  """Raises a ValueError for parameters that are no plain tree of floats."""
  if type(params).__module__.startswith("flax.nnx"):
    raise ValueError(
      "params are a State of flax.nnx; K-FAC sees layers of Linen alone: write the model in Linen,"
      " or train it by another optimizer"
    )
  boxes = lambda x: isinstance(x, meta.AxisMetadata)
  if any(map(boxes, jax.tree.leaves(params, is_leaf=boxes))):
    raise ValueError("params hold boxes of Flax (nn.with_partitioning); pass nn.unbox(params)")
  for path, x in by_path(params).items():
    if not jnp.issubdtype(dtype := jnp.result_type(x), jnp.floating):
      raise ValueError(f"{path} is {dtype}, which has no gradient; leave it out of params")


def check_stacked(params: Any, stacked: Mapping[str, int]) -> None:
  """Raises a ValueError for counts of leading axes, by path, that the parameters do not have.

  Parameters that a wrapper such as `optax.masked` hides may be named.
  """
  leaves = by_path(params)
  if not isinstance(stacked, Mapping):
    raise ValueError(f"stacked is {stacked!r}; allowed: a mapping of paths to numbers of axes")
  hides = lambda x: isinstance(x, optax.MaskedNode)
  with_hidden = jax.tree_util.tree_leaves_with_path(params, is_leaf=hides)
  hidden = [path_name(path) for path, x in with_hidden if hides(x)]
  for path, count in stacked.items():
    axes_of_matrix = 2 if path.split("/")[-1] == "kernel" else 0  # biases and scales have none
    if path in leaves and not 0 <= count <= max(jnp.ndim(leaves[path]) - axes_of_matrix, 0):
      raise ValueError(
        f"stacked is {count!r} for {path}, of shape {jnp.shape(leaves[path])}; allowed: axes before"
        " those of its matrix"
      )
    if path not in leaves and not any(f"{path}/".startswith(f"{h}/") for h in hidden):
      raise ValueError(f"stacked has {path!r}, which is no parameter; they are {', '.join(leaves)}")


def output_axes(path: str, leaves: Mapping[str, Any], stacked: int = 0) -> int:
  """How many last axes of a kernel, beside `stacked` leading ones, are outputs.

  As many as its bias has, in Linen one for each of a layer's `features`, if the kernel ends in the
  bias's shape. Without a bias, also where a wrapper such as `optax.masked` hides it, two of a query,
  key or value of Linen's attention, [inputs, heads, features]. One of any other array.
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
  """The tree of updates, some of its leaves replaced by path; types stay."""
  return jax.tree_util.tree_map_with_path(
    lambda path, g: directions.get(path_name(path), g).astype(g.dtype), updates
  )


def taken(block: Block, gradients: dict[str, jax.Array]) -> list[jax.Array]:
  """The gradients of a block in float32; a ValueError if one is missing or has another shape."""
  for path, shape in zip(block.paths, block.shapes):
    if path not in gradients:
      raise ValueError(f"the gradients lack {path}; allowed: those of all parameters of init")
    if gradients[path].shape != shape:
      given = f"{path} has shape {gradients[path].shape}"
      raise ValueError(f"the gradient of {given}; allowed: {shape}, that of the parameter")
  return [gradients[path].astype(jnp.float32) for path in block.paths]


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
