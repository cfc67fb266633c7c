"""Arrays in `.npz`, `.safetensors` and PyTorch files, told apart by content.

Nothing in a file is run: NumPy refuses object arrays, and `pytorch` calls nothing that a file names.
"""

import json
import os
import pathlib
from typing import Any, Mapping, Sequence
import zipfile

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from mixer_jax import npz
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.pretrained import pytorch

_KINDS = ".npz, .safetensors and PyTorch's .pth are read"
# Prefixes of the parameters in big_vision's checkpoints, with optax and before.
_BIG_VISION = ("params/", "opt/target/")
_MARK = "mixer_jax"  # of this library's comments of archives
_NAMED = 20  # names in a message

Arrays = dict[str, np.ndarray]


def kind(path: pathlib.Path) -> str:
  """The kind of a file: "npz", "safetensors" or "torch"; raises a UserError for any other."""
  with path.open("rb") as file:
    head = file.read(9)
  if not head:
    raise UserError(f"{path}: is empty")
  if head.startswith(b"PK\x03\x04"):
    # A damaged directory makes zipfile raise nearly anything.
    with as_user_error(f"{path}: is damaged or cut off"), zipfile.ZipFile(path) as archive:
      pickled = any(n.endswith("/data.pkl") for n in archive.namelist())
    return "torch" if pickled else "npz"
  if head[8:] == b"{":
    return "safetensors"
  if head.startswith(b"\x80\x02"):  # a pickle, as PyTorch wrote before 1.6
    return "torch"
  raise UserError(f"{path}: holds no weights: it begins with {head[:8]!r}; {_KINDS}")


def read(path: pathlib.Path, use_ema: bool = True) -> tuple[Arrays, dict[str, Any]]:
  """A file's floating-point arrays by name, float32, and the notes that `write` made, if any.

  Other arrays, such as counts of batches, are no weights and are left out; `use_ema` is that of
  `pytorch.read`. Raises a UserError if the file is damaged, has no such array, or has numbers that
  are not finite.
  """
  safe = lambda path: (safetensors.numpy.load_file(path), {})
  torch = lambda path: (pytorch.read(path, use_ema), {})
  reader = {"npz": _read_npz, "safetensors": safe, "torch": torch}[kind(path)]
  # Damaged files make readers raise anything.
  with as_user_error(f"{path}: is damaged or no plain weights"):
    arrays, notes = reader(path)
  arrays = {name: x for name, array in arrays.items() if (x := _float32(array)) is not None}
  if not arrays:
    raise UserError(f"{path}: holds no floating-point arrays")
  if wrong := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
    raise UserError(f"{path}: not all numbers are finite in {listed(wrong)}")
  return arrays, notes


def listed(names: Sequence[str]) -> str:
  """Names for a message: the first, and the number of the others."""
  more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
  text = ", ".join(names[:_NAMED]) + more
  return "".join(c if c.isprintable() else "?" for c in text)


def write(path: pathlib.Path, arrays: Mapping[str, Any], notes: dict[str, Any]) -> None:
  """Writes an `.npz` file, which is there whole or as it was before; an OSError if it cannot be.

  Notes, if there are any, become JSON in the archive's comment, which only `read` knows.
  """
  temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
  try:
    with temporary.open("wb") as file:
      # Not by np.savez, which pickles objects and takes names as keywords.
      with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
          with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
        if notes:
          archive.comment = json.dumps({_MARK: notes}).encode()
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)


def _float32(array: np.ndarray) -> np.ndarray | None:
  """The array in float32, or None if it holds no floating-point numbers."""
  if array.dtype == np.dtype("V2"):  # NumPy has no name for bfloat16 in a file
    array = array.view(jnp.bfloat16)
  if not array.size or not jnp.issubdtype(array.dtype, jnp.floating):
    return None
  with np.errstate(over="ignore"):  # larger numbers become infinite, and are refused for that
    return np.asarray(array, np.float32)


def _read_npz(path: pathlib.Path) -> tuple[Arrays, dict[str, Any]]:
  """Reads all arrays and notes; of a training checkpoint of big_vision only the parameters."""
  with npz.Npz(path) as file:
    prefix = next((p for p in _BIG_VISION if any(n.startswith(p) for n in file.names)), "")
    chosen = [n for n in file.names if n.startswith(prefix)]
    arrays = {n.removeprefix(prefix): file.read(n) for n in chosen}
  try:
    notes = json.loads(file.comment)
  except ValueError:  # somebody else's comment, or none
    notes = None
  return arrays, notes.get(_MARK, {}) if isinstance(notes, dict) else {}
