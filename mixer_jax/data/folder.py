"""Image folders: ROOT/{train,test}/CLASS/IMAGE."""

import os
import pathlib
import stat

import numpy as np

from mixer_jax.data import cache, decode, splits
from mixer_jax.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_LAYOUT = "an image folder has the layout ROOT/{train,test}/CLASS/IMAGE"


class Folder:
  """A folder of images in one sub-folder a class.

  Attributes:
    class_names: the sorted names of the train split's class folders.
  """

  def __init__(self, root: str, train_base: str = "train"):
    """Finds the classes in ROOT/train_base.

    Raises:
      UserError: if the folder is missing or not laid out as it should be.
    """
    if not root:
      raise UserError(f"data.dir='': data.name=folder needs the path of an image folder; {_LAYOUT}")
    self._root = pathlib.Path(os.path.expanduser(root)).absolute()
    if not self._root.is_dir():
      raise UserError(f"data.dir={root}: no such folder; {_LAYOUT}")
    self.class_names = tuple(self._class_dirs(train_base))
    self._train_base = train_base

  def records(self, base: str) -> decode.Records:
    """Lists the images of ROOT/base in a shuffled order that depends on their names only."""
    classes = self._class_dirs(base)
    unknown = sorted(set(classes) - set(self.class_names))
    if unknown:
      raise UserError(
        f"{self._root / base / unknown[0]}: class {unknown[0]!r} is not among the"
        f" {len(self.class_names)} class folders of {self._root / self._train_base}"
      )
    names, labels = [], []
    for name in classes:
      found = _list_images(self._root / base / name)
      if not found and base == self._train_base:
        raise UserError(
          f"{self._root / base / name}: no images in this class folder; {_extensions()}"
        )
      names += found
      labels += [self.class_names.index(name)] * len(found)
    if not names:
      raise UserError(f"{self._root / base}: no images in its class folders; {_extensions()}")
    files = _Files(self._root, base, self.class_names, names, labels)
    return decode.Records(len(names), files.fingerprint, files.read, files.path)

  def _class_dirs(self, base: str) -> list[str]:
    path = self._root / base
    if not path.is_dir():
      found = ", ".join(sorted(p.name for p in self._root.iterdir() if p.is_dir())) or "none"
      raise UserError(f"{path}: no such folder (folders in data.dir: {found}); {_LAYOUT}")
    names = sorted(e.name for e in _scan(path) if _is_dir(e))
    if not names:
      raise UserError(f"{path}: no class folders in it; {_LAYOUT}")
    return names


class _Files:
  """The images of ROOT/base by index, in a shuffled order.

  A million of them take some 40 bytes each, here and in every worker process.
  """

  def __init__(
    self,
    root: pathlib.Path,
    base: str,
    classes: tuple[str, ...],
    names: list[str],
    labels: list[int],
  ):
    self._identity = ("folder", str(root), base, classes)
    self._root = os.path.join(root, base)
    self._classes = classes
    encoded = [os.fsencode(name) for name in names]
    self._names = b"".join(encoded)
    self._ends = np.cumsum([0] + [len(name) for name in encoded])
    self._labels = np.array(labels, np.int32)
    self._order = splits.shuffled_order(len(names))

  def path(self, i: int) -> str:
    return os.path.join(self._root, self._below_root(self._order[i]))

  def read(self, i: int) -> tuple[bytes, int]:
    path = self.path(i)
    _stat(path)
    return _read_bytes(path), int(self._labels[self._order[i]])

  def fingerprint(self) -> str:
    below = map(self._below_root, range(len(self._labels)))
    files = [(name, *_stat(os.path.join(self._root, name))) for name in below]
    return cache.fingerprint(self._identity, files)

  def _below_root(self, unshuffled: int) -> str:
    start, end = self._ends[unshuffled : unshuffled + 2]
    folder = self._classes[self._labels[unshuffled]]
    return os.path.join(folder, os.fsdecode(self._names[start:end]))


def _is_dir(entry: os.DirEntry) -> bool:
  try:
    return entry.is_dir()
  except OSError as e:
    raise UserError(f"{entry.path}: cannot be read ({e.strerror})") from e


def _list_images(path: pathlib.Path) -> list[str]:
  """Returns the names of the images in a folder, sorted."""
  return sorted(e.name for e in _scan(path) if e.name.lower().endswith(EXTENSIONS))


def _stat(path: str) -> tuple[int, int]:
  """Returns a file's bytes and its mtime in ns."""
  try:
    result = os.stat(path)
  except OSError as e:  # a link to nothing, or to itself
    raise UserError(f"{path}: cannot be read ({e.strerror})") from e
  if not stat.S_ISREG(result.st_mode):  # reading a pipe would wait for ever
    raise UserError(f"{path}: has the name of an image but is no file")
  return result.st_size, result.st_mtime_ns


def _scan(path: pathlib.Path) -> list[os.DirEntry]:
  """Lists a folder without hidden entries (.DS_Store and the like)."""
  try:
    return [e for e in os.scandir(path) if not e.name.startswith(".")]
  except OSError as error:
    raise UserError(f"{path}: cannot be listed: {error.strerror}") from error


def _read_bytes(path: str) -> bytes:
  try:
    with open(path, "rb") as file:
      return file.read()
  except OSError as error:
    raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _extensions() -> str:
  return "images end in " + ", ".join(EXTENSIONS)
