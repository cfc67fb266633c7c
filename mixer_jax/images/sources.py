"""One door to every set of labelled images: options in, datasets out.

Folders and TFDS sets are decoded once and then memory-mapped (`data/cache.py`), or stay encoded if
they are very large (`decode.Encoded`); the bundled sample is a prepared TFDS directory.
"""

import dataclasses
import functools
import math
import pathlib
from typing import Any, Mapping, NamedTuple, Protocol

import numpy as np

from mixer_jax.data import cache, cpus, splits, tfds_source
from mixer_jax.data.dataset import Arrays, Dataset
from mixer_jax.errors import UserError
from mixer_jax.images import arrays_file, base_split, crops, decode, folder, test_sets, toronto
from mixer_jax.images.image_data import ImageData
from mixer_jax.runtime.imports import without

SAMPLE_NAME = "cifar10_sample"
SAMPLE_DIR = pathlib.Path(__file__).parent / "bundled"

# Sets that take more than this once they are decoded are streamed.
CACHED_BYTES = 32 << 30
_FORMAT = 2  # raise it when decoding changes, so that old cache entries are not read


class Source(Protocol):
  """A set of images; its classes are in the order of the labels."""

  class_names: tuple[str, ...]

  def read(self, base: str) -> base_split.Base | decode.Records:
    """A base split: arrays, or images that are still encoded."""


class Loaded(NamedTuple):
  """Splits of {"image": uint8 [h, w, 3] RGB, "label": int32, an index into the training classes}.

  Labels of further test sets may be sets of classes, bool [classes].
  """

  splits: Mapping[str, Dataset]
  class_names: tuple[str, ...]


def load(data: ImageData, labelled: bool = True) -> Loaded:
  """Finds the set that the options name, decodes it unless it is streamed; or a UserError.

  With `labelled` it has two classes or more.
  """
  data.check()
  specs = data.split_specs
  source = _open(data, splits.base_names(data.train_split, "data.train_split")[0])
  if (classes := len(source.class_names)) < 2 and labelled:
    if source.class_names == ("",):
      raise UserError(f"data.dir={data.dir!r}: no class folders in it; {folder.LAYOUT}")
    only = repr(", ".join(source.class_names) or "(none)")
    raise UserError(f"data.name={data.name}: has only the class {only}; allowed: two or more")
  read = functools.cache(source.read)  # several splits may be slices of one
  count = lambda base: len(read(base))
  parts = {name: splits.parts(spec, splits.field(name), count) for name, spec in specs.items()}
  splits.check_apart(parts, specs)
  bases = {base: read(base) for chosen in parts.values() for base, _ in chosen}
  if not (streamed := _is_streamed(data, bases)):
    bases = {base: _decoded(data, base, found) for base, found in bases.items()}
  shapes = {base: _shape(data, found) for base, found in bases.items()}
  first = next(iter(shapes))
  remedy = {"remedy": "allowed: one size"} if data.name == "npz" else {}
  for base, shape in shapes.items():
    decode.check_size(f"data.name={data.name}: {base}", shape, first, shapes[first], **remedy)
  found = {}
  for name, chosen in parts.items():
    rows = tuple((bases[base], rows) for base, rows in chosen)
    if streamed:
      found[name] = _encoded(data, rows, shapes[first], name == "train", classes)
    else:
      found[name] = _arrays(f"{splits.field(name)}={specs[name]}", rows, classes)
  tfds_dir = data.dir if isinstance(source, _Tfds) else ""
  for name, (place, labels) in data.further_sets.items():
    opened, sets = test_sets.open_set(name, place, labels, source.class_names, tfds_dir)
    found[name] = _test_set(data, (name, place, opened), shapes[first], streamed, classes, sets)
  return Loaded(found, source.class_names)


class _Tfds:
  """A set of TFDS with the features `image` and `label`."""

  def __init__(self, name: str, data_dir: str):
    names, others = functools.partial(_class_names, name), ("sample", "folder", "npz")
    self._name = name
    self._place, self.class_names = tfds_source.find(name, data_dir, names, others)

  def read(self, base: str) -> decode.Records:
    return _Records(self._name, self._place, base, encoded=("image",))


class _Records(tfds_source.Examples):
  def read(self, i: int) -> tuple[bytes, int]:
    example = super().read(i)
    return example["image"], int(example["label"])


def _class_names(name: str, features: Any) -> tuple[str, ...]:
  with without("tensorflow"):
    import tensorflow_datasets as tfds

  features = dict(features) if isinstance(features, tfds.features.FeaturesDict) else {}
  image, label = features.get("image"), features.get("label")
  if not isinstance(image, tfds.features.Image) or not isinstance(label, tfds.features.ClassLabel):
    found = ", ".join(f"{k}: {type(v).__name__}" for k, v in features.items()) or "none"
    needed = "needs the features image: Image and label: ClassLabel"
    raise UserError(f"data.name={name}: {needed}, but has {found}")
  tfds_source.check_image(f"data.name={name}", image)
  if not label.names:
    raise UserError(f"data.name={name}: has no names of classes (label.labels.txt)")
  return tuple(label.names)


def _open(data: ImageData, train_base: str) -> Source:
  if data.name == "npz":
    return arrays_file.ArraysFile(data.dir, train_base)
  if path := toronto.find(data.name, data.dir):
    data.check_arrays("Toronto's archive")
    return toronto.Toronto(data.name, path)
  if data.name == "folder":
    return folder.Folder(data.dir, train_base)
  if data.name == "sample":
    return _Tfds(SAMPLE_NAME, str(SAMPLE_DIR))
  return _Tfds(data.name, data.dir)


def _is_streamed(data: ImageData, bases: Mapping[str, base_split.Base | decode.Records]) -> bool:
  first = next(iter(bases.values()))
  if isinstance(first, base_split.Base) or data.stream == "never":
    return False
  if data.crop or data.stream == "always":
    return True
  return sum(map(len, bases.values())) * math.prod(_shape(data, first)) > CACHED_BYTES


def _shape(data: ImageData, found: base_split.Base | decode.Records) -> tuple[int, ...]:
  """Height, width and channels of images as they are read."""
  if isinstance(found, base_split.Base):
    return found.images.shape[1:]
  if side := data.image_size if data.crop else data.stored_size:
    return side, side, 3
  return decode.decode_image(found.read(0)[0], found.where(0)).shape


def _test_set(
  data: ImageData, opened: tuple, shape: tuple, streamed: bool, classes: int, sets: bool
) -> Dataset:
  """A test set of another source, its images as the training images are stored."""
  name, place, found = opened
  if shape[0] == shape[1]:  # then others are cut to it, as `predict` does with files
    data = dataclasses.replace(data, stored_size=0 if data.crop else shape[0])
  data = dataclasses.replace(data, name=name)
  if streamed and not isinstance(found, base_split.Base):
    return _encoded(data, ((found, range(len(found))),), shape, False, classes, sets)
  base = _decoded(data, "test", found)
  remedy = {"remedy": "allowed: the same size"} if isinstance(found, base_split.Base) else {}
  found_shape = base.images.shape[1:]
  decode.check_size(f"data.test_sets: {place}", found_shape, "the training data", shape, **remedy)
  return Arrays({"image": base.images, "label": base.labels}, paths=base.paths)


def _encoded(
  data: ImageData, parts: tuple, shape: tuple, train: bool, classes: int, sets: bool = False
) -> Dataset:
  side, random = data.image_size, bool(data.crop and train)
  if random:
    fit = functools.partial(crops.random_area, smallest=data.smallest_crop, side=side)
  elif data.crop:
    fit = functools.partial(crops.centre, shorter=data.resize, side=side)
  else:
    fit = decode.stored(data.stored_size)
  workers = cpus.available() if data.workers == -1 else data.workers
  return decode.Encoded(parts, shape, fit, random, classes, workers, data.read_ahead, sets)


def _decoded(
  data: ImageData, base: str, found: base_split.Base | decode.Records
) -> base_split.Base:
  """A base split as arrays, from the cache if they are encoded."""
  if isinstance(found, base_split.Base):
    return found
  cache_dir = cache.place(data.cache_dir)
  key = cache.fingerprint((_FORMAT, data.stored_size), [(found.fingerprint(), 0, 0)])
  build = functools.partial(decode.decode_all, found, data.stored_size)
  arrays = cache.read(cache_dir, f"{data.name}-{base}", key, build)
  return base_split.Base(**arrays, shuffled=True, paths=getattr(found, "paths", None))


def _arrays(what: str, parts: tuple, classes: int) -> Arrays:
  taken = [base.take(rows) for base, rows in parts]
  images, labels, *paths = taken[0] if len(taken) == 1 else map(np.concatenate, zip(*taken))
  decode.check_labels(what, labels.min(), labels.max(), classes)
  return Arrays({"image": images, "label": np.asarray(labels)}, paths=paths[0] if paths else None)
