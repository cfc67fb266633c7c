"""TFDS-style split strings for every source: "train", "train[:90%]+test[100:]".

A slice is taken from a fixed shuffled order of its base split, so that even a
folder sorted by class gives every slice all classes. Image folders are stored
in such an order, TFDS sets keep the shuffled order they were prepared in (a
slice is then the one that TFDS gives), and an .npz file is shuffled here, only
when it is sliced. Slices of one base split never share examples that their
bounds do not share, whatever the machine.
"""

import dataclasses
import re
from typing import Callable

import numpy as np

from mixer_jax.errors import UserError

# Names start with a letter, digit or "_": ".." is no split.
_PART = re.compile(r"(?P<base>\w[\w.-]*)(\[(?P<start>-?\d{1,18}%?)?:(?P<stop>-?\d{1,18}%?)?\])?")
_ALLOWED = 'allowed are NAME, NAME[START:STOP] with counts or percents, e.g. "train[:90%]", and sums with "+"'


@dataclasses.dataclass(frozen=True)
class Base:
  """All examples of a named split; `shuffled` says whether their order is random."""

  images: np.ndarray  # [n, height, width, 3] uint8
  labels: np.ndarray  # [n] int32
  shuffled: bool


def shuffled_order(n: int) -> np.ndarray:
  """Returns the one permutation of n examples, [n] int64, that slices refer to."""
  return np.random.default_rng(0).permutation(n)


def base_names(spec: str, field: str) -> list[str]:
  """Returns the base splits that a split string uses, in its order."""
  return [part["base"] for part in _parse(spec, field)]


def parts(spec: str, field: str, num_examples: Callable[[str], int]) -> list[tuple[str, range]]:
  """Returns the base splits that a split string adds up, and which of their rows it takes.

  Args:
    spec: the split string.
    field: the config field that holds it, for messages.
    num_examples: of a base split.

  Raises:
    UserError: if the string is malformed, out of bounds or selects nothing.
  """
  chosen = []
  for part in _parse(spec, field):
    n = num_examples(part["base"])
    start = _bound(part["start"] or "0", n, spec, field)
    stop = _bound(part["stop"] or str(n), n, spec, field)
    if start >= stop:
      raise UserError(f"{field}={spec!r}: selects none of the {n} examples of {part['base']!r}")
    chosen.append((part["base"], range(start, stop)))
  return chosen


def select(
  spec: str, field: str, read_base: Callable[[str], Base]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the images [n, height, width, 3] and labels [n] of a split string.

  Args:
    spec: the split string; a single slice of a shuffled base is a view.
    field: the config field that holds it, for messages.
    read_base: gives the examples of a base split.

  Raises:
    UserError: as `parts`, or if images differ in size.
  """
  chosen = []
  for name, rows in parts(spec, field, lambda name: len(read_base(name).labels)):
    base = read_base(name)
    rows = slice(rows.start, rows.stop)
    if not base.shuffled and rows.stop - rows.start < len(base.labels):
      rows = shuffled_order(len(base.labels))[rows]
    chosen.append((base.images[rows], base.labels[rows]))
  if len(chosen) == 1:
    return chosen[0]
  if len({images.shape[1:] for images, _ in chosen}) > 1:
    raise UserError(
      f"{field}={spec!r}: the parts have images of different sizes; set data.stored_size"
    )
  return tuple(np.concatenate(arrays) for arrays in zip(*chosen))


def _parse(spec: str, field: str) -> list[re.Match]:
  parts = [_PART.fullmatch(part.strip()) for part in spec.split("+")]
  if not all(parts):
    raise UserError(f"{field}={spec!r}: not a split; {_ALLOWED}")
  return parts


def _bound(text: str, n: int, spec: str, field: str) -> int:
  """Converts "10", "-10", "25%" or "-25%" to an index in 0..n, as TFDS does."""
  number = int(text.rstrip("%"))
  if abs(number) > (100 if text.endswith("%") else n):
    raise UserError(f"{field}={spec!r}: {text} lies outside the split's {n} examples")
  if text.endswith("%"):
    number = round(number * n / 100)  # TFDS's default rounding
  return number + n if text.startswith("-") else number
