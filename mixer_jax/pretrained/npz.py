"""`.npz` files of arrays, without pickles; notes in the archive's comment."""

import json
import os
import pathlib
from typing import Any, Mapping
import zipfile

import numpy as np

from mixer_jax import npz

# Where big_vision keeps parameters beside its optimizer's state, with optax and before.
_BIG_VISION = ("params/", "opt/target/")
# Marks a comment as this library's.
_MARK = "mixer_jax"


def read(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """All arrays of a file by name, as stored, and the notes that `write` made in it.

  Of a training checkpoint of big_vision only the parameters are read.

  Raises:
    ValueError: it is damaged, holds something else, or contradicts itself.
  """
  with npz.Npz(path) as file:
    prefix = next((p for p in _BIG_VISION if any(n.startswith(p) for n in file.names)), "")
    chosen = [n for n in file.names if n.startswith(prefix)]
    return {n.removeprefix(prefix): file.read(n) for n in chosen}, _notes(file.comment)


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


def _notes(comment: bytes) -> dict[str, Any]:
  try:
    notes = json.loads(comment)
  except (ValueError, RecursionError):  # somebody else's comment, or none
    return {}
  return notes.get(_MARK, {}) if isinstance(notes, dict) else {}
