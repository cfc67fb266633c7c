"""Uses of parameters: places of a program that read them, and what a walk through it knows of values."""

import dataclasses
from typing import Any, Callable

import numpy as np

from mixer_jax.optim.curvature import products
from mixer_jax.optim.curvature.views import View

Path = tuple[Any, ...]  # indices of equations, from the outermost program inwards


@dataclasses.dataclass
class Use:
  """One place of a program that reads a parameter.

  Attributes:
    path: of the equation.
    kind: "dense", "conv", "embedding", "scale" or "shift".
    view: of the parameter: for a product a matrix [*blocks, d_in, d_out], else of the shape of
      the equation's result.
    operand: which input of the equation holds the rows, or the ids; None: it has none.
    product: the arrangement of rows, see `products.Product`; None: of a scale or shift.
    bias: the view of a bias that is added to the product's outputs, [*blocks, d_out], or None.
    rows: how many rows each matrix multiplies, in all runs of the loops around.
    once: whether each matrix of a stack is multiplied in one run, outside of branches.
    term: number of the program, where there are several.
    slices: the outputs, block * d_out + i, of each slice that is taken of the result.
  """

  path: Path
  kind: str
  view: View
  operand: int | None = None
  product: products.Product | None = None
  bias: View | None = None
  rows: float = 0
  once: bool = False
  term: int = 0
  slices: list[np.ndarray] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Output:
  """The result of a product, maybe reshaped: which output, block * d_out + i, each element is."""

  use: Use
  positions: np.ndarray


@dataclasses.dataclass
class Constant:
  """A value that depends on no argument of the program; computed on demand."""

  value: Callable[[], np.ndarray]


@dataclasses.dataclass
class Found:
  """What a walk finds.

  Attributes:
    uses: of parameters.
    leaks: by leaf, why a reader that is no use cannot be seen.
    selections: paths of equations that take one layer out of a stack.
    runs: how often the equations that the walk is at run, by the loops around them.
    branches: how many branches the walk is in.
    narrow: whether it computes in floats of 16 bits.
    debug: JAX's information about the program.
  """

  uses: list[Use] = dataclasses.field(default_factory=list)
  leaks: dict[int, str] = dataclasses.field(default_factory=dict)
  selections: set[Path] = dataclasses.field(default_factory=set)
  runs: int = 1
  branches: int = 0
  narrow: bool = False
  debug: Any = None


def leak(found: Found, value: Any, reason: str) -> None:
  """Keeps why a parameter has no layer, if the value is a view of one."""
  if isinstance(value, View):
    found.leaks.setdefault(value.leaf, reason)
