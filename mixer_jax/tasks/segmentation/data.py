"""Images with a class for each pixel: options in, datasets out."""

import dataclasses
import functools
import logging
from typing import Annotated, Mapping, NamedTuple

import numpy as np

from mixer_jax import options
from mixer_jax.data import splits
from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.images import folder
from mixer_jax.images.image_data import CIFAR10, ImageData
from mixer_jax.options import Option, one_of
from mixer_jax.paths import user_path
from mixer_jax.tasks.segmentation import shapes
from mixer_jax.tasks.segmentation.pairs import Pairs

_LOG = logging.getLogger(__name__)
_SAME = options.of(ImageData)  # options that classification has, too
_CANVAS = "height and width into which pairs are resized and padded; []: left as they are"
_NAMES = 'names, separated by commas; "": the lines of DIR/classes.txt, else numbers'
_Scale = lambda text: Annotated[float, Option(text, 0.01, 100)]


@dataclasses.dataclass(frozen=True)
class SegmentationData:
  """The group `config.data`.

  Classes are the ids of the masks in order, without `void`. Training images are resized by a factor
  that is uniform between two scales, cropped to `image_size`, maybe mirrored, and jittered.
  """

  name: one_of("pairs of files in `dir`, or generated shapes", ("folder", "shapes")) = "shapes"
  dir: Annotated[str, Option("folder of the pairs", free=True)] = ""
  cache_dir: Annotated[str, _SAME["cache_dir"]] = ""
  train_split: Annotated[str, _SAME["train_split"]] = "train"
  test_split: Annotated[str, _SAME["test_split"]] = "test"
  validation_split: Annotated[str, _SAME["validation_split"]] = ""
  canvas: Annotated[tuple[int, ...], Option(_CANVAS, 1, 2**14)] = ()
  classes: Annotated[str, Option(_NAMES)] = ""
  void: Annotated[int, Option("id of pixels that do not count", 0, 255)] = 255
  examples: Annotated[int, Option("shapes: training images; a quarter as many for tests", 4)] = 512
  image_size: Annotated[int, Option("side that the model sees, in pixels", 1, 2**14)] = 64
  stride: Annotated[
    int, Option("between windows of larger test images; 0: 2/3 of image_size", 0, 2**14)
  ] = 0
  smallest_scale: _Scale("of training images, at random") = 0.5
  largest_scale: _Scale("likewise") = 2.0
  flip: Annotated[bool, _SAME["flip"]] = True
  jitter: Annotated[float, Option("most change of brightness, contrast and saturation", 0, 1)] = 0.4
  mean: Annotated[tuple[float, ...], _SAME["mean"]] = CIFAR10[0]
  std: Annotated[tuple[float, ...], _SAME["std"]] = CIFAR10[1]

  @property
  def window_stride(self) -> int:
    return self.stride or max(1, self.image_size * 2 // 3)

  @property
  def split_specs(self) -> dict[str, str]:
    """The split strings by the name of the split."""
    return splits.by_name(self.train_split, self.test_split, self.validation_split)

  def check(self) -> None:
    """Raises a UserError for options that contradict each other."""
    if self.dir and self.name == "shapes":
      allowed = "folder, to read it; no data.dir, for shapes"
      raise UserError(f"data.dir is {self.dir!r}, but data.name is 'shapes'; allowed: {allowed}")
    if len(self.canvas) not in (0, 2) or any(side != int(side) for side in self.canvas):
      raise UserError(f"data.canvas is {self.canvas}; allowed: a height and a width, or []")
    if self.smallest_scale > self.largest_scale:
      scales = f"{self.smallest_scale}, above data.largest_scale, {self.largest_scale}"
      raise UserError(f"data.smallest_scale is {scales}")
    if self.stride > self.image_size:
      why = f"it must be at most data.image_size, {self.image_size}, or pixels have no window"
      raise UserError(f"data.stride is {self.stride}; {why}")
    for name, spec in self.split_specs.items():
      bases = splits.base_names(spec, splits.field(name))
      if self.name == "shapes" and (others := sorted({*bases} - {"train", "test"})):
        raise UserError(
          f"data.{name}_split={spec!r}: shapes have no {others[0]!r}, but train, test"
        )


class Loaded(NamedTuple):
  """Splits of {"image": uint8 [h, w, 3] RGB, "mask": uint8 [h, w] of ids}."""

  splits: Mapping[str, Arrays]
  class_names: tuple[str, ...]


def load(data: SegmentationData) -> Loaded:
  """Finds and decodes the set that the options name; or a UserError."""
  data.check()
  bases = functools.cache(functools.partial(_read, data))
  count = lambda base: len(bases(base).images)
  parts = {k: splits.parts(v, f"data.{k}_split", count) for k, v in data.split_specs.items()}
  splits.check_apart(parts, data.split_specs)
  used = {base: bases(base) for chosen in parts.values() for base, _ in chosen}
  names = _names(data, [used[base].ids[rows.start : rows.stop] for base, rows in parts["train"]])
  for base in used.values():
    base.check(data.void, len(names))
  real = np.arange(256) != data.void
  for name, chosen in parts.items():
    if not any(used[base].ids[rows.start : rows.stop, real].any() for base, rows in chosen):
      void = f"all pixels of its masks have data.void, {data.void}"
      raise UserError(
        f"data.{name}_split={data.split_specs[name]!r}: {void}; allowed: masks with classes"
      )
  return Loaded({k: _joined(chosen, used) for k, chosen in parts.items()}, names)


@dataclasses.dataclass(frozen=True)
class _Base:
  """All pairs of a named split, the ids in each mask, bool [n, 256], and their files, if any."""

  images: np.ndarray
  masks: np.ndarray
  ids: np.ndarray
  files: Pairs | None = None

  def check(self, void: int, classes: int) -> None:
    """Raises a UserError if a mask has an id that is neither of the classes nor `void`."""
    wrong = self.ids & ~(_is_class(void, classes) | (np.arange(256) == void))
    if wrong.any():
      i, found = (int(x[0]) for x in np.nonzero(wrong))
      where = self.files.where(i) if self.files else f"shapes {i}"
      last = classes - (void >= classes)
      allowed = f"0 to {last} for {classes} classes, and data.void, {void}"
      raise UserError(f"{where}: has pixels of id {found}; allowed: {allowed}")


def _is_class(void: int, classes: int) -> np.ndarray:
  """Which ids are classes, bool [256]: the first so many without `void`."""
  ids = np.arange(256)
  return (ids != void) & (ids - (ids > void) < classes)


def _read(data: SegmentationData, base: str) -> _Base:
  if data.name == "shapes":
    n = data.examples if base == "train" else data.examples // 4
    images, masks = shapes.make(["train", "test"].index(base), n)
    ids = np.stack([np.bincount(mask.reshape(-1), minlength=256) > 0 for mask in masks])
    return _Base(images, masks, ids)
  root = user_path(data.dir).absolute()
  if not data.dir or not root.is_dir():
    raise UserError(f"data.dir={data.dir!r}: no such folder; it has pairs of images and masks")
  files = Pairs(root, base, tuple(map(int, data.canvas)), data.void)
  return _Base(**files.arrays(data.cache_dir), files=files)


def _names(data: SegmentationData, ids: list[np.ndarray]) -> tuple[str, ...]:
  """Names of the classes: given, of a file, or the numbers of those in the training masks."""
  found = np.flatnonzero(np.any(np.concatenate(ids), axis=0))
  found = found[found != data.void]
  named = ", ".join(map(str, found[:9])) or "none"
  of = data.dir or data.name
  where = f"{of}: the training masks have the ids {named}, beside data.void, {data.void}"
  if len(found) < 2:
    raise UserError(f"{where}; allowed: two classes or more")
  if names := _given_names(data):
    places = np.flatnonzero(_is_class(data.void, len(names)))
    if absent := [name for name, place in zip(names, places) if place not in found]:
      _LOG.warning("%s; none of the classes %s", where, ", ".join(absent))
    return names
  classes = int(found.max() - (found.max() > data.void)) + 1
  if found.max() == 255 and len(found) < 128:  # 255 for one class of two, as editors write them
    raise UserError(f"{where}; allowed: ids in a row, for these would be {classes} classes")
  if empty := classes - len(found):
    _LOG.warning("%s: they make %d classes, %d of them without a pixel", where, classes, empty)
  return tuple(map(str, np.flatnonzero(_is_class(data.void, classes))))


def _given_names(data: SegmentationData) -> tuple[str, ...]:
  """The names of the option, of a file beside the images, or of the shapes; maybe none."""
  if data.classes:
    return _different(data.classes.split(","), "data.classes")
  if data.name == "shapes":
    return shapes.NAMES
  path = user_path(data.dir) / "classes.txt"
  if not path.exists():
    return ()
  with as_user_error(f"{path} is not UTF-8", UnicodeDecodeError):
    lines = folder.read_file(path).decode("utf-8-sig").splitlines()
  return _different([line for line in lines if line.strip()], str(path))


def _different(names: list[str], where: str) -> tuple[str, ...]:
  names = [name.strip() for name in names]
  if "" in names:
    raise UserError(f"{where}: class {names.index('')} has no name; allowed: a name for each")
  if twice := [name for name in names if names.count(name) > 1]:
    raise UserError(f"{where}: has the class {twice[0]!r} twice; allowed: different names")
  return tuple(names)


def _joined(parts: list[tuple[str, range]], bases: Mapping[str, _Base]) -> Arrays:
  taken = [(bases[base], slice(rows.start, rows.stop)) for base, rows in parts]
  shapes_ = {base.images.shape[1:3] for base, _ in taken}
  if len(shapes_) > 1:
    raise UserError("the parts of a split have images of different sizes; set data.canvas")
  join = lambda arrays: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
  images = join([base.images[rows] for base, rows in taken])
  masks = join([base.masks[rows] for base, rows in taken])
  paths = [base.files.paths[rows] for base, rows in taken if base.files]
  return Arrays({"image": images, "mask": masks}, paths=join(paths) if paths else None)
