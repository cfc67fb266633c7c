"""The blocks of parameters that K-FAC approximates together, and their arrays."""

from typing import Annotated, Any, Literal, NamedTuple, Sequence

import jax

from mixer_jax.options import Option

# Values of the options of K-FAC that take names.
CHOICES = {
  "damping_type": ("exact", "factored"),
  "likelihood": ("categorical", "normal", "bernoulli", "normal_variance"),
  "estimation": ("sampled", "exact", "empirical"),
  "token_averaging": ("published", "expand"),
  "norms": ("gradient", "diagonal"),
  "precondition_dtype": ("float32", "bfloat16"),
}


def _option(name: str, text: str) -> Any:
  return Annotated[str, Option(text, choices=CHOICES[name])]


DampingType = _option("damping_type", "where damping is added: to A (x) G, or to both factors")
Estimation = _option("estimation", "targets of the Fisher: drawn, all classes, or the labels")
TokenAveraging = _option("token_averaging", "convention for weights shared over tokens")
Norms = _option("norms", "curvature of normalisations: none, or a diagonal")
PreconditionDtype = _option("precondition_dtype", "operands of the products that precondition")


class Diagonals(NamedTuple):
  """A factor of which the diagonal is kept, float32 [d]."""

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
    layer: the name of its class, "Dense".
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
  layer: str = ""
  diagonal: tuple[bool, bool] = (False, False)
  stacked: tuple[int, ...] = ()
  axes: tuple[int, ...] = ()


def check_choice(option: str, value: str) -> None:
  """Raises a ValueError if an option of `CHOICES` is none of them."""
  if value not in CHOICES[option]:
    raise ValueError(f"{option} is {value!r}; allowed: {', '.join(CHOICES[option])}")


def path_name(path: Sequence[Any]) -> str:
  """ "stem/kernel" for a key path of `jax.tree_util`."""
  return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
