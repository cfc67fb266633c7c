"""Arrays on disk, so that only the first start decodes the files that they come from.

An entry is a directory NAME-KEY with a .npy file for each array and meta.json. It appears by one
rename, so a reader sees all of it or nothing, and programs that start together do no harm. An entry
that does not agree with its meta.json is built anew. A killed program leaves an unfinished entry; a
program that builds one a week later removes it.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
import time
from typing import Any, Callable, Iterable
import zlib

import numpy as np

from mixer_jax.errors import reason
from mixer_jax.paths import cache_path, user_path

_LOG = logging.getLogger(__name__)

_UNFINISHED = ".building-"
_ABANDONED = 7 * 24 * 3600  # seconds since the last file was begun
_CHECKED_BYTES = 2**30  # checksum all of an array up to this size, else a sample

# Name, shape and dtype of an array -> the array, to be filled.
Allocate = Callable[[str, tuple[int, ...], Any], np.ndarray]
Build = Callable[[Allocate], dict[str, np.ndarray]]


def place(cache_dir: str) -> pathlib.Path:
  """The directory of the cache; of "" the user's own."""
  return user_path(cache_dir) if cache_dir else cache_path()


def fingerprint(identity: Any, files: Iterable[tuple[str, int, int]]) -> str:
  """A hash of `repr(identity)` and of files (relative path, size in bytes, mtime in ns)."""
  digest = hashlib.sha256(repr(identity).encode())
  for entry in sorted(files):
    digest.update(repr(entry).encode())
  return digest.hexdigest()


def read(
  cache_dir: pathlib.Path, name: str, key: str, build: Build, level: int = logging.INFO
) -> dict[str, np.ndarray]:
  """Arrays by name, as a rule read-only memory maps, from the cache if they are in it.

  `name` begins the name of the entry, whose key is a `fingerprint`. If `cache_dir` cannot be made
  or written, the arrays are built in memory, with a warning. `level` is that of the line in the log
  that says where a new entry is.
  """
  entry = cache_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{key[:20]}"
  arrays = _open(entry)
  if arrays is None:
    try:
      _build(entry, build, level)
      arrays = _open(entry)
    except OSError as error:
      why = f"cannot be used ({error.strerror or error}): examples are decoded at every start"
      _warn_once(f"data.cache_dir={cache_dir} {why}")
  return build(lambda name, shape, dtype: np.empty(shape, dtype)) if arrays is None else arrays


_warn_once = functools.cache(_LOG.warning)


def _open(entry: pathlib.Path) -> dict[str, np.ndarray] | None:
  """The arrays of an entry; None if it is missing, partial or damaged."""
  try:
    meta = json.loads((entry / "meta.json").read_text())
    arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in meta}
    if meta == _meta(arrays):
      return arrays
    why = "its contents do not match meta.json"
  except Exception as error:  # NumPy and JSON raise nearly anything of damaged files
    if not os.path.exists(entry):
      return None
    why = reason(error)
  _LOG.warning("Cache entry %s is damaged (%s): building it again", entry, why)
  return None


def _build(entry: pathlib.Path, build: Build, level: int) -> None:
  """Builds an entry; OSError: the directory cannot be written or the disk is too small."""
  entry.parent.mkdir(parents=True, exist_ok=True)
  _remove_abandoned(entry.parent)
  options = dict(prefix=_UNFINISHED, dir=entry.parent, ignore_cleanup_errors=True)
  with tempfile.TemporaryDirectory(**options) as directory:
    made = pathlib.Path(directory, "made")
    made.mkdir()
    arrays = build(lambda name, *like: _create(made / f"{name}.npy", *like))
    for array in arrays.values():
      array.flush()
    (made / "meta.json").write_text(json.dumps(_meta(arrays)))
    if entry.exists():  # damaged; move it away at once rather than file by file
      entry.rename(made.with_name("damaged"))
    try:
      made.rename(entry)
      _LOG.log(level, "Cached %s", entry)
    except OSError:
      if not os.path.exists(entry):  # else another process was quicker; its entry is as good
        raise


def _remove_abandoned(parent: pathlib.Path) -> None:
  """Removes unfinished entries of programs that were killed."""
  for directory in parent.glob(f"{_UNFINISHED}*"):
    with contextlib.suppress(OSError):  # another program was quicker, or it is not ours
      if time.time() - directory.stat().st_mtime > _ABANDONED:
        shutil.rmtree(directory)


def _create(path: pathlib.Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  array = np.lib.format.open_memmap(path, "w+", dtype, shape)
  if hasattr(os, "posix_fallocate"):  # A full disk must raise here, not kill us (SIGBUS) later.
    with path.open("r+b") as file:
      os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
  return array


def _meta(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
  return {name: [list(x.shape), str(x.dtype), _checksum(x)] for name, x in arrays.items()}


def _checksum(array: np.ndarray) -> int:
  """The CRC-32 of an array, or of every k-th row if it is very large."""
  array = array[:: 1 + array.nbytes // _CHECKED_BYTES]
  checksum = 0
  for start in range(0, len(array), 1024):
    checksum = zlib.crc32(np.ascontiguousarray(array[start : start + 1024]), checksum)
  return checksum
