"""Arrays in an .npz file: train_images, train_labels, test_images, test_labels."""

import os
import pathlib

import numpy as np

from mixer_jax import npz
from mixer_jax.data import splits
from mixer_jax.errors import UserError

_ALLOWED = "an .npz needs SPLIT_images uint8 [n, height, width, 3] and integer SPLIT_labels [n], e.g. train_images"
_NAMED = 10  # arrays of the file, in a message


class Npz:
  """The base splits of an .npz file.

  Attributes:
    class_names: the file's `class_names`, else the numbers from 0 to the
      largest training label.
  """

  def __init__(self, path: str):
    """Reads the arrays' names and the class names.

    Raises:
      UserError: if it is not such a file.
    """
    self._path = path
    if not pathlib.Path(os.path.expanduser(path)).is_file():
      raise UserError(
        f"data.dir={path!r}: no such file; data.name=npz needs the path of an .npz file"
      )
    try:
      self._file = npz.Npz(os.path.expanduser(path))
    except ValueError as error:
      raise UserError(f"data.dir={path}: not a readable .npz file: {error}; {_ALLOWED}") from error
    if "class_names" in self._file.names:
      self.class_names = tuple(str(name) for name in self._array("class_names").ravel())
    else:
      self.class_names = tuple(str(i) for i in range(int(self.read("train").labels.max()) + 1))

  def read(self, base: str) -> splits.Base:
    """Returns the examples of a base split; the order is the file's."""
    images, labels = self._array(f"{base}_images"), self._array(f"{base}_labels")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
      raise UserError(
        f"{self._path}: {base}_images is {images.dtype} {list(images.shape)}; {_ALLOWED}"
      )
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
      raise UserError(
        f"{self._path}: {base}_labels is {labels.dtype} {list(labels.shape)}"
        f" for {len(images)} images; {_ALLOWED}"
      )
    if not len(images):
      raise UserError(f"{self._path}: {base}_images is empty; {_ALLOWED}")
    if labels.max() > np.iinfo(np.int32).max or labels.min() < 0:  # a cast would hide it
      raise UserError(
        f"{self._path}: {base}_labels run from {labels.min()} to {labels.max()}; they count from 0"
      )
    return splits.Base(images, labels.astype(np.int32), shuffled=False)

  def _array(self, name: str) -> np.ndarray:
    names = self._file.names
    if name not in names:
      some = ", ".join(map(repr, names[:_NAMED])) or "none"
      raise UserError(f"{self._path}: has no array {name!r}, only {some}; {_ALLOWED}")
    try:
      return self._file.read(name)
    except ValueError as error:
      raise UserError(f"{self._path}: array {name!r} cannot be read: {error}") from error
