"""`.npz` files of arrays, without pickles; notes in the archive's comment."""

import json
import os
import pathlib
from typing import Any, Mapping
import zipfile

import numpy as np

# Where big_vision keeps parameters beside its optimizer's state, with optax and before.
_BIG_VISION = ("params/", "opt/target/")
# Deflate cannot shrink anything further than to 1/1032.
_MAX_RATIO = 1032
# Marks a comment as this library's.
_MARK = "mixer_jax"


def read(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """All arrays of a file by name, as stored, and the notes that `write` made in it.

  Of a training checkpoint of big_vision only the parameters are read.

  Raises:
    ValueError: it holds something else, or contradicts itself.
    zipfile.BadZipFile, zlib.error, OSError, EOFError: it is damaged.
  """
  with zipfile.ZipFile(path) as archive:
    _check_members(archive.infolist())
    notes = _notes(archive.comment)
  with np.load(path, allow_pickle=False) as archive:
    names = archive.files
    prefix = next((p for p in _BIG_VISION if any(n.startswith(p) for n in names)), "")
    arrays = {n.removeprefix(prefix): archive[n] for n in names if n.startswith(prefix)}
  for name, array in arrays.items():
    if not isinstance(array, np.ndarray):
      raise ValueError(f"{name} is no array")
  return arrays, notes


def write(path: pathlib.Path, arrays: Mapping[str, np.ndarray], notes: dict[str, Any]) -> None:
  """Writes arrays to a file, which is there whole or as it was before.

  Raises:
    OSError: it cannot be written.
  """
  temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
  try:
    with temporary.open("wb") as file:
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


def _check_members(members: list[zipfile.ZipInfo]) -> None:
  """Refuses names that occur twice and sizes that cannot be true."""
  seen = set()
  for member in members:
    if member.filename in seen:
      raise ValueError(f"{member.filename} is in the archive twice")
    seen.add(member.filename)
    if member.file_size > member.compress_size * _MAX_RATIO:
      raise ValueError(f"{member.filename} cannot be {member.file_size} bytes")


def _notes(comment: bytes) -> dict[str, Any]:
  try:
    notes = json.loads(comment)
  except (ValueError, RecursionError):  # somebody else's comment, or none
    return {}
  return notes.get(_MARK, {}) if isinstance(notes, dict) else {}
