"""Files of functions: .npz, and MATLAB's .mat of versions 5 to 7.2."""

import functools
import os
import pathlib
import tempfile
from typing import Callable, Sequence

import numpy as np
import scipy.io

from mixer_jax import npz
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path
from mixer_jax.pde.functions import Functions

# Arrays of inputs and outputs as Li et al. name them, by the dimensions of the grid.
NAMES = {1: ("a", "u"), 2: ("coeff", "sol")}
_NAMED = 10  # arrays of the file, in a message
_SHAPES = "[functions, points] or [functions, points, points], two points at least, maybe with channels last"


def read(path: str, inputs: str = "", outputs: str = "", axes: int = 0) -> Functions:
  """Reads pairs of functions; `inputs` and `outputs` name the arrays if Li et al. do not.

  Without names they are `a` and `u` [functions, points], taken for periodic, or `coeff` and `sol`
  [functions, points, points], taken for a grid with its boundary. Either may have channels on an
  axis more than the `axes` of the grid, for which 0 stands for `grid_axes`. Other numbers than
  float32 and float64 become float32.

  Raises:
    UserError: the file is missing or damaged, or an array is missing, has another shape or numbers
      that are not finite in float32.
  """
  if bool(inputs) != bool(outputs):
    raise UserError(f"{path}: inputs are {inputs!r}, outputs {outputs!r}; both names or none")
  names = [(inputs, outputs)] if inputs else list(NAMES.values())
  a, u = _arrays(path, names, "data.inputs_name and data.outputs_name")
  axes = axes or grid_axes(a.shape, u.shape)
  found = Functions(a, u, periodic=axes == 1, axes=axes)
  if a.shape[: 1 + axes] != u.shape[: 1 + axes] or max(a.ndim, u.ndim) > 2 + axes:
    shapes = f"{list(a.shape)} and {list(u.shape)}"
    allowed = "one shape, maybe with channels on a further, last axis"
    raise UserError(f"{path}: has {shapes} with data.grid_axes={axes}; allowed: {allowed}")
  if len(found.grid) < axes or min(found.grid) < 2:
    raise UserError(f"{path}: has {list(a.shape)} with data.grid_axes={axes}; allowed: {_SHAPES}")
  return found


def grid_axes(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
  """The axes of the grid in two shapes: both but the first, without a last one of channels.

  Channels are a fourth axis, one that the other shape lacks, one of another length alone, or of 1.
  """
  axes = min(len(inputs), len(outputs)) - 1
  others = inputs[-1] != outputs[-1] and inputs[:-1] == outputs[:-1]
  channels = axes > 2 or (axes == 2 and (others or inputs[-1] == 1))
  return axes - (channels and len(inputs) == len(outputs))


def read_side(
  path: str,
  name: str = "",
  outputs: bool = False,
  axes: int | None = None,
  channels: tuple[int, ...] = (),
) -> np.ndarray:
  """Reads inputs alone, or outputs, float32 [functions, *grid, *channels]; errors as of `read`.

  `name` is that of the array, if Li et al. have another one. With `axes` the grid has to have so
  many, and there have to be such channels.
  """
  names = [(name,)] if name else [(pair[outputs],) for pair in NAMES.values()]
  [array] = _arrays(path, names, f"data.{'outputs' if outputs else 'inputs'}_name")
  if (axes and array.shape[1 + axes :] != channels) or array.ndim - 1 < (axes or 0):
    with_channels = f" with {channels[0]} channels on the last" if channels else ""
    allowed = f"a grid of {axes} axes{with_channels}"
    raise UserError(f"{path}: has {list(array.shape)}; allowed: functions on {allowed}")
  return array.astype(np.float32)


def write(path: str, functions: Functions) -> None:
  """Writes an .npz that `read` reads, all of it or nothing; a UserError if that is impossible."""
  names = NAMES[len(functions.grid)]
  target = user_path(path)
  with (
    as_user_error(f"{path}: cannot be written", OSError),
    tempfile.TemporaryDirectory(prefix=".writing-", dir=target.parent) as folder,
  ):
    made = pathlib.Path(folder, "made.npz")
    np.savez(made, **dict(zip(names, (functions.inputs, functions.outputs))))
    os.replace(made, target)


def _arrays(path: str, groups: Sequence[tuple[str, ...]], option: str) -> list[np.ndarray]:
  """The arrays of the first group of names that a file has all of."""
  there, load = _open(path)
  if not (wanted := next((group for group in groups if {*group} <= {*there}), ())):
    needed = " or ".join(" and ".join(map(repr, group)) for group in groups)
    some = ", ".join(map(repr, there[:_NAMED])) or "none"
    raise UserError(f"{path}: has no array {needed}, only {some}; other names go by {option}")
  return [_checked(path, name, load) for name in wanted]


def _checked(path: str, name: str, load: Callable[[str], np.ndarray]) -> np.ndarray:
  what = f"{path}: array {name!r}"
  with as_user_error(f"{what} cannot be read"):
    array = load(name)
    if array.dtype not in (np.float32, np.float64):
      array = array.astype(np.float32, casting="same_kind")  # no complex numbers, no texts
  if array.ndim not in (2, 3, 4) or not array.size:
    raise UserError(f"{what} is {list(array.shape)}; allowed: {_SHAPES}")
  for i, function in enumerate(array):
    wrong = ~(np.abs(function) <= np.finfo(np.float32).max)  # it will be float32
    if wrong.any():
      point = tuple(np.argwhere(wrong)[0].tolist())
      where = f"{function[point]:g}, in function {i} at point {', '.join(map(str, point))}"
      raise UserError(f"{what} is not finite in float32; its first such number is {where}")
  return array


def _open(path: str) -> tuple[tuple[str, ...], Callable[[str], np.ndarray]]:
  """The names of a file's arrays, and the reader of one."""
  file = user_path(path)
  if file.suffix.lower() not in (".npz", ".mat"):
    raise UserError(f"{path}: files of functions end in .npz or .mat")
  if not file.is_file():
    command = "python -m mixer_jax.pde burgers --out=FILE.npz"
    raise UserError(f"{path}: no such file; `{command}`, or darcy, makes one")
  with as_user_error(f"{path}: cannot be read"):
    if file.suffix.lower() == ".npz":
      archive = npz.Npz(file)
      return archive.names, archive.read
    return tuple(name for name, *_ in scipy.io.whosmat(file)), functools.partial(_matlab, file)


def _matlab(file: pathlib.Path, name: str) -> np.ndarray:
  return scipy.io.loadmat(file, variable_names=[name])[name]
