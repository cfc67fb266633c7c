"""One door to every image-classification set: a config in, NumPy arrays out.

Folders and TFDS sets are decoded once and then memory-mapped (`cache.py`), or stay
encoded if they are very large (`encoded.py`); the bundled sample is a prepared
TFDS directory like any other. Slices such as "train[:90%]" work for every source
(`splits.py`).
"""

import dataclasses
import functools
import os
import pathlib
from typing import Callable

import ml_collections
import numpy as np

from mixer_jax.data import cache, crops, decode, encoded, folder, npz, splits, tfds_source
from mixer_jax.errors import UserError

SAMPLE_NAME = "cifar10_sample"
SAMPLE_DIR = pathlib.Path(__file__).parent / "bundled"


# Sets that take more than this once they are decoded are streamed.
CACHED_BYTES = 32 << 30
STREAMS = ("auto", "always", "never")
CROPS = ("", "inception")
# The fields that runs of earlier versions do not have.
_EARLIER = dict(stream="never", crop="")


@dataclasses.dataclass(frozen=True)
class Split:
  """Examples to train or test on.

  Attributes:
    images: [n, height, width, 3] uint8 RGB, often a read-only memory map; or
      `Encoded` ones with a shape, which are decoded batch by batch.
    labels: [n] int32, indices into the dataset's `class_names`; None of encoded
      images, which come with theirs.
  """

  images: np.ndarray | encoded.Encoded
  labels: np.ndarray | None

  def __len__(self) -> int:
    return len(self.images)

  def first(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Decoded images and labels of the first n examples."""
    if not isinstance(self.images, encoded.Encoded):
      return self.images[:n], self.labels[:n]
    images, labels = zip(*(self.images.read(i, np.random.default_rng(i)) for i in range(n)))
    return np.stack(images), np.array(labels, np.int32)


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A train and a test split with the same classes and image size."""

  name: str
  train: Split
  test: Split
  class_names: tuple[str, ...]

  @property
  def num_classes(self) -> int:
    return len(self.class_names)


def load(config: ml_collections.ConfigDict) -> Dataset:
  """Reads the dataset that the `data` part of a config names.

  Args:
    config: has the fields
      name: "sample", "folder", "npz" or a TFDS name such as "cifar10".
      dir: TFDS data_dir, root of the image folder, or the .npz file. "" means
        TFDS's default directory; folder and npz need a value.
      cache_dir: where decoded images are kept; "" means
        $XDG_CACHE_HOME/mixer_jax or ~/.cache/mixer_jax.
      train_split, test_split: TFDS-style, e.g. "train[:90%]", "train[90%:]".
      stored_size: side in pixels to which images are resized (shorter side,
        then centre crop) before they are stored; 0 keeps their own size.
      stream, crop, smallest_crop, resize, image_size, workers, read_ahead: see
        `mixer_jax.config.data`.

  Raises:
    UserError: for anything that the config or the files have wrong.
  """
  if config.stored_size < 0:
    raise UserError(
      f"data.stored_size={config.stored_size}: must be 0 (keep the images' size) or a side in pixels"
    )
  config = ml_collections.ConfigDict({**_EARLIER, **config})
  if config.crop:
    _check_crop(config)
  train_base = splits.base_names(config.train_split, "data.train_split")[0]
  source = _open(config, train_base)
  if len(source.class_names) < 2:
    raise UserError(
      f"data.name={config.name}: has only the class {', '.join(source.class_names) or '(none)'!r};"
      " a classifier needs two or more"
    )
  if isinstance(source, npz.Npz):
    read = functools.partial(_read_arrays, source, functools.cache(source.read))
  else:
    records = functools.cache(source.records)  # both splits may be slices of one
    if _is_streamed(config, records):
      read = functools.partial(_encoded, source, records)
    else:
      read = functools.partial(_read_arrays, source, _cached(config, records))
  train, test = read(config, "train_split"), read(config, "test_split")
  if train.images.shape[1:] != test.images.shape[1:]:
    sizes = ["{}x{}".format(*s.images.shape[2:0:-1]) for s in (train, test)]
    raise UserError(
      f"data.stored_size=0: {config.train_split} has images of {sizes[0]} pixels (width x height) but"
      f" {config.test_split} of {sizes[1]}; set data.stored_size to a common side in pixels"
    )
  return Dataset(config.name, train, test, source.class_names)


def _open(config, train_base: str) -> npz.Npz | folder.Folder | tfds_source.Tfds:
  """Finds the files; only those of an .npz are read."""
  if config.name == "npz":
    if config.stored_size:
      raise UserError(
        f"data.stored_size={config.stored_size}: images of an .npz file keep their size; set it to 0"
      )
    for field, other in (("crop", "''"), ("stream", "auto")):
      if config[field] in ("inception", "always"):
        raise UserError(
          f"data.{field}={config[field]}: images of an .npz file are decoded already; set it to {other}"
        )
    return npz.Npz(config.dir)
  if config.name == "folder":
    return folder.Folder(config.dir, train_base)
  if config.name == "sample":
    return tfds_source.Tfds(SAMPLE_NAME, str(SAMPLE_DIR))
  return tfds_source.Tfds(config.name, config.dir)


def _is_streamed(config, records: Callable[[str], decode.Records]) -> bool:
  """Whether the images stay encoded."""
  if config.crop or config.stream != "auto":
    return config.stream != "never"
  specs = {field: config[field] for field in ("train_split", "test_split")}
  bases = {base for f, spec in specs.items() for base in splits.base_names(spec, f"data.{f}")}
  height, width = _decoded_size(records(min(bases)), config.stored_size)
  return sum(records(base).num for base in bases) * height * width * 3 > CACHED_BYTES


def _decoded_size(records: decode.Records, stored_size: int) -> tuple[int, int]:
  """Height and width: of the first image where they are not given."""
  if stored_size:
    return stored_size, stored_size
  return decode.decode_image(records.read(0)[0], records.where(0)).shape[:2]


def _encoded(source, records: Callable[[str], decode.Records], config, field: str) -> Split:
  """A split that is decoded batch by batch."""
  num_examples = lambda base: records(base).num
  parts = splits.parts(config[field], f"data.{field}", num_examples)
  parts = tuple((records(base), rows) for base, rows in parts)
  options = dict(num_classes=len(source.class_names), workers=_workers(config.workers))
  options |= dict(read_ahead=config.read_ahead)
  if not config.crop:
    size, fit = _decoded_size(parts[0][0], config.stored_size), decode.stored(config.stored_size)
    return Split(encoded.Encoded(parts, size, fit, random=False, **options), None)
  side = config.image_size
  if field == "train_split":
    fit = functools.partial(crops.random_area, smallest=config.smallest_crop, side=side)
  else:
    fit = functools.partial(crops.centre, shorter=config.resize, side=side)
  random = field == "train_split"
  return Split(encoded.Encoded(parts, (side, side), fit, random, **options), None)


def _check_crop(config) -> None:
  if config.stream == "never":
    raise UserError(
      f"data.crop={config.crop}: needs the encoded images in every epoch, but data.stream is never"
    )
  if config.stored_size:
    raise UserError(
      f"data.stored_size={config.stored_size}: not used with data.crop={config.crop}; set it to 0"
    )
  if config.resize < config.image_size:
    raise UserError(
      f"data.resize={config.resize}: with data.crop={config.crop} it is the shorter side of test"
      f" images before their centre is cropped, at least data.image_size={config.image_size}"
    )


def _workers(workers: int) -> int:
  """Processes that decode; -1 stands for one on each CPU that this process may use."""
  if workers != -1:
    return workers
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cached(config, records: Callable[[str], decode.Records]) -> Callable[[str], splits.Base]:
  """From a base split to its decoded images."""
  cache_dir = pathlib.Path(os.path.expanduser(config.cache_dir or _default_cache_dir()))

  def read_base(base: str) -> splits.Base:
    images, labels = cache.read(
      cache_dir, f"{config.name}-{base}", records(base), config.stored_size
    )
    return splits.Base(images, labels, shuffled=True)

  return functools.cache(read_base)


def _read_arrays(source, read_base: Callable[[str], splits.Base], config, field: str) -> Split:
  """A split of decoded images."""
  images, labels = splits.select(config[field], f"data.{field}", read_base)
  _check_labels(labels, len(source.class_names), f"data.{field}={config[field]}")
  return Split(images, labels)


def _default_cache_dir() -> str:
  return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mixer_jax")


def _check_labels(labels: np.ndarray, num_classes: int, what: str) -> None:
  low, high = labels.min(), labels.max()
  if low < 0 or high >= num_classes:
    raise UserError(
      f"{what}: labels run from {low} to {high}, but must lie in 0..{num_classes - 1}"
      " (TFDS marks examples without a public label by -1)"
    )
