"""Sets of labelled images, from the options of `config.data` to datasets.

Folders and TFDS sets are decoded once and then memory-mapped (`data/cache.py`), or stay encoded if
they are very large (`decode.Encoded`). The bundled sample is a prepared TFDS directory.
"""

import dataclasses
import functools
import logging
import math
import pathlib
from typing import Mapping, NamedTuple, Protocol

import numpy as np
from PIL import Image

from mixer_jax.data import cache, cpus, splits
from mixer_jax.data.dataset import Arrays, Dataset, examples
from mixer_jax.errors import UserError
from mixer_jax.images import (
  arrays_file,
  cifar_files,
  crops,
  decode,
  folder,
  further_test_sets,
  tfds_images,
)
from mixer_jax.images.decode import Decoded, Records
from mixer_jax.images.image_data import ImageData
from mixer_jax.options import pair

SAMPLE_NAME = "cifar10_sample"
SAMPLE_DIR = pathlib.Path(__file__).parent / "bundled"

# Sets that take more than this once they are decoded are streamed.
CACHED_BYTES = 32 << 30
_FORMAT = 3  # raise it when decoding changes, so that old cache entries are not read
_DARK = 64  # of 255: a quarter of the range
_LOOKED_AT = 16  # images
_LOG = logging.getLogger(__name__)


class Source(Protocol):
  """A set of images; its classes are in the order of the labels."""

  class_names: tuple[str, ...]

  def read(self, base: str) -> Decoded | Records:
    """A base split, decoded or still encoded."""


class Loaded(NamedTuple):
  """Splits of {"image": uint8 [h, w, 3] RGB, "label": int32, an index into the training classes}.

  Labels of further test sets may be sets of classes, bool [classes].
  """

  splits: Mapping[str, Dataset]
  class_names: tuple[str, ...]


def load(data: ImageData, labelled: bool = True) -> Loaded:
  """Finds the set that the options name, and decodes it unless it is streamed.

  Raises:
    UserError: the set is not there or broken; or, if it has to be `labelled`, it has one class.
  """
  data.check()
  source = _open(data, splits.base_names(data.train_split, "data.train_split")[0])
  classes = source.class_names
  if len(classes) < 2 and labelled:
    if classes == ("",):
      raise UserError(f"data.dir={data.dir!r}: no class folders in it; {folder.LAYOUT}")
    only = repr(", ".join(classes) or "(none)")
    raise UserError(f"data.name={data.name}: has only the class {only}; allowed: two or more")
  read = functools.cache(source.read)  # several splits may be slices of one
  parts = splits.checked_parts(data.split_specs, lambda base: len(read(base)))
  bases = {base: read(base) for chosen in parts.values() for base, _ in chosen}
  _log_fit(data, next(iter(bases.values())))
  if not (streamed := _is_streamed(data, bases)):
    bases = {base: _decoded(data, base, found) for base, found in bases.items()}
  shapes = {base: _shape(data, found) for base, found in bases.items()}
  first = next(iter(shapes))
  for base, shape in shapes.items():
    what = f"data.name={data.name}: {base}"
    decode.check_size(what, shape, first, shapes[first], encoded=data.name != "npz")
  found = {}
  for name, chosen in parts.items():
    rows = [(bases[base], rows) for base, rows in chosen]
    if streamed:
      found[name] = _encoded(data, rows, shapes[first], name == "train", len(classes))
    else:
      found[name] = _arrays(rows)
  warn_if_dark(f"data.name={data.name}", found["train"])
  tfds_dir = data.dir if isinstance(source, tfds_images.Source) else ""
  for name, (place, labels) in data.further_sets.items():
    opened, sets = further_test_sets.open_set(name, place, labels, classes, tfds_dir)
    found[name] = _further(data, name, place, opened, shapes[first], streamed, len(classes), sets)
  return Loaded(found, classes)


def _open(data: ImageData, train_base: str) -> Source:
  if data.name == "npz":
    return arrays_file.ArraysFile(data.dir, train_base)
  if path := cifar_files.find(data.name, data.dir):
    data.check_arrays("CIFAR's archive")
    return cifar_files.CifarFiles(data.name, path)
  if data.name == "folder":
    return folder.Folder(data.dir, train_base)
  if data.name == "sample":
    return tfds_images.Source(SAMPLE_NAME, str(SAMPLE_DIR))
  return tfds_images.Source(data.name, data.dir)


def _log_fit(data: ImageData, found: Decoded | Records) -> None:
  """Says what becomes of an image of other proportions."""
  if isinstance(found, Decoded) or not data.stored_size or data.crop:
    return
  height, width, _ = decode.decode_image(found.read(0)[0], found.where(0)).shape
  rows, columns = pair(data.stored_size)
  ratio = height * columns / (width * rows)
  lost = 1 - min(ratio, 1 / ratio)
  text = {
    "pad": f"{lost:.0%} of that is black",
    "crop": f"{lost:.0%} of it, outside the centre, is cut off",
    "squash": f"its proportions change by {lost:.0%}",
  }[data.fit]
  line = "data.fit=%s: the first image, %dx%d pixels, becomes %dx%d; %s"
  _LOG.info(line, data.fit, width, height, columns, rows, text)


def warn_if_dark(what: str, split: Dataset) -> None:
  """Warns of images that are nearly black, as those of 12 bits in files of 16 bits become."""
  rows = np.linspace(0, len(split) - 1, _LOOKED_AT).astype(int)
  images = examples(split, rows)["image"]
  if (brightest := np.percentile(images, 99.9)) < _DARK:
    why = "values of files of 16 bits are divided by 257, whatever their range; stretch them first"
    _LOG.warning("%s: nearly all pixels are %d or less of 255; %s", what, brightest, why)


def _is_streamed(data: ImageData, bases: Mapping[str, Decoded | Records]) -> bool:
  first = next(iter(bases.values()))
  if isinstance(first, Decoded) or data.stream == "never":
    return False
  if data.crop or data.stream == "always":
    return True
  return sum(map(len, bases.values())) * math.prod(_shape(data, first)) > CACHED_BYTES


def _shape(data: ImageData, found: Decoded | Records) -> tuple[int, ...]:
  """Height, width and channels of images as they are read."""
  if isinstance(found, Decoded):
    return found.images.shape[1:]
  if size := data.image_size if data.crop else data.stored_size:
    return *pair(size), 3
  return decode.decode_image(found.read(0)[0], found.where(0)).shape


def _further(
  data: ImageData,
  name: str,
  place: str,
  found: Decoded | Records,
  shape: tuple[int, ...],
  streamed: bool,
  classes: int,
  sets: bool,
) -> Dataset:
  """A test set of another source, its images in the form of the training images."""
  # Others are fitted to it, as `predict` does with files.
  data = dataclasses.replace(data, name=name, stored_size=0 if data.crop else shape[:2])
  encoded = not isinstance(found, Decoded)
  if streamed and encoded:
    return _encoded(data, [(found, range(len(found)))], shape, False, classes, sets)
  base, what = _decoded(data, "test", found), f"data.test_sets: {place}"
  decode.check_size(what, base.images.shape[1:], "the training data", shape, encoded)
  return Arrays({"image": base.images, "label": base.labels}, paths=base.paths)


def _encoded(
  data: ImageData, parts: list, shape: tuple, train: bool, classes: int, sets: bool = False
) -> Dataset:
  size, random = data.image_size, bool(data.crop and train)
  if random:
    fit = functools.partial(crops.random_area, smallest=data.smallest_crop, size=size)
  elif data.crop:
    fit = functools.partial(crops.centre, shorter=data.resize, size=size)
  else:
    fit = _fit(data)
  workers = cpus.available() if data.workers == -1 else data.workers
  return decode.Encoded(tuple(parts), shape, fit, random, classes, workers, data.read_ahead, sets)


def _fit(data: ImageData) -> decode.Fit:
  """The function that brings an image into the form in which it is stored."""
  if not data.stored_size:
    return Image.Image.copy
  return functools.partial(crops.fitted, size=data.stored_size, fit=data.fit)


def _decoded(data: ImageData, base: str, found: Decoded | Records) -> Decoded:
  """A base split as arrays, from the cache if they are encoded."""
  if isinstance(found, Decoded):
    return found
  other_fit = [data.fit] if data.stored_size and data.fit != "crop" else []
  rows, columns = pair(data.stored_size)
  identity = (_FORMAT, rows if rows == columns else (rows, columns), *other_fit)
  key = cache.fingerprint(identity, [(found.fingerprint(), 0, 0)])
  build = functools.partial(decode.decode_all, found, _fit(data))
  arrays = cache.read(cache.place(data.cache_dir), f"{data.name}-{base}", key, build)
  return Decoded(**arrays, shuffled=True, paths=getattr(found, "paths", None))


def _arrays(parts: list[tuple[Decoded, range]]) -> Arrays:
  arrays = splits.joined([(base.arrays, rows, base.shuffled) for base, rows in parts])
  return Arrays({k: arrays[k] for k in ("image", "label")}, paths=arrays.get("path"))
