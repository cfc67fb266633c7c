"""Mean and standard deviation of functions, at each point or over all of them, on any grid.

The statistics belong to the grid of the training functions. They are interpolated linearly to other
grids, so that a model carries over.
"""

import logging
from typing import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.models import interpolate
from mixer_jax.options import one_of
from mixer_jax.tasks.operator_learning.losses import grid_of

Kind = one_of(
  'of inputs and outputs: "pointwise" statistics of the training functions, or "global" ones',
  ("none", "pointwise", "global"),
)
# The least deviation at a point, as a share of the overall one, keeps the boundary of Darcy's
# pressures finite, where all are 0. It is about the published code's 1e-5 there.
_LEAST = 1e-3
_FAR = 1e4  # outputs by this factor from 1 are reported
_LOG = logging.getLogger(__name__)

# {"mean": float32 [*grid], or [*grid, channels], "std": the same}; "global" ones have axes of length 1.
Statistics = Mapping[str, jax.Array]


def fit(
  functions: np.ndarray, kind: str, grid: tuple[int, ...] | None = None, periodic: bool = False
) -> Statistics:
  """The statistics of functions [n, *own grid], computed in float64 and brought to `grid`.

  Those of functions [n, *own grid, channels], which have an axis more than `grid`, are by channel.
  """
  grid = grid or functions.shape[1:]
  axes = tuple(range(1 + len(grid)))
  whole = np.std(functions, axes, dtype=np.float64)
  whole = np.where(whole, whole, 1.0)  # 1 for constants
  if kind == "global":
    shape = (*(1 for _ in grid), *whole.shape)
    mean = np.full(shape, np.mean(functions, axes, dtype=np.float64))
    std = np.full(shape, whole)
  else:
    mean = np.mean(functions, axis=0, dtype=np.float64)
    std = np.maximum(np.std(functions, axis=0, dtype=np.float64), _LEAST * whole)
  with jax.ensure_compile_time_eval():
    on_grid = lambda x: np.asarray(at(np.float32(x), grid, periodic))
    return {"mean": on_grid(mean), "std": on_grid(std)}


def warn_of_units(outputs: np.ndarray, kind: str) -> None:
  """Warns if outputs are far from 1, the size of an untrained model's answers."""
  largest = max(outputs.max(), -outputs.min())
  if kind == "none" and not 1 / _FAR < largest < _FAR:
    how = "normalise='global' or 'pointwise' brings them to a deviation of 1"
    _LOG.warning("The largest output of train is %.3g, far from 1; %s", largest, how)


def normalised(
  functions: jax.Array, statistics: Statistics | None, periodic: bool, axes: int | None = None
) -> jax.Array:
  """Functions minus the mean, divided by the standard deviation.

  They are [batch, *grid], or [batch, *grid, channels] with a grid of so many `axes`.
  """
  if statistics is None:
    return functions
  grid = grid_of(functions, axes)
  mean, std = (at(statistics[name], grid, periodic) for name in ("mean", "std"))
  return (functions - mean) / std


def denormalised(
  functions: jax.Array, statistics: Statistics | None, periodic: bool, axes: int | None = None
) -> jax.Array:
  """The inverse of `normalised`."""
  if statistics is None:
    return functions
  grid = grid_of(functions, axes)
  mean, std = (at(statistics[name], grid, periodic) for name in ("mean", "std"))
  return functions * std + mean


def at(values: jax.Array, grid: tuple[int, ...], periodic: bool) -> jax.Array:
  """Values [*own grid], maybe with channels, at the points of another grid, linear in between."""
  wanted = tuple(1 if own == 1 else points for own, points in zip(values.shape, grid))
  channels = jnp.reshape(values, (1, *values.shape[: len(grid)], -1))
  found = interpolate.resize(channels, wanted, periodic)
  return found.reshape(*wanted, *values.shape[len(grid) :])
