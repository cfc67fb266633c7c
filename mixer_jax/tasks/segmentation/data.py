"""Images with a class for each pixel: from options to data sets."""

import dataclasses
import functools
import logging
import pathlib
from typing import Annotated, Mapping, NamedTuple

import numpy as np

from mixer_jax import options
from mixer_jax.data import further, splits
from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.images import folder
from mixer_jax.images.image_data import CIFAR10, ImageData
from mixer_jax.options import Option, Size, one_of, pair
from mixer_jax.paths import user_path
from mixer_jax.tasks.segmentation import shapes
from mixer_jax.tasks.segmentation.pairs import Pairs

_LOG = logging.getLogger(__name__)
_SAME = options.of(ImageData)  # options that classification has, too
_CANVAS = "height and width into which pairs are resized and padded; []: left as they are"
_NAMES = 'names, separated by commas; "": the lines of DIR/classes.txt, else numbers'
_Scale = lambda text: Annotated[float, Option(text, 0.01, 100)]
_LISTED = 9  # ids and classes in a message
_FEW = 128  # a last id of 255 with fewer ids than these is a colour, not a class


@dataclasses.dataclass(frozen=True)
class SegmentationData:
  """The group `config.data`.

  Classes are the ids of the masks in order, without `void`. Training images are resized by a random
  factor, uniform between two scales, cropped to `image_size`, maybe mirrored, and jittered.
  """

  name: one_of("pairs of files in `dir`, or generated shapes", ("folder", "shapes")) = "shapes"
  dir: Annotated[str, Option("folder of the pairs", free=True)] = ""
  cache_dir: Annotated[str, _SAME["cache_dir"]] = ""
  train_split: Annotated[str, _SAME["train_split"]] = "train"
  test_split: Annotated[str, _SAME["test_split"]] = "test"
  validation_split: Annotated[str, _SAME["validation_split"]] = ""
  test_sets: further.option("a folder of images, DIR/SPLIT or DIR/images/SPLIT") = ""
  canvas: Annotated[tuple[int, ...], Option(_CANVAS, 1, 2**14)] = ()
  classes: Annotated[str, Option(_NAMES)] = ""
  void: Annotated[int, Option("id of pixels that do not count", 0, 255)] = 255
  examples: Annotated[int, Option("shapes: training images; a quarter as many for tests", 4)] = 512
  image_size: Annotated[
    Size, Option("side that the model sees, in pixels, or height and width", 1, 2**14)
  ] = 64
  stride: Annotated[
    Size, Option("between windows of larger test images; 0: 2/3 of image_size", 0, 2**14)
  ] = 0
  smallest_scale: _Scale("of training images, at random") = 0.5
  largest_scale: _Scale("likewise") = 2.0
  flip: Annotated[bool, _SAME["flip"]] = True
  jitter: Annotated[float, Option("most change of brightness, contrast and saturation", 0, 1)] = 0.4
  mean: Annotated[tuple[float, ...], _SAME["mean"]] = CIFAR10[0]
  std: Annotated[tuple[float, ...], _SAME["std"]] = CIFAR10[1]

  @property
  def window_stride(self) -> tuple[int, int]:
    """Rows and columns between windows."""
    sides = zip(pair(self.stride), pair(self.image_size))
    return tuple(stride or max(1, side * 2 // 3) for stride, side in sides)

  @property
  def split_specs(self) -> dict[str, str]:
    """The split strings by the name of the split."""
    return splits.by_name(self.train_split, self.test_split, self.validation_split)

  @property
  def further_sets(self) -> dict[str, further.Place]:
    """Folders of images of the test sets of other sources, by name."""
    return further.places(self.test_sets, splits.OWN)

  def check(self) -> None:
    """Raises a UserError for options that contradict each other."""
    _ = self.further_sets
    if self.dir and self.name == "shapes":
      raise UserError(f"data.dir is {self.dir!r}, but data.name is 'shapes'; allowed: folder")
    if len(self.canvas) not in (0, 2):
      raise UserError(f"data.canvas is {self.canvas}; allowed: a height and a width, or []")
    if any(stride > side for stride, side in zip(pair(self.stride), pair(self.image_size))):
      why = f"pixels between windows have no answer; allowed: up to image_size, {self.image_size}"
      raise UserError(f"data.stride is {self.stride}: {why}")


class Loaded(NamedTuple):
  """Splits of {"image": uint8 [h, w, 3] RGB, "mask": uint8 [h, w] of ids}."""

  splits: Mapping[str, Arrays]
  class_names: tuple[str, ...]


def load(data: SegmentationData) -> Loaded:
  """Finds and decodes the set that the options name; a UserError if there is none."""
  read = functools.cache(functools.partial(_read, data))
  number = lambda base: len(read(base).images)
  parts = splits.checked_parts(data.split_specs, number, data.further_sets)
  used = {base: read(base) for chosen in parts.values() for base, _ in chosen}
  trained = [used[base].ids[rows.start : rows.stop] for base, rows in parts["train"]]
  names = _names(data, np.flatnonzero(np.concatenate(trained).any(axis=0)))
  for base in used.values():
    base.check(data.void, len(names))
  return Loaded({k: _joined(chosen, used) for k, chosen in parts.items()}, names)


@dataclasses.dataclass(frozen=True)
class _Base:
  """All pairs of a named split, the ids in each mask, bool [n, 256], and their files, if any."""

  images: np.ndarray
  masks: np.ndarray
  ids: np.ndarray
  files: Pairs | None = None

  def check(self, void: int, classes: int) -> None:
    """Raises a UserError if a mask has an id that is neither a class nor `void`."""
    known = np.append(_ids(void, classes), void)
    if (wrong := np.delete(self.ids, known, axis=1)).any():
      i = int(np.argmax(wrong.any(axis=1)))
      found = np.setdiff1d(np.flatnonzero(self.ids[i]), known)[0]
      where = self.files.where(i) if self.files else f"shapes {i}"
      allowed = f"0 to {known[-2]} for {classes} classes, and data.void, {void}"
      raise UserError(f"{where}: has pixels of id {found}; allowed: {allowed}")


def _ids(void: int, classes: int) -> np.ndarray:
  """The ids of the classes: the first so many without `void`."""
  return np.delete(np.arange(256), void)[:classes]


def _read(data: SegmentationData, base: str) -> _Base:
  if isinstance(base, further.Place):
    place = pathlib.Path(base)
    root = place.parents[1] if place.parent.name == "images" else place.parent
    files = Pairs(root, place.name, data.canvas, data.void)
    return _Base(**files.arrays(data.cache_dir), files=files)
  if data.name == "shapes":
    if base not in ("train", "test"):
      raise UserError(f"the split {base!r} is none of shapes; allowed: train, test")
    seed, n = (0, data.examples) if base == "train" else (1, data.examples // 4)
    images, masks = shapes.make(seed, n)
    ids = np.stack([np.bincount(mask.reshape(-1), minlength=256) > 0 for mask in masks])
    return _Base(images, masks, ids)
  root = user_path(data.dir).absolute()
  if not data.dir or not root.is_dir():
    raise UserError(f"data.dir={data.dir!r}: no such folder of pairs of images and masks")
  files = Pairs(root, base, data.canvas, data.void)
  return _Base(**files.arrays(data.cache_dir), files=files)


def _names(data: SegmentationData, found: np.ndarray) -> tuple[str, ...]:
  """Names of the classes: given, or else the numbers up to the last id of the training masks."""
  listed = ", ".join(map(str, found[:_LISTED]))
  found = found[found != data.void]
  where = (
    f"{data.dir or data.name}: the training masks have the ids {listed} (data.void: {data.void})"
  )
  if len(found) < 2:
    raise UserError(f"{where}; allowed: two classes or more")
  names = _given_names(data)
  if not names and found[-1] == 255 and len(found) < _FEW:
    raise UserError(f"{where}; allowed: ids in a row, 0, 1, ..., or data.classes")
  last = int(found[-1])
  ids = _ids(data.void, len(names) or last + (last < data.void))
  names = names or tuple(map(str, ids))
  if absent := [name for name, i in zip(names, ids) if i not in found]:
    few = ", ".join(absent[:_LISTED])
    _LOG.warning("%s, and no pixel of %d of %d classes: %s", where, len(absent), len(ids), few)
  return names


def _given_names(data: SegmentationData) -> tuple[str, ...]:
  """The names of the option, of a file beside the images, or of the shapes; () if there are none."""
  path = user_path(data.dir) / "classes.txt"
  if data.classes:
    where, names = "data.classes", data.classes.split(",")
  elif data.name == "shapes":
    return shapes.NAMES
  elif path.exists():
    with as_user_error(f"{path} is not UTF-8", UnicodeDecodeError):
      text = folder.read_file(path).decode("utf-8-sig")
    where, names = path, text.rstrip().splitlines()
  else:
    return ()
  names = tuple(name.strip() for name in names)
  if "" in names:  # without it, all later classes would have the name of the next one
    number = names.index("") + 1
    raise UserError(f"{where}: the name of class {number} of {len(names)} is empty")
  if len({*names}) < len(names):  # answers are given by name
    twice = next(name for name in names if names.count(name) > 1)
    raise UserError(f"{where}: has the class {twice!r} twice; allowed: different names")
  return names


def _joined(parts: list[tuple[str, range]], bases: Mapping[str, _Base]) -> Arrays:
  taken = [(bases[base], slice(rows.start, rows.stop)) for base, rows in parts]
  if len({base.images.shape[1:3] for base, _ in taken}) > 1:
    raise UserError("the parts of a split have images of different sizes; set data.canvas")
  join = lambda arrays: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
  images = join([base.images[rows] for base, rows in taken])
  masks = join([base.masks[rows] for base, rows in taken])
  paths = [base.files.paths[rows] for base, rows in taken if base.files]
  return Arrays({"image": images, "mask": masks}, paths=join(paths) if paths else None)
