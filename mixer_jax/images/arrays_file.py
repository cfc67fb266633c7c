"""Arrays in an .npz file: train_images, train_labels, test_images, test_labels."""

import logging

import numpy as np

from mixer_jax import npz
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.images.decode import Decoded
from mixer_jax.paths import user_path

_ALLOWED = (
  "an .npz needs SPLIT_images uint8 [n, height, width, 3] and integer SPLIT_labels [n],"
  " e.g. train_images"
)
_LOG = logging.getLogger(__name__)
_NAMED = 10  # arrays or labels of the file, in a message
_MOST_CLASSES = 2**20  # larger labels are numbers of something else


class ArraysFile:
  """The base splits of an .npz file, as `sources.Source`.

  Classes are the file's `class_names`, else the numbers from 0 to the largest label of a base split.
  A UserError if it is no such file, or an array is missing, damaged or not as it has to be.
  """

  def __init__(self, path: str, base: str = "train"):
    self._path = path
    if not path or not (found := user_path(path)).is_file():
      raise UserError(f"data.dir={path!r} is no file; set it to the .npz file")
    with as_user_error(f"data.dir={path!r}: cannot be read, and {_ALLOWED}", ValueError):
      self._file = npz.Npz(found)
    if "class_names" in self._file.names:
      self.class_names = self._names(self._array("class_names").ravel())
      return
    labels = self.read(base).labels
    self.class_names = tuple(map(str, range(labels.max() + 1)))
    if absent := sorted({*range(len(self.class_names))} - {*labels.tolist()}):
      some = ", ".join(map(str, absent[:_NAMED]))
      what = f"of {len(self.class_names)} classes, {len(absent)} without an image"
      _LOG.warning("%s: %s_labels are %s: %s", path, base, what, some)

  def read(self, base: str) -> Decoded:
    """The examples of a base split, in the file's order."""
    images, labels = self._array(f"{base}_images"), self._array(f"{base}_labels")
    why = ""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
      why = f"{base}_images is {images.dtype} {list(images.shape)}"
    elif labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
      why = f"{base}_labels is {labels.dtype} {list(labels.shape)} for {len(images)} images"
    elif labels.min() < 0 or labels.max() >= _MOST_CLASSES:
      why = f"{base}_labels run from {labels.min()} to {labels.max()}, but count classes from 0"
    if why:
      raise UserError(f"{self._path}: {why}; {_ALLOWED}")
    return Decoded(images, labels.astype(np.int32))

  def _names(self, found: np.ndarray) -> tuple[str, ...]:
    with as_user_error(f"{self._path}: class_names is not UTF-8", UnicodeError):
      names = np.char.decode(found, "utf-8") if found.dtype.kind == "S" else found.astype(str)
    unique, counts = np.unique(names, return_counts=True)
    if len(unique) < len(names):
      twice = str(unique[counts.argmax()])
      raise UserError(
        f"{self._path}: class_names has {twice!r} {counts.max()} times; allowed: once"
      )
    return tuple(names.tolist())

  def _array(self, name: str) -> np.ndarray:
    names = self._file.names
    if name not in names:
      some = ", ".join(map(repr, names[:_NAMED])) or "none"
      raise UserError(f"{self._path}: has no array {name!r}, only {some}; {_ALLOWED}")
    with as_user_error(f"{self._path}: array {name!r} cannot be read", ValueError):
      return self._file.read(name)
