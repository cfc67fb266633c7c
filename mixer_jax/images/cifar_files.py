"""CIFAR-10 and CIFAR-100 as https://www.cs.toronto.edu/~kriz/cifar.html offers them for Python.

The archives hold pickles, which are read without executing them: nothing that they name is imported
or called, and a NumPy array is a shape and bytes.
"""

import gzip
import hashlib
import io
import logging
import os
import pathlib
import pickle
import tarfile
from typing import Any, Callable, NamedTuple

import numpy as np

from mixer_jax.errors import UserError, reason
from mixer_jax.images import base_split
from mixer_jax.paths import user_path

_LOG = logging.getLogger(__name__)
_LARGEST = 1 << 28  # bytes that are unpacked of an archive: either takes 187 MB
_PIXELS = 3 * 32 * 32


class Format(NamedTuple):
  archive: str
  size: int  # bytes
  md5: str
  folder: str  # in the archive
  files: dict[str, tuple[str, ...]]  # by base split
  images: dict[str, int]  # in each of those files
  meta: str  # the file with the names of the classes
  names: str  # their key in it
  labels: str  # key in the other files


FORMATS = {
  "cifar10": Format(
    *("cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a"),
    "cifar-10-batches-py",
    {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    *({"train": 10_000, "test": 10_000}, "batches.meta", "label_names", "labels"),
  ),
  "cifar100": Format(
    *("cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"),
    "cifar-100-python",
    {"train": ("train",), "test": ("test",)},
    *({"train": 50_000, "test": 10_000}, "meta", "fine_label_names", "fine_labels"),
  ),
}


def find(name: str, path: str) -> pathlib.Path | None:
  """The archive or unpacked folder that data.name and data.dir mean; None: another source."""
  if name not in FORMATS or not path:
    return None
  given, known = user_path(path), FORMATS[name]
  places = (given, given / known.folder, given / known.archive)
  return next((x for x in places if os.path.isfile(x) or os.path.isfile(x / known.meta)), None)


class Toronto:
  """The base splits "train" and "test" of an archive or its folder, as `sources.Source`.

  A UserError if a file is missing, cut short or damaged, or has other counts than it should. An
  archive of another MD5 than the published one is read with a warning.
  """

  def __init__(self, name: str, path: pathlib.Path):
    self._known, self._path = FORMATS[name], path
    wanted = {self._known.meta, *sum(self._known.files.values(), ())}
    try:
      self._files = (_unpacked if path.is_file() else _listed)(path, wanted)
    except Exception as error:  # tarfile and its decompressors raise nearly anything
      raise self._refused(reason(error)) from error
    if missing := sorted(wanted - self._files.keys()):
      raise self._refused(f"{', '.join(missing)}: missing")
    names = lambda found: [str(name, "latin-1") for name in found[self._known.names.encode()]]
    self.class_names = tuple(self._unpickled(self._known.meta, names))
    if path.is_file():
      with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
      if found != self._known.md5:
        _LOG.warning("%s: MD5 %s, not %s of the published archive", path, found, self._known.md5)

  def read(self, base: str) -> base_split.Base:
    """The examples of a base split, in the files' order; errors as for the class."""
    known = self._known
    if base not in known.files:
      raise UserError(f"{self._path}: has no split {base!r}, only {', '.join(known.files)}")
    n, key = known.images[base], known.labels.encode()
    examples = lambda found: (_array(found[b"data"]), np.array(found[key], np.int32))
    parts = []
    for file in known.files[base]:
      pixels, labels = self._unpickled(file, examples)
      if pixels.shape != (n, _PIXELS) or labels.shape != (n,):
        found = f"{list(pixels.shape)} pixels and {list(labels.shape)} labels"
        raise self._refused(f"{file} has {found}, not {[n, _PIXELS]} and {[n]}")
      parts.append((pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels))
    return base_split.Base(*map(np.concatenate, zip(*parts)))

  def _unpickled(self, file: str, wanted: Callable[[Any], Any]) -> Any:
    content = self._files[file]
    try:
      return wanted(_Unpickler(io.BytesIO(content), encoding="bytes").load())
    except Exception as error:  # of damaged pickles, and of other contents: nearly anything
      why = f"{file} of {len(content):,} bytes cannot be read: {reason(error)}"
      raise self._refused(why) from error

  def _refused(self, why: str) -> UserError:
    known = self._known
    if self._path.is_file():
      why = f"has {self._path.stat().st_size:,} bytes: {why}"
    return UserError(
      f"{self._path}: {why}; {known.archive} has {known.size:,} bytes (MD5 {known.md5})"
    )


def _listed(folder: pathlib.Path, wanted: set[str]) -> dict[str, bytes]:
  return {name: (folder / name).read_bytes() for name in wanted if (folder / name).is_file()}


def _unpacked(path: pathlib.Path, wanted: set[str]) -> dict[str, bytes]:
  with gzip.open(path) as file:  # all of it, because the checksum is at the end
    content = file.read(_LARGEST + 1)
  if len(content) > _LARGEST:
    raise ValueError(f"it would unpack to more than {_LARGEST:,} bytes")
  with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
    return {
      name: archive.extractfile(member).read()
      for member in archive
      if (name := pathlib.PurePosixPath(member.name).name) in wanted
      and member.isreg()
      and member.size <= len(content)  # sparse members claim any size
    }


_OF_ARRAYS = frozenset(
  "numpy.ndarray numpy.dtype numpy.core.multiarray._reconstruct"
  " numpy._core.multiarray._reconstruct".split()
)


class _Inert:
  """Arguments and state of an object of a pickle, which is not made."""

  def __init__(self, *arguments: Any):
    self.arguments, self.state = arguments, None

  def __setstate__(self, state: Any) -> None:
    self.state = state


# The reader in Python, because the one in C lets a file ask for all memory (LONG_BINPUT).
class _Unpickler(pickle._Unpickler):
  """Reads constants and containers; looks up none of the names that a NumPy array is made by."""

  def find_class(self, module: str, name: str) -> type:
    if f"{module}.{name}" in _OF_ARRAYS:
      return _Inert
    raise ValueError(f"it names {module}.{name}, which is not read")


def _array(found: Any) -> np.ndarray:
  """A pickled array of bytes: version, shape, type, whether in Fortran's order, content."""
  _, shape, dtype, fortran, content = found.state
  if dtype.arguments[0] not in (b"u1", "u1"):
    raise ValueError(f"an array of {dtype.arguments[0]!r}")
  return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
