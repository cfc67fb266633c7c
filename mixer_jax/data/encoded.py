"""Images that stay encoded where they are until a batch needs them.

Worker processes run this: nothing in it may use JAX, which would take a device.
"""

import dataclasses
import functools
from typing import Callable

import numpy as np
from PIL import Image

from mixer_jax.data.decode import Records, decode_image, size_in_words
from mixer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Encoded:
  """The images of a split, in the place of an array of them.

  Attributes:
    parts: base splits and which of their rows, one after the other.
    size: height and width of the decoded images, in pixels.
    fit: makes an image of that size from one of any size; with `random` it takes
      a random generator first.
    random: whether `fit` does.
    num_classes: labels have to lie below.
    workers: processes that decode; 0: a thread of this one.
    read_ahead: images that each worker decodes ahead.
  """

  parts: tuple[tuple[Records, range], ...]
  size: tuple[int, int]
  fit: Callable[..., Image.Image]
  random: bool
  num_classes: int
  workers: int = 0
  read_ahead: int = 0

  dtype = np.dtype(np.uint8)

  def __len__(self) -> int:
    return sum(len(rows) for _, rows in self.parts)

  @property
  def shape(self) -> tuple[int, int, int, int]:
    """[n, height, width, 3], of the decoded images."""
    return (len(self), *self.size, 3)

  def read(self, i: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Reads and decodes one example.

    Args:
      i: its number.
      rng: decides its crop where that is random.

    Returns:
      [height, width, 3] uint8 RGB and its label.

    Raises:
      UserError: names the file or record that is broken, has another size, or a
        label out of range.
    """
    records, row = self._find(i)
    data, label = records.read(row)
    where = records.where(row)
    if not 0 <= label < self.num_classes:
      raise UserError(
        f"{where}: label {label}, but must lie in 0..{self.num_classes - 1}"
        " (TFDS marks examples without a public label by -1)"
      )
    fit = functools.partial(self.fit, rng) if self.random else self.fit
    image = decode_image(data, where, fit)
    if image.shape != self.shape[1:]:
      raise UserError(
        f"{where}: is {size_in_words(image.shape)} pixels (width x height) but the first image is"
        f" {self.size[1]}x{self.size[0]}; set data.stored_size to a side in pixels, e.g."
        " --config.data.stored_size=256"
      )
    return image, label

  def _find(self, i: int) -> tuple[Records, int]:
    for records, rows in self.parts:
      if i < len(rows):
        return records, rows[i]
      i -= len(rows)
    raise IndexError(i)
