"""Decoded images on disk, so that only the first start decodes.

An entry is a directory NAME-KEY with images.npy, labels.npy and meta.json. It
appears by one rename, so a reader sees all of it or nothing, and programs that
start together do no harm. What does not agree with meta.json is built anew.
"""

import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any, Iterable
import zlib

import numpy as np

from mixer_jax.data import decode
from mixer_jax.errors import reason

_LOG = logging.getLogger(__name__)

_FORMAT = 1  # raise it when decoding changes, so that old entries are not read
_CHECKED_BYTES = 2**30  # checksum all of an array up to this size, else a sample


def fingerprint(identity: Any, files: Iterable[tuple[str, int, int]]) -> str:
  """Returns a hash that changes when the files or their meaning do.

  Args:
    identity: anything with a `repr` that says how the files are read.
    files: (relative path, size in bytes, mtime in nanoseconds) of each.
  """
  digest = hashlib.sha256(repr(identity).encode())
  for entry in sorted(files):
    digest.update(repr(entry).encode())
  return digest.hexdigest()


def read(
  cache_dir: pathlib.Path,
  name: str,
  records: decode.Records,
  stored_size: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the decoded records, from the cache if they are in it.

  Args:
    cache_dir: made if missing; if it cannot be written, the images are decoded
      into memory, with a warning.
    name: begins the entry's name, for people who look into the directory.
    records: what to decode.
    stored_size: see `decode.stored`.

  Returns:
    images [n, height, width, 3] uint8, as a rule a read-only memory map, and
    labels [n] int32.
  """
  key = fingerprint((_FORMAT, stored_size), [(records.fingerprint(), 0, 0)])
  entry = cache_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{key[:20]}"
  arrays = _open(entry)
  if arrays is None:
    try:
      _build(entry, records, stored_size)
      arrays = _open(entry)
    except OSError as error:
      _warn_once(
        f"data.cache_dir={cache_dir} cannot be used ({error.strerror or error}): images are"
        " decoded into memory at every start"
      )
  if arrays is None:
    arrays = decode.decode_all(records, stored_size, lambda shape: np.empty(shape, np.uint8))
  return arrays


@functools.cache
def _warn_once(message: str) -> None:
  _LOG.warning(message)


def _open(entry: pathlib.Path) -> tuple[np.ndarray, np.ndarray] | None:
  """Maps an entry's arrays; None if it is missing, partial or damaged."""
  try:
    meta = json.loads((entry / "meta.json").read_text())
    images = np.load(entry / "images.npy", mmap_mode="r")
    labels = np.load(entry / "labels.npy")
    if meta == _meta(images, labels):
      return images, labels
    why = "its contents do not match meta.json"
  except FileNotFoundError:
    if not entry.exists():
      return None
    why = "a file is missing"
  except Exception as error:  # NumPy and JSON raise nearly anything of damaged files
    why = reason(error)
  _LOG.warning("Cache entry %s is damaged (%s): building it again", entry, why)
  return None


def _build(entry: pathlib.Path, records: decode.Records, stored_size: int) -> None:
  """Decodes the records into a temporary directory and renames it to `entry`.

  Raises:
    OSError: if the directory cannot be written or the disk is too small.
  """
  entry.parent.mkdir(parents=True, exist_ok=True)
  temporary = pathlib.Path(tempfile.mkdtemp(prefix=".building-", dir=entry.parent))
  try:
    images, labels = decode.decode_all(
      records, stored_size, lambda shape: _create(temporary / "images.npy", shape)
    )
    images.flush()
    np.save(temporary / "labels.npy", labels)
    (temporary / "meta.json").write_text(json.dumps(_meta(images, labels)))
    if entry.exists():  # damaged; move it away at once rather than file by file
      entry.rename(temporary / "damaged")
    try:
      temporary.rename(entry)
    except OSError:
      if not entry.exists():
        raise
      return  # another process was quicker; its entry is as good
    shutil.rmtree(entry / "damaged", ignore_errors=True)
    _LOG.info("Cached %d decoded images in %s", records.num, entry)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def _create(path: pathlib.Path, shape: tuple[int, ...]) -> np.ndarray:
  array = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
  if hasattr(os, "posix_fallocate"):  # A full disk must raise here, not kill us (SIGBUS) later.
    with path.open("r+b") as file:
      os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
  return array


def _meta(images: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
  return {
    "images": [list(images.shape), str(images.dtype), _checksum(images)],
    "labels": [list(labels.shape), str(labels.dtype), _checksum(labels)],
  }


def _checksum(array: np.ndarray) -> int:
  """Returns the CRC-32 of an array, or of every k-th row if it is very large."""
  array = array[:: 1 + array.nbytes // _CHECKED_BYTES]
  checksum = 0
  for start in range(0, len(array), 1024):
    checksum = zlib.crc32(np.ascontiguousarray(array[start : start + 1024]), checksum)
  return checksum
