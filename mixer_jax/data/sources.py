"""One door to every image-classification set: a config in, NumPy arrays out.

Folders and TFDS sets are decoded once and then memory-mapped (`cache.py`); the
bundled sample is a prepared TFDS directory like any other. Slices such as
"train[:90%]" work for every source (`splits.py`).
"""

import dataclasses
import functools
import os
import pathlib
from typing import Callable

import ml_collections
import numpy as np

from mixer_jax.data import cache, folder, npz, splits, tfds_source
from mixer_jax.errors import UserError

SAMPLE_NAME = "cifar10_sample"
SAMPLE_DIR = pathlib.Path(__file__).parent / "bundled"


@dataclasses.dataclass(frozen=True)
class Split:
  """Examples to train or test on.

  Attributes:
    images: [n, height, width, 3] uint8 RGB, often a read-only memory map.
    labels: [n] int32, indices into the dataset's `class_names`.
  """

  images: np.ndarray
  labels: np.ndarray


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

  Raises:
    UserError: for anything that the config or the files have wrong.
  """
  if config.stored_size < 0:
    raise UserError(
      f"data.stored_size={config.stored_size}: must be 0 (keep the images' size) or a side in pixels"
    )
  train_base = splits.base_names(config.train_split, "data.train_split")[0]
  class_names, read_base = _open(config, train_base)
  if len(class_names) < 2:
    raise UserError(
      f"data.name={config.name}: has only the class {', '.join(class_names) or '(none)'!r};"
      " a classifier needs two or more"
    )
  read_base = functools.cache(read_base)  # both splits may be slices of one

  def read(field: str) -> Split:
    images, labels = splits.select(config[field], f"data.{field}", read_base)
    _check_labels(labels, len(class_names), f"data.{field}={config[field]}")
    return Split(images, labels)

  train, test = read("train_split"), read("test_split")
  if train.images.shape[1:] != test.images.shape[1:]:
    sizes = ["{}x{}".format(*s.images.shape[2:0:-1]) for s in (train, test)]
    raise UserError(
      f"data.stored_size=0: {config.train_split} has images of {sizes[0]} pixels (width x height) but"
      f" {config.test_split} of {sizes[1]}; set data.stored_size to a common side in pixels"
    )
  return Dataset(config.name, train, test, class_names)


def _open(config, train_base: str) -> tuple[tuple[str, ...], Callable[[str], splits.Base]]:
  """Returns the class names and a function from base split to its arrays."""
  if config.name == "npz":
    if config.stored_size:
      raise UserError(
        f"data.stored_size={config.stored_size}: images of an .npz file keep their size; set it to 0"
      )
    source = npz.Npz(config.dir)
    return source.class_names, source.read

  if config.name == "folder":
    source = folder.Folder(config.dir, train_base)
  elif config.name == "sample":
    source = tfds_source.Tfds(SAMPLE_NAME, str(SAMPLE_DIR))
  else:
    source = tfds_source.Tfds(config.name, config.dir)
  cache_dir = pathlib.Path(os.path.expanduser(config.cache_dir or _default_cache_dir()))

  def read_base(base: str) -> splits.Base:
    records = source.records(base)
    images, labels = cache.read(cache_dir, f"{config.name}-{base}", records, config.stored_size)
    return splits.Base(images, labels, shuffled=True)

  return source.class_names, read_base


def _default_cache_dir() -> str:
  return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mixer_jax")


def _check_labels(labels: np.ndarray, num_classes: int, what: str) -> None:
  low, high = labels.min(), labels.max()
  if low < 0 or high >= num_classes:
    raise UserError(
      f"{what}: labels run from {low} to {high}, but must lie in 0..{num_classes - 1}"
      " (TFDS marks examples without a public label by -1)"
    )
