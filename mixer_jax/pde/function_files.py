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
_FUNCTIONS = "inputs and outputs are [functions, points] or [functions, points, points]"


def read(path: str, inputs: str = "", outputs: str = "") -> Functions:
  """Reads pairs of functions; `inputs` and `outputs` name the arrays if Li et al. do not.

  Without names they are `a` and `u` [functions, points], taken for periodic, or `coeff` and `sol`
  [functions, points, points], taken for a grid with its boundary. Other numbers than float32 and
  float64 become float32. A UserError if the file is missing or damaged, or an array is missing, has
  another shape or numbers that are not finite.
  """
  names, load = _open(path)
  if bool(inputs) != bool(outputs):
    raise UserError(f"{path}: inputs are {inputs!r}, outputs {outputs!r}; both names or none")
  pairs = [(inputs, outputs)] if inputs else list(NAMES.values())
  wanted = _wanted(path, names, pairs, "data.inputs_name and data.outputs_name")
  arrays = [_array(path, load, name) for name in wanted]
  a, u = (x if x.dtype in (np.float32, np.float64) else x.astype(np.float32) for x in arrays)
  if a.shape != u.shape or not _is_grid(a):
    shapes = " and ".join(f"{n!r} {list(x.shape)}" for n, x in zip(wanted, (a, u)))
    raise UserError(f"{path}: has {shapes}; {_FUNCTIONS}, both of one shape{_squeezed(a)}")
  return Functions(a, u, periodic=a.ndim == 2)


def read_side(path: str, name: str = "", outputs: bool = False) -> np.ndarray:
  """Reads inputs alone, or outputs, [functions, *grid]; `name` is that of the array, if not theirs.

  A UserError as of `read`.
  """
  names, load = _open(path)
  sides = [(name,)] if name else [(pair[outputs],) for pair in NAMES.values()]
  [found] = _wanted(path, names, sides, f"data.{'outputs' if outputs else 'inputs'}_name")
  array = _array(path, load, found)
  if not _is_grid(array):
    shape = f"{found!r} {list(array.shape)}"
    raise UserError(f"{path}: has {shape}; {_FUNCTIONS}, two points at least{_squeezed(array)}")
  return array.astype(np.float32)


def _wanted(
  path: str, names: Sequence[str], groups: Sequence[tuple[str, ...]], option: str
) -> tuple[str, ...]:
  """The first group of names that a file has all of."""
  for group in groups:
    if {*group} <= {*names}:
      return group
  needed = " or ".join(" and ".join(map(repr, group)) for group in groups)
  some = ", ".join(map(repr, names[:_NAMED])) or "none"
  noun = "array" if len(groups[0]) == 1 else "arrays"
  raise UserError(f"{path}: has no {noun} {needed}, only {some}; other names go by {option}")


def _array(path: str, load: Callable[[str], np.ndarray], name: str) -> np.ndarray:
  """An array of finite numbers from a file."""
  with as_user_error(f"{path}: array {name!r} cannot be read"):
    array = load(name)
  _check_numbers(f"{path}: array {name!r}", array)
  return array


def _squeezed(array: np.ndarray) -> str:
  return ", without a last axis of 1" if array.ndim > 2 and array.shape[-1] == 1 else ""


def _is_grid(array: np.ndarray) -> bool:
  return array.ndim in (2, 3) and min(array.shape[1:]) > 1


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


def _open(path: str) -> tuple[tuple[str, ...], Callable[[str], np.ndarray]]:
  """The names of a file's arrays, and the reader of one."""
  file = user_path(path)
  if file.suffix.lower() not in (".npz", ".mat"):
    raise UserError(f"{path}: files of functions end in .npz or .mat")
  if not file.parent.is_dir():
    raise UserError(f"{path}: there is no folder {file.parent}")
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


def _check_numbers(what: str, array: np.ndarray) -> None:
  """Raises a UserError if an array has anything but finite numbers."""
  if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
    raise UserError(f"{what} has no real numbers but {getattr(array, 'dtype', type(array))}")
  if not array.size:
    raise UserError(f"{what} is {list(array.shape)}, without a function")
  wrong = lambda row: ~(np.abs(row) <= np.finfo(np.float32).max)  # they will be float32
  rows = np.atleast_1d(array)
  bad = {i: number for i, row in enumerate(rows) if (number := np.count_nonzero(wrong(row)))}
  if bad:
    first, counted = min(bad), lambda n, noun: f"{n:,} {noun}{'s' if n > 1 else ''}"
    point = np.argwhere(wrong(rows[first]))[0]
    numbers = f"{counted(sum(bad.values()), 'number')} of {counted(len(bad), 'function')}"
    place = f"function {first} at point {', '.join(map(str, point)) or 0}"
    where = f"{numbers}, the first, {rows[first][tuple(point)]:g}, in {place}"
    raise UserError(f"{what} is not finite in float32 at {where}; allowed: finite numbers")
