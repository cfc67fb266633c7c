"""CIFAR-10 and CIFAR-100 as https://www.cs.toronto.edu/~kriz/cifar.html offers them for Python.

The archives hold pickles, which are read without executing them: nothing that they name is imported
or called, and a NumPy array is a shape and bytes.
"""

import hashlib
import io
import logging
import pathlib
import pickle
import tarfile
from typing import Any, Callable, NamedTuple

import numpy as np

from mixer_jax.errors import UserError, as_user_error
from mixer_jax.images.decode import Decoded
from mixer_jax.paths import user_path

_LOG = logging.getLogger(__name__)
_LARGEST = 1 << 28  # bytes that are unpacked of an archive: either takes 187 MB


class Format(NamedTuple):
  """How the files of a set are laid out."""

  archive: str
  md5: str
  folder: str  # in the archive
  files: dict[str, tuple[str, ...]]  # by base split
  meta: str  # the file with the names of the classes
  names: str  # their key in it
  labels: str  # key in the other files


FORMATS = {
  "cifar10": Format(
    *("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"),
    {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    *("batches.meta", "label_names", "labels"),
  ),
  "cifar100": Format(
    *("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"),
    {"train": ("train",), "test": ("test",)},
    *("meta", "fine_label_names", "fine_labels"),
  ),
}


def find(name: str, path: str) -> pathlib.Path | None:
  """The archive or unpacked folder that data.name and data.dir mean; None: another source."""
  if name not in FORMATS or not path:
    return None
  given, known = user_path(path), FORMATS[name]
  places = (given, given / known.folder, given / known.archive)
  return next((x for x in places if x.is_file() or (x / known.meta).is_file()), None)


class CifarFiles:
  """The base splits "train" and "test" of an archive or its folder, as `sources.Source`.

  A UserError if a file is missing, cut short or damaged. An archive of another MD5 than the
  published one is read with a warning.
  """

  def __init__(self, name: str, path: pathlib.Path):
    self._known, self._path = FORMATS[name], path
    wanted = {self._known.meta, *sum(self._known.files.values(), ())}
    with as_user_error(f"{path}: cannot be read"):
      self._files = (_unpacked if path.is_file() else _listed)(path, wanted)
    if missing := sorted(wanted - self._files.keys()):
      raise UserError(f"{path}: lacks {', '.join(missing)}")
    names = lambda found: [str(name, "latin-1") for name in found[self._known.names.encode()]]
    self.class_names = tuple(self._unpickled(self._known.meta, names))
    if path.is_file():
      found = hashlib.md5(path.read_bytes()).hexdigest()
      if found != self._known.md5:
        _LOG.warning("%s: MD5 %s, not %s of the published archive", path, found, self._known.md5)

  def read(self, base: str) -> Decoded:
    """The examples of a base split, in the files' order; errors as for the class."""
    known = self._known
    if base not in known.files:
      raise UserError(f"{self._path}: has no split {base!r}, only {', '.join(known.files)}")

    def examples(found: Any) -> tuple[np.ndarray, np.ndarray]:
      labels = np.array(found[known.labels.encode()], np.int32)
      planes = _array(found[b"data"]).reshape(len(labels), 3, 32, 32)
      return planes.transpose(0, 2, 3, 1), labels

    parts = [self._unpickled(file, examples) for file in known.files[base]]
    return Decoded(*map(np.concatenate, zip(*parts)))

  def _unpickled(self, file: str, wanted: Callable[[Any], Any]) -> Any:
    # Damaged pickles, and pickles of something else, raise nearly anything.
    with as_user_error(f"{self._path}: {file} cannot be read"):
      return wanted(_Unpickler(io.BytesIO(self._files[file]), encoding="bytes").load())


def _listed(folder: pathlib.Path, wanted: set[str]) -> dict[str, bytes]:
  return {name: (folder / name).read_bytes() for name in wanted if (folder / name).is_file()}


def _unpacked(path: pathlib.Path, wanted: set[str]) -> dict[str, bytes]:
  found, size = {}, 0
  with tarfile.open(path, "r:gz") as archive:
    for member in archive:
      size += member.size
      if size > _LARGEST:
        raise ValueError(f"it would unpack to more than {_LARGEST:,} bytes")
      name = pathlib.PurePosixPath(member.name).name
      if name in wanted and member.isreg():
        found[name] = archive.extractfile(member).read()
  return found


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
