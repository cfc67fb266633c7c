"""A reader of `.npz` files that unpickles nothing and checks the sizes that a file claims.

NumPy does the reading. It believes the sizes in headers, and ignores bytes that a header does not
claim.
"""

import contextlib
import math
import os
from typing import Iterator
import warnings
import zipfile

import numpy as np

from mixer_jax.errors import reason

_MAX_RATIO = 100  # of sizes unpacked and packed: arrays that are mostly zeros shrink a lot
_ALWAYS_ALLOWED = 2**30  # bytes


class Npz(contextlib.AbstractContextManager):
  """The arrays of an `.npz` file, read one at a time, with their names and the file's comment.

  A ValueError, one line, says how the archive is damaged.
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
      version = np.lib.format.read_magic(file)
      header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
      shape, _, dtype = header(file)
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
  """The members of an archive of `size` bytes by array name; a ValueError if they are too large."""
  total = sum(member.file_size for member in archive.infolist())
  if total > max(_ALWAYS_ALLOWED, _MAX_RATIO * size):
    raise ValueError(
      f"{size} bytes would unpack to {total}, over {_MAX_RATIO} times as many; save it without"
      " compression (np.savez)"
    )
  return {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
