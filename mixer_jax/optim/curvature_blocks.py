"""The blocks of parameters that K-FAC approximates together, and their arrays."""

from typing import Any, Literal, NamedTuple, Sequence

import jax

# The array of a variable of flax.nnx, or of a box of Linen, has the path of these.
_IN_A_BOX = jax.tree_util.GetAttrKey("value")


class Diagonals(NamedTuple):
  """The diagonal of a factor whose other entries are not kept, float32 [d]."""

  values: jax.Array


class Kronecker(NamedTuple):
  """The factors of a dense layer, float32: A [d_in (+ 1 with a bias), same], G [d_out, d_out].

  Either may be `Diagonals`. Layers that `nn.scan` stacks have one more axis in front.
  """

  inputs: Any
  outputs: Any


class Diagonal(NamedTuple):
  """The diagonal of the block of a normalisation's parameters, float32."""

  values: tuple[jax.Array, ...]


class Block(NamedTuple):
  """Parameters that are approximated together, of one layer.

  Attributes:
    name: the layer's path, "MixerBlock_0/token_mixing/Dense_0".
    kind: "kronecker", "diagonal" or "gradient" (no curvature, plain gradient).
    paths: the parameters' paths; of a Kronecker block the kernel, then the bias.
    shapes: the parameters' shapes.
    factor_sizes: (d_in [+ 1], d_out) of a Kronecker block, else ().
    tokens: how many rows of an example share a Kronecker block's weights, else 0.
    diagonal: which of the two factors are diagonal.
    stacked: leading axes of all arrays, where the block stands for several layers.
    axes: permutation of the kernel's axes, without the stacked ones, that puts inputs before
      outputs; (): as it is.
  """

  name: str
  kind: Literal["kronecker", "diagonal", "gradient"]
  paths: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]
  factor_sizes: tuple[int, ...] = ()
  tokens: int = 0
  diagonal: tuple[bool, bool] = (False, False)
  stacked: tuple[int, ...] = ()
  axes: tuple[int, ...] = ()


def path_name(path: Sequence[Any]) -> str:
  """ "stem/kernel" for a key path of `jax.tree_util`, also of a parameter in a box of Flax."""
  if len(path) > 1 and path[-1] == _IN_A_BOX:
    path = path[:-1]
  return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
