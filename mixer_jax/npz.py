"""A strict reader of `.npz` files: nothing is unpickled, and sizes that a file claims are checked.

NumPy does the reading. It believes the sizes in headers, so that a file of some kilobytes can ask
for all memory, and it ignores bytes that a header does not claim.
"""

import contextlib
import math
import os
from typing import Iterator
import warnings
import zipfile

import numpy as np

from mixer_jax.errors import reason

_MAX_RATIO = 1032  # deflate shrinks nothing further
# Arrays that are mostly zeros shrink a lot; a whole file of them is a trap.
_MAX_TOTAL_RATIO = 100
_ALWAYS_ALLOWED = 2**30  # bytes
_HEADERS = {
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}


class Npz(contextlib.AbstractContextManager):
  """The arrays of an `.npz` file, read one at a time, with their names and the file's comment.

  A ValueError, one line, says how the archive is damaged or contradicts itself.
  """

  def __init__(self, path: str | os.PathLike):
    with _in_one_line():
      self._archive = zipfile.ZipFile(path)
      self._members = members(self._archive, os.path.getsize(path))
    self.names = tuple(self._members)
    self.comment = self._archive.comment

  def __exit__(self, *exception) -> None:
    self._archive.close()

  def read(self, name: str) -> np.ndarray:
    """Reads an array; a ValueError if it is damaged, pickled or not of its header's size."""
    member = self._members[name]
    with _in_one_line(), warnings.catch_warnings(), self._archive.open(member) as file:
      warnings.simplefilter("ignore")  # of Python 2, whose headers are read as well
      if not member.filename.endswith(".npy"):
        raise ValueError(f"{name} is no array")
      version = np.lib.format.read_magic(file)
      if version not in _HEADERS:
        raise ValueError(f"{name} has version {version} of the format")
      shape, _, dtype = _HEADERS[version](file)
      size = member.file_size - file.tell()
      if not dtype.hasobject and math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name} has {size} bytes, not those of {dtype} {shape}")
      file.seek(0)
      return np.lib.format.read_array(file, allow_pickle=False)


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
  """Damaged archives make zipfile, its decompressors and NumPy raise nearly anything."""
  try:
    yield
  except Exception as error:
    raise ValueError(reason(error)) from error


def members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
  """The members of an archive of `size` bytes by array name; a ValueError if it is a trap."""
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
    raise ValueError(
      f"{size} bytes would unpack to {total}, over {_MAX_TOTAL_RATIO} times as many; save it without"
      " compression (np.savez)"
    )
  return by_name
