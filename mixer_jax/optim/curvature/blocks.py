"""The blocks of parameters that are approximated together, and their arrays."""

import dataclasses
from typing import Any, Literal, NamedTuple, Sequence

import jax
import jax.numpy as jnp

# The array of a variable of flax.nnx, or of a box of Linen, has the path of these.
_IN_A_BOX = jax.tree_util.GetAttrKey("value")


class Diagonals(NamedTuple):
  """The diagonal of a factor that is too large to be kept whole.

  Attributes:
    values: the diagonal, [d].
  """

  values: jax.Array


class Kronecker(NamedTuple):
  """The factors of a layer; stacked layers have their axes in front.

  Attributes:
    inputs: A [d_in (+ 1 with a bias), same], or its `Diagonals`.
    outputs: G [d_out, d_out], or its `Diagonals`.
  """

  inputs: Any
  outputs: Any


class Diagonal(NamedTuple):
  """The Fisher diagonal of a scale or shift.

  Attributes:
    values: an array of the parameter's shape.
  """

  values: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Block:
  """Parameters that are approximated together.

  Attributes:
    name: the layer's path, "MixerBlock_0/token_mixing/Dense_0".
    kind: "kronecker", "diagonal" or "gradient" (no curvature, plain gradient).
    paths: the parameters' paths; of a Kronecker block the kernel, then the bias.
    shapes: the parameters' shapes.
    factor_sizes: (d_in [+ 1], d_out) of a Kronecker block, else ().
    diagonal: which of the two factors are diagonal.
    stacked: leading axes of all arrays, where the block stands for several matrices.
    views: how the kernel is read as `[*stacked, d_in, d_out]` and the bias as
      `[*stacked, d_out]`.
    layer: the kind of its uses, "dense", "conv" or "embedding".
    uses: how many places of the program read it.
    tokens: how many rows of an example share a Kronecker block's weights, else 0.
    reason: why parameters have no curvature.
    dtype: type of factors and of all that is made of them: float64 where parameters are, else
      float32.
  """

  name: str
  kind: Literal["kronecker", "diagonal", "gradient"]
  paths: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]
  factor_sizes: tuple[int, ...] = ()
  diagonal: tuple[bool, bool] = (False, False)
  stacked: tuple[int, ...] = ()
  views: tuple[Any, ...] = dataclasses.field(default=(), compare=False, repr=False)
  layer: str = ""
  uses: int = 0
  tokens: int = 0
  reason: str = ""
  dtype: Any = "float32"

  def matrix(self, arrays: Sequence[jax.Array]) -> jax.Array:
    """The kernel, and below it the bias, as one matrix `[*stacked, d_in (+ 1), d_out]`."""
    kernel, *bias = (view.read(x) for view, x in zip(self.views, arrays))
    return jnp.concatenate([kernel, *(b[..., None, :] for b in bias)], axis=-2)

  def arrays(self, matrix: jax.Array) -> list[jax.Array]:
    """The inverse of `matrix`; elements that no view reads are zero."""
    likes = [jax.ShapeDtypeStruct(shape, matrix.dtype) for shape in self.shapes]
    d_in = self.factor_sizes[0] - len(self.views[1:])
    parts = [matrix[..., :d_in, :], *([matrix[..., d_in, :]] if self.views[1:] else [])]
    return [
      jax.linear_transpose(view.read, like)(part)[0]
      for view, like, part in zip(self.views, likes, parts)
    ]


def path_name(path: Sequence[Any]) -> str:
  """Returns the path of a parameter, "stem/kernel", from a key path of `jax.tree_util`.

  Regular expressions such as `unpreconditioned` and `adam_paths` are matched with it. The value of
  a variable of NNX or of a box of Flax has the path of the variable.

  Args:
    path: a key path, as `jax.tree_util.tree_leaves_with_path` gives it.

  Returns:
    The names or indices of its keys, joined by "/".

  Example:
    ```python
    import jax
    from mixer_jax import optim

    [(path, _)] = jax.tree_util.tree_leaves_with_path({"stem": {"kernel": 1.0}})
    assert optim.path_name(path) == "stem/kernel"
    ```
  """
  if len(path) > 1 and path[-1] == _IN_A_BOX:
    path = path[:-1]
  return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
