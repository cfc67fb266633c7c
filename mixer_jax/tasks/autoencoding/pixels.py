"""Images as rows of pixels, from the same sources as those of image classification."""

import dataclasses
from typing import Annotated, Mapping, NamedTuple

import numpy as np

from mixer_jax import options
from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError
from mixer_jax.images import sources
from mixer_jax.images.augment import bilinear_matrix
from mixer_jax.images.image_data import ImageData
from mixer_jax.options import Option, Size, pair

_SAME = options.of(ImageData)  # options that both tasks have
_CHUNK = 1000  # images held as float32 at their stored size at once


@dataclasses.dataclass(frozen=True)
class PixelData:
  """The group `config.data`."""

  name: Annotated[str, _SAME["name"]] = "sample"
  dir: Annotated[str, _SAME["dir"]] = ""
  cache_dir: Annotated[str, _SAME["cache_dir"]] = ""
  train_split: Annotated[str, _SAME["train_split"]] = "train"
  test_split: Annotated[str, _SAME["test_split"]] = "test"
  validation_split: Annotated[str, _SAME["validation_split"]] = ""
  extra_test_splits: Annotated[str, _SAME["extra_test_splits"]] = ""
  stored_size: Annotated[Size, _SAME["stored_size"]] = 0
  fit: Annotated[str, _SAME["fit"]] = "pad"
  image_size: Annotated[
    Size, Option("side to which images are resized, in pixels, or height and width", 1, 2**10)
  ] = 16
  grey: Annotated[bool, Option("the mean of the three channels in their place")] = True

  @property
  def shape(self) -> tuple[int, ...]:
    """Height, width and channels of an image as the model sees it."""
    return *pair(self.image_size), 1 if self.grey else 3

  @property
  def source(self) -> ImageData:
    """The options of the same set as labelled images."""
    shared = {f.name for f in dataclasses.fields(self)} & _SAME.keys() - {"image_size"}
    return ImageData(**{name: getattr(self, name) for name in shared}, stream="never")


class Loaded(NamedTuple):
  """Splits of {"image": float32 [pixels]}, and height and width of the images before."""

  splits: Mapping[str, Arrays]
  stored: tuple[int, int]


def load(data: PixelData) -> Loaded:
  """Reads the splits; a UserError if there is no such set."""
  found = sources.load(data.source, labelled=False).splits
  pixels = lambda split: {"image": rows(split.arrays()["image"], data)}
  own = {name: Arrays(pixels(x), paths=getattr(x, "paths", None)) for name, x in found.items()}
  return Loaded(own, found["train"].spec["image"].shape[:2])


def rows(images: np.ndarray, data: PixelData) -> np.ndarray:
  """Resizes images [n, height, width, 3] uint8 to float32 [n, pixels] in [0, 1], as Pillow's BILINEAR.

  A UserError if they have other proportions than `data.image_size`.
  """
  n, height, width, _ = images.shape
  rows, columns = pair(data.image_size)
  if height * columns != width * rows:
    raise UserError(
      f"data.name={data.name}: images have {width}x{height} pixels; allowed: the proportions of"
      f" data.image_size={data.image_size}, to which data.stored_size brings encoded images"
    )
  down, across = bilinear_matrix(rows, height), bilinear_matrix(columns, width)
  found = []
  for start in range(0, n, _CHUNK):
    part = images[start : start + _CHUNK].astype(np.float32) / 255
    part = part.mean(3, keepdims=True) if data.grey else part
    tall = down @ part.reshape(len(part), height, -1)
    resized = across @ tall.reshape(len(part), -1, width, part.shape[3])
    found.append(resized.reshape(len(part), -1))
  return np.concatenate(found)
