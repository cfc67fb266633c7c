"""Loaded sets of images as the tests look at them."""

import dataclasses
import types
from typing import Callable

import numpy as np
from PIL import Image
import pytest

from mixer_jax.errors import UserError
from mixer_jax.images import sources
from mixer_jax.images.image_data import ImageData


def config(**fields) -> ImageData:
  return ImageData(**dict(name="folder", workers=0, read_ahead=16, pad=0) | fields)


@dataclasses.dataclass
class Records:
  """Equal encoded images of one class, as `decode.Records`."""

  num: int
  content: Callable[[], bytes]

  def __len__(self) -> int:
    return self.num

  def read(self, i: int) -> tuple[bytes, int]:
    return self.content(), 0

  def where(self, i: int) -> str:
    return f"{i}.png"


def load(data: ImageData) -> types.SimpleNamespace:
  """Splits by attribute, with `images` and `labels`."""
  loaded = sources.load(data)
  found = types.SimpleNamespace(class_names=loaded.class_names, splits=loaded.splits)
  for name, split in loaded.splits.items():
    arrays = split.arrays() or {"image": split, "label": None}
    view = types.SimpleNamespace(images=arrays["image"], labels=arrays["label"])
    setattr(found, name, view)
  return found


def error(data: ImageData) -> str:
  with pytest.raises(UserError) as info:
    sources.load(data)
  line = str(info.value)
  assert line.isprintable() and len(line) < 700
  return line


def write(folder, colours):
  """Images of 8x8 pixels, each of one grey, by path."""
  for name, colour in colours.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), colour, np.uint8)).save(path)
  return folder
