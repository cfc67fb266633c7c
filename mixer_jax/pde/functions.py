"""Pairs of functions on a grid, the examples of an operator."""

import dataclasses

import numpy as np

from mixer_jax.errors import UserError

_NAMED = 12  # divisors, in a message
_FEW = 8  # points that are rather channels


@dataclasses.dataclass(frozen=True)
class Functions:
  """Inputs and outputs of an operator, on one grid.

  inputs and outputs are float32 or float64 [functions, *grid], or [functions, *grid, channels] with
  `axes` of the grid, each with its own channels; they may be maps of files. A periodic grid has the
  points 0, 1 / n, ... without 1 on each axis, any other includes 0 and 1.
  """

  inputs: np.ndarray
  outputs: np.ndarray
  periodic: bool
  axes: int | None = None  # of the grid; None: all but the first

  def __len__(self) -> int:
    return len(self.inputs)

  @property
  def grid(self) -> tuple[int, ...]:
    """Points on each axis."""
    return self.inputs.shape[1 : None if self.axes is None else 1 + self.axes]


def subsampled(functions: Functions, step: int, name: str = "step") -> Functions:
  """Every `step`-th point of each axis, without a copy; a UserError as of `check_step`."""
  check_step(functions.grid, functions.periodic, step, name)
  each = (slice(None), *[slice(None, None, step)] * len(functions.grid))
  inputs, outputs = functions.inputs[each], functions.outputs[each]
  return dataclasses.replace(functions, inputs=inputs, outputs=outputs)


def check_step(
  grid: tuple[int, ...], periodic: bool, step: int, name: str = "step", least: int = 1
) -> None:
  """Raises a UserError if every `step`-th point of each axis is no grid on the same domain.

  The step has to divide the number of points of a periodic axis, and the number of intervals of
  another one. The error has its `name`, and allows multiples of the `least` one.
  """
  for points in grid:
    if not leaves_grid(points, step, periodic):
      cells = points if periodic else points - 1
      divisors = [d for d in range(least, cells, least) if cells % d == 0]
      some = ", ".join(map(str, divisors[:_NAMED])) + (", ..." if divisors[_NAMED:] else "")
      raise UserError(
        f"{name}={step} leaves no grid of {points} points; allowed: {some or None}"
        + (" (data.grid_axes=1 takes a last axis for channels)" if points < _FEW else "")
      )


def leaves_grid(points: int, step: int, periodic: bool) -> bool:
  """Whether every `step`-th of the points of an axis is a grid on the same domain."""
  cells = points if periodic else points - 1
  return step >= 1 and cells % step == 0 and cells > step
