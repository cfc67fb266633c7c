"""Image folders: ROOT/{train,test}/CLASS/IMAGE."""

import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
from typing import Any, Callable, Iterator
import warnings

import numpy as np
from PIL import Image

from mixer_jax.data import cache, splits
from mixer_jax.errors import UserError
from mixer_jax.images import decode
from mixer_jax.paths import user_path

_LOG = logging.getLogger(__name__)
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
LAYOUT = "an image folder has the layout ROOT/{train,test}/CLASS/IMAGE"
_ENDINGS = f"images end in {', '.join(EXTENSIONS)}"


class Folder:
  """A folder of images in one sub-folder a class, as `sources.Source`.

  Classes are the sorted folders of the train split, ROOT/train_base, or one, "", of images without
  folders. A class without an image is an error where the split trains, `trained`, and a warning
  elsewhere.

  Raises:
    UserError: the folder is missing or has another layout.
  """

  def __init__(self, root: str, train_base: str = "train", trained: bool = True):
    self._root = user_path(root).absolute()
    if not root or not os.path.isdir(self._root):
      raise UserError(f"data.dir={root!r}: no such folder; {LAYOUT}")
    self._train_base, self._trained = train_base, trained
    self.class_names = names = tuple(self._classes(train_base))
    if all(map(str.isdecimal, names)) and list(names) != sorted(names, key=int):
      place, first = self._root / train_base, ", ".join(names[:4])
      _LOG.warning("%s: the classes have the order of texts: %s, ...", place, first)

  def read(self, base: str) -> "Files":
    """Lists the images of ROOT/base in a shuffled order that depends on their names only.

    A UserError if there are none, or a class that the train split has not.
    """
    place, known, names, labels = self._root / base, self.class_names, [], []
    left_out = collections.Counter()
    for name in self._classes(base):
      if name not in known:
        train = self._root / self._train_base
        why = f"class {name!r} is not among the {len(known)} class folders of {train}"
        raise UserError(f"{place / name}: {why if name else f'no class folders in it; {LAYOUT}'}")
      images = _images(place / name, left_out)
      if not images and base == self._train_base and self._trained:
        raise UserError(f"{place / name}: no images in this class folder; {_ENDINGS}")
      if not images:
        _LOG.warning("%s: no images in this class folder; %s", place / name, _ENDINGS)
      names += [os.fsencode(os.path.join(name, image)) for image in images]
      labels += [known.index(name)] * len(images)
    if not names:
      raise UserError(f"{place}: no images in its class folders; {_ENDINGS}")
    if known != ("",):
      left_out["images beside the class folders"] = len(_images(place))
    if told := ", ".join(f"{n:,} {what}" for what, n in left_out.most_common() if n):
      _LOG.warning("%s: not read are %s; %s, %s", place, told, LAYOUT, _ENDINGS)
    order = splits.shuffled_order(len(names))
    identity = ("folder", str(self._root), base, known)
    names, labels = np.array(names)[order], np.array(labels, np.int32)[order]
    return Files(place, base, known, names, labels, identity)

  def _classes(self, base: str) -> list[str]:
    path = self._root / base
    if not path.is_dir():
      found = ", ".join(listed(self._root, folders=True)) or "none"
      raise UserError(f"{path}: no such folder (folders in data.dir: {found}); {LAYOUT}")
    names = listed(path, folders=True)
    if not names and not _images(path):
      raise UserError(f"{path}: no class folders in it; {LAYOUT}")
    return names or [""]


def _images(place: pathlib.Path, left_out: collections.Counter | None = None) -> list[str]:
  """The images in a folder; what else is in it is counted by its kind."""
  files, folders = listed(place), set(listed(place, folders=True))
  images = [x for x in files if x not in folders and x.lower().endswith(EXTENSIONS)]
  if left_out is not None:
    left_out["folders in class folders"] += len(folders)
    others = set(files) - folders - set(images)
    left_out.update(f"of {pathlib.Path(x).suffix or 'no ending'}" for x in others)
  return images


def test_files(path: str, flat: bool) -> "Files":
  """The images in a folder of class folders; if `flat`, maybe without these, all of one class.

  A UserError if there are none.
  """
  place = user_path(path).absolute()
  if not os.path.isdir(place):
    raise UserError(f"{place}: no such folder")
  found = Folder(str(place.parent), place.name, trained=False)
  if found.class_names == ("",) and not flat:
    raise UserError(f"{place}: no class folders in it; {LAYOUT}")
  return found.read(place.name)


@dataclasses.dataclass(frozen=True)
class Files:
  """Image files as `decode.Records`.

  Attributes:
    root: the folder that `names` are below.
    base: `root` below the directory of the set.
    class_names: of the labels.
    names: paths as bytes; texts take more memory in every worker.
    labels: int32 [n], or of sets of classes bool [n, classes].
    identity: what the examples depend on beside the files.
  """

  root: pathlib.Path
  base: str
  class_names: tuple[str, ...]
  names: np.ndarray
  labels: np.ndarray
  identity: tuple

  def __len__(self) -> int:
    return len(self.names)

  @property
  def paths(self) -> np.ndarray:
    """The files below the directory of the set, bytes [n]."""
    return np.char.add(os.fsencode(f"{self.base}/"), self.names)

  def where(self, i: int) -> str:
    return os.path.join(self.root, os.fsdecode(self.names[i]))

  def read(self, i: int) -> tuple[bytes, Any]:
    return read_file(self.where(i)), self.labels[i]

  def fingerprint(self) -> str:
    with readable(self.root):
      stats = [(name, os.stat(self.root / name)) for name in map(os.fsdecode, self.names)]
    files = ((name, found.st_size, found.st_mtime_ns) for name, found in stats)
    return cache.fingerprint(self.identity, files)


def read_file(path: str | os.PathLike) -> bytes:
  """The content of a file; a UserError if it cannot be read."""
  with readable(path):
    return pathlib.Path(path).read_bytes()


def read_image(
  path: str | os.PathLike, fit: Callable[[Image.Image], Image.Image] = Image.Image.copy
) -> np.ndarray:
  """An image file by `decode.decode_image`, without Pillow's warnings of damaged tags.

  Not for threads: the filter of warnings is the process's.
  """
  with warnings.catch_warnings(action="ignore"):
    return decode.decode_image(read_file(path), str(path), fit)


def listed(path: pathlib.Path, folders: bool = False) -> list[str]:
  """The sorted names in a folder, or of its folders, without hidden ones (.DS_Store)."""
  with readable(path), os.scandir(path) as entries:
    shown = (entry for entry in entries if not entry.name.startswith("."))
    return sorted(entry.name for entry in shown if not folders or entry.is_dir())


@contextlib.contextmanager
def readable(path: str | os.PathLike) -> Iterator[None]:
  """Makes a UserError, which names the file, of the system's errors."""
  try:
    yield
  except OSError as error:
    raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from error
