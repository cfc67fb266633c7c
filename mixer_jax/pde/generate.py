"""Sets of functions made from a seed, and their cache."""

import contextlib
import logging
import math
import shutil
from typing import Annotated, Any, Callable, Mapping, NamedTuple, Sequence
import zlib

import numpy as np
import tqdm

from mixer_jax import options
from mixer_jax.data import cache
from mixer_jax.errors import UserError
from mixer_jax.options import Option
from mixer_jax.pde import burgers, darcy, fields
from mixer_jax.pde.functions import Functions

_ROUNDING = 1e-12  # relative: solutions below it are made of rounding errors
_VERSION = 1  # of the cached sets: another number makes them anew
_CHUNK = 32  # functions that are made together
_NAMES = ("inputs", "outputs")
_BAR = dict(desc="Solving equations (once)", unit=" functions")

Generators = Sequence[np.random.Generator]


def burgers_pairs(
  generators: Generators,
  points: int,
  *,
  viscosity: Annotated[float, Option("viscosity of Burgers' equation", 1e-3, 100)] = 0.1,
  time: Annotated[float, Option("time of the solution that is to be found", 1e-6, 100)] = 1.0,
  length: Annotated[float, Option("length of the domain of the equation", 1e-3, 1e3)] = 2 * math.pi,
  mean: Annotated[float, Option("standard deviation of an initial value's mean", 0, 100)] = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
  """Initial values, `fields.periodic`, and the solutions of Burgers' equation at a time.

  The defaults are those of the published set of Li et al. (burgers_data_R10), as a plot of four of
  its pairs tells: an initial value of mean 0 becomes the solution drawn, to the width of the
  line, on a domain of length 2 pi. The paper says 1, where viscosity 0.1 leaves 1% of it.

  A UserError if viscosity leaves nothing of a function but rounding.
  """
  initial = fields.periodic(generators, points, mean)
  # On [0, 1), with x / length for x: time and viscosity are shorter by the length.
  solved = burgers.solve(initial, viscosity / length, time / length)
  if (np.abs(solved).max(1) < _ROUNDING * np.abs(initial).max(1)).any():
    given = f"viscosity={viscosity:g}, time={time:g}, length={length:g}"
    raise UserError(
      f"{given}: viscosity leaves nothing of a function; take less of both or more length"
    )
  return initial, solved


def darcy_pairs(
  generators: Generators,
  side: int,
  *,
  low: Annotated[float, Option("coefficient where the field is negative", 1e-2, 100)] = 3.0,
  high: Annotated[float, Option("coefficient where the field is positive", 1e-2, 100)] = 12.0,
) -> tuple[np.ndarray, np.ndarray]:
  """Coefficients of two values, by the sign of `fields.neumann`, and Darcy's pressures."""
  coefficient = np.where(fields.neumann(generators, side) >= 0, high, low)
  return coefficient, darcy.solve(coefficient)


class Kind(NamedTuple):
  """An equation: the maker of pairs, and its grid."""

  make: Callable
  dimensions: int
  periodic: bool
  points: int  # on a side, of the published set
  allowed: Option


_SIDE = dict(name="points", type=int)
KINDS: Mapping[str, Kind] = {
  "burgers": Kind(burgers_pairs, 1, True, 8192, Option("points of the grid", 16, 2**16, **_SIDE)),
  "darcy": Kind(darcy_pairs, 2, False, 421, Option("points on a side", 5, 1025, **_SIDE)),
}
COUNT = Option("number of functions", 1, 10**6, name="functions", type=int)
SEED = Option("seed of the functions", 0, 2**63 - 1, name="seed", type=int)


def load(
  kind: str, split: str, count: int, seed: int, points: int, cache_dir: str = "", **physics: float
) -> Functions:
  """The first `count` functions of a split of made data, float32, from the cache if they are in it.

  Function i depends on the seed, the split's name and i, and on nothing else but the equation and
  the grid; a larger set begins with the smaller one. A finer grid has the same random fields, with
  more modes. Sets are made in chunks, which are in the cache until the set is whole: after a kill
  the next call goes on from them.

  Args:
    kind: "burgers" or "darcy", see `burgers_pairs` and `darcy_pairs` for `physics`.
    split: any name; sets of two names share no function.
    count: functions.
    seed: of all splits.
    points: on each axis of the grid; with Darcy the boundary's are counted.
    cache_dir: "" is the user's own.

  Returns:
    inputs and outputs, float32 [count, points] or [count, points, points].

  Raises:
    UserError: a value that is not allowed.
  """
  physics = checked(kind, count, seed, points, physics)
  make, dimensions, is_periodic, *_ = KINDS[kind]
  identity = (_VERSION, kind, split, seed, points, sorted(physics.items()))
  place = cache.place(cache_dir) / "pde"
  chunks = place / f".chunks-{cache.fingerprint(identity, [])[:20]}"
  shape = (points,) * dimensions

  def make_chunk(start, stop, allocate):
    generators = [
      np.random.default_rng([seed, zlib.crc32(split.encode()), i]) for i in range(start, stop)
    ]
    arrays = {name: allocate(name, (stop - start, *shape), np.float32) for name in _NAMES}
    for array, values in zip(arrays.values(), make(generators, points, **physics)):
      array[:] = values
    return arrays

  def build(allocate):
    arrays = {name: allocate(name, (count, *shape), np.float32) for name in _NAMES}
    with tqdm.tqdm(total=count, disable=None, **_BAR) as bar:
      for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        of_chunk = cache.fingerprint((identity, start, stop), [])
        some = lambda a: make_chunk(start, stop, a)
        chunk = cache.read(chunks, f"{start}", of_chunk, some, logging.DEBUG)
        for name, array in arrays.items():
          array[start:stop] = chunk[name]
        bar.update(stop - start)
    return arrays

  key = cache.fingerprint((identity, count), [])
  arrays = cache.read(place, f"{kind}_{split}_{count}x{points}", key, build)
  for chunk in chunks.glob("[0-9]*"):  # but for one that another process is writing
    shutil.rmtree(chunk, ignore_errors=True)
  with contextlib.suppress(OSError):
    chunks.rmdir()
  return Functions(**arrays, periodic=is_periodic)


def checked(
  kind: str, count: int, seed: int, points: int, physics: Mapping[str, Any]
) -> dict[str, Any]:
  """The parameters of an equation with its defaults; a UserError if a value is not allowed."""
  for option, value in ((COUNT, count), (SEED, seed), (KINDS[kind].allowed, points)):
    option.check(option.name, value)
  known = options.of(KINDS[kind].make)
  for name, value in physics.items():
    if name not in known:
      raise UserError(f"{name} is no parameter of {kind}; allowed: {', '.join(known)}")
    known[name].check(name, value)
  return {name: float(physics.get(name, option.default)) for name, option in known.items()}
