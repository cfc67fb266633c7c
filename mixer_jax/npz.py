"""Reads `.npz` files of anybody: nothing is unpickled, and what a file claims is checked.

NumPy's own reader believes the sizes in headers; a file of some kilobytes can
then ask for all memory.
"""

import contextlib
import math
import os
from typing import BinaryIO, Iterator
import warnings
import zipfile

import numpy as np

from mixer_jax.errors import reason

# Deflate cannot shrink anything further than to 1/1032.
_MAX_RATIO = 1032
# Arrays that are mostly zeros shrink a lot, a whole file of them is a trap.
_MAX_TOTAL_RATIO = 100
_ALWAYS_ALLOWED = 2**30  # bytes
_CHUNK = 2**20
_HEADERS = {
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}


class Npz:
  """The arrays of an `.npz` file, read one at a time; a context manager.

  Attributes:
    names: of the arrays.
    comment: of the archive.
  """

  def __init__(self, path: str | os.PathLike):
    """Reads the archive's directory.

    Raises:
      ValueError: says in one line what is wrong with it.
    """
    with _refusing():
      self._archive = zipfile.ZipFile(path)
      self._members = members(self._archive, os.path.getsize(path))
    self.names = tuple(self._members)
    self.comment = self._archive.comment

  def __enter__(self) -> "Npz":
    return self

  def __exit__(self, *exception) -> None:
    self._archive.close()

  def read(self, name: str) -> np.ndarray:
    """One of the arrays, as stored.

    Raises:
      ValueError: says in one line what is wrong with it.
    """
    member = self._members[name]
    with _refusing():
      if not member.filename.endswith(".npy"):
        raise ValueError(f"{name} is no array")
      with self._archive.open(member) as file:
        return _array(name, file, member.file_size)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
  """Damaged archives make zipfile, its decompressors and NumPy raise nearly anything."""
  try:
    yield
  except Exception as error:
    raise ValueError(reason(error)) from error


def members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
  """The members of an archive of `size` bytes by array name.

  Raises:
    ValueError: one is there twice, or sizes cannot be true, or would fill the memory.
  """
  by_name = {}
  for member in archive.infolist():
    name = member.filename.removesuffix(".npy")
    if not name.isprintable():
      raise ValueError(f"{name[:100]!r} is no name of an array")
    if name in by_name:
      raise ValueError(f"{member.filename} is in the archive twice")
    if member.file_size > member.compress_size * _MAX_RATIO:
      raise ValueError(f"{member.filename} cannot be {member.file_size} bytes")
    by_name[name] = member
  if sum(member.compress_size for member in by_name.values()) > size:
    raise ValueError("members of the archive overlap")
  total = sum(member.file_size for member in by_name.values())
  if total > max(_ALWAYS_ALLOWED, _MAX_TOTAL_RATIO * size):
    raise ValueError(f"{size} bytes would unpack to {total}")
  return by_name


def _array(name: str, file: BinaryIO, size: int) -> np.ndarray:
  """Reads a member of `size` bytes, all of which must be what its header says."""
  version = np.lib.format.read_magic(file)
  if version not in _HEADERS:
    raise ValueError(f"{name} has version {version} of the format")
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Python 2, whose headers are read as well
    shape, fortran_order, dtype = _HEADERS[version](file)
  if dtype.hasobject:
    raise ValueError(f"Object arrays cannot be loaded, as {name}: they are pickled")
  size -= file.tell()
  if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
    raise ValueError(f"{name} has {size} bytes, not those of {dtype} {shape}")
  content, at = np.empty(size, np.uint8), 0
  while at < size:
    chunk = file.read(min(_CHUNK, size - at))
    if not chunk:
      raise ValueError(f"{name} ends after {at} of {size} bytes")
    content[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
    at += len(chunk)
  return content.view(dtype).reshape(shape, order="F" if fortran_order else "C")
