"""Mean and standard deviation of functions, at each point or over all, on any grid.

The statistics belong to the grid of the training functions. Another grid takes them by linear
interpolation, so that a model carries over.
"""

from typing import Any, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.options import one_of

Kind = one_of(
  'of inputs and outputs: "pointwise" statistics of the training functions, or "global" ones',
  ("none", "pointwise", "global"),
)
# The least deviation at a point, as a share of the overall one: about the published code's 1e-5 for
# Darcy's pressures. It keeps their boundary finite, where all are 0.
_LEAST = 1e-3

# {"mean": float32 [*grid], "std": likewise}; of a "global" one the axes have length 1.
Statistics = Mapping[str, jax.Array]


def fit(functions: np.ndarray, kind: str) -> Statistics:
  """The statistics of functions [n, *grid] in float64, of all points if `kind` is "global"."""
  whole = np.std(functions, dtype=np.float64) or 1.0  # of one and the same number, 1
  if kind == "global":
    shape = (1,) * (functions.ndim - 1)
    mean, std = np.full(shape, np.mean(functions, dtype=np.float64)), np.full(shape, whole)
  else:
    mean = np.mean(functions, axis=0, dtype=np.float64)
    std = np.maximum(np.std(functions, axis=0, dtype=np.float64), _LEAST * whole)
  return {"mean": np.float32(mean), "std": np.float32(std)}


def normalised(functions: jax.Array, statistics: Statistics | None, periodic: bool) -> jax.Array:
  """Functions [batch, *grid] less the mean, by the standard deviation; None: as they are."""
  if statistics is None:
    return functions
  mean, std = (at(statistics[name], functions.shape[1:], periodic) for name in ("mean", "std"))
  return (functions - mean) / std


def denormalised(functions: jax.Array, statistics: Statistics | None, periodic: bool) -> jax.Array:
  """The inverse of `normalised`."""
  if statistics is None:
    return functions
  mean, std = (at(statistics[name], functions.shape[1:], periodic) for name in ("mean", "std"))
  return functions * std + mean


def at(values: jax.Array, grid: tuple[int, ...], periodic: bool) -> jax.Array:
  """Values [*own grid] at the points of another grid [*grid], linear in between."""
  for axis, (size, points) in enumerate(zip(values.shape, grid)):
    if size not in (1, points):
      matrix = jnp.asarray(_linear(points, size, periodic))
      values = jnp.moveaxis(jnp.tensordot(matrix, values, (1, axis)), 0, axis)
  return values


def _linear(points: int, size: int, periodic: bool) -> Any:
  """The matrix [points, size] of linear interpolation between grids on [0, 1] or the circle."""
  cells = size if periodic else size - 1
  position = np.arange(points) * (cells / (points if periodic else points - 1))
  left = np.minimum(np.floor(position).astype(int), cells - 1)
  share = position - left
  matrix = np.zeros((points, size), np.float32)
  rows = np.arange(points)
  np.add.at(matrix, (rows, left), 1 - share)
  np.add.at(matrix, (rows, (left + 1) % size), share)
  return matrix
