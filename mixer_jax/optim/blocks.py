"""What K-FAC approximates together, and the arrays it keeps for it."""

from typing import Any, Literal, NamedTuple, Sequence

import jax

# What the options of K-FAC may be that take names.
CHOICES = {
  "damping_type": ("exact", "factored"),
  "likelihood": ("categorical", "normal"),
  "estimation": ("sampled", "exact", "empirical"),
  "token_averaging": ("published", "expand"),
  "norms": ("gradient", "diagonal"),
  "precondition_dtype": ("float32", "bfloat16"),
}


class Kronecker(NamedTuple):
  """The two factors of a dense layer's block, float32.

  Attributes:
    inputs: A, [d_in + 1, d_in + 1] with a bias, else [d_in, d_in].
    outputs: G, [d_out, d_out].
  """

  inputs: jax.Array
  outputs: jax.Array


class Diagonal(NamedTuple):
  """The diagonal of the block of a normalisation's parameters, float32."""

  values: tuple[jax.Array, ...]


class Block(NamedTuple):
  """What is approximated together: the parameters of one layer.

  Attributes:
    name: the layer's path, "MixerBlock_0/token_mixing/Dense_0".
    kind: "kronecker", "diagonal" or "gradient" (no curvature, plain gradient).
    paths: the parameters' paths; of a Kronecker block the kernel, then the bias.
    shapes: the parameters' shapes.
    factor_sizes: (d_in [+ 1], d_out) of a Kronecker block, else ().
    tokens: how many rows of an example share a Kronecker block's weights, else 0.
  """

  name: str
  kind: Literal["kronecker", "diagonal", "gradient"]
  paths: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]
  factor_sizes: tuple[int, ...]
  tokens: int


def check_choice(option: str, value: str) -> None:
  """Raises a ValueError if an option of `CHOICES` is none of them."""
  if value not in CHOICES[option]:
    raise ValueError(f"{option} is {value!r}; allowed: {', '.join(CHOICES[option])}")


def path_name(path: Sequence[Any]) -> str:
  """ "stem/kernel" for a key path of `jax.tree_util`."""
  return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
