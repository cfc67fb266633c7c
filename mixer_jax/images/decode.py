"""Encoded images to uint8 arrays: all of them in a pool of threads, or each when it is needed.

Worker processes run this: nothing in it may take a device.
"""

from concurrent import futures
import dataclasses
import functools
import io
import struct
from typing import Any, Callable, Protocol
import warnings
import zlib

import jax
import numpy as np
from PIL import Image, ImageOps
import tqdm

from mixer_jax.data import cache, cpus
from mixer_jax.errors import UserError, reason

Fit = Callable[[Image.Image], Image.Image]

_CHUNK = 64  # images a task: small ones decode in less time than a task costs
_SHOW_PROGRESS_ABOVE = 5_000  # images
_BAR = dict(desc="Decoding images (once)", unit=" images", unit_scale=True)
# Pillow knows many more; of PostScript it runs the program in the file.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_PNG = b"\x89PNG\r\n\x1a\n"  # begins every PNG


class Records(Protocol):
  """The encoded images of one base split."""

  def __len__(self) -> int: ...

  def read(self, i: int) -> tuple[bytes, Any]:
    """Encoded image, and label: an int, or bool [classes]; called from threads and workers."""

  def where(self, i: int) -> str:
    """The file (or record) in words, for messages."""

  def fingerprint(self) -> str:
    """A hash of every file that changes with the images, labels or their order."""


@dataclasses.dataclass(frozen=True)
class Decoded:
  """All examples of a base split: images uint8 [n, height, width, 3] and integer labels [n].

  `shuffled` says whether their order is random. `paths` are those of their files, bytes [n].
  """

  images: np.ndarray
  labels: np.ndarray
  shuffled: bool = False
  paths: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.labels)

  @property
  def arrays(self) -> dict[str, np.ndarray]:
    """Returns "image", "label" and, of files, "path", [n, ...] each."""
    paths = {} if self.paths is None else {"path": self.paths}
    return {"image": self.images, "label": self.labels} | paths


def decode_image(data: bytes, where: str, fit: Fit = Image.Image.copy) -> np.ndarray:
  """Decodes a JPEG, PNG, WebP or BMP file, upright as its EXIF tag says, and makes it `fit`.

  16-bit grey is scaled to 8 bits, an alpha channel is dropped; an animation's first frame counts.
  The result is RGB, uint8 [height, width, 3]. A UserError if the file is broken, or so large that
  decoding may fill the memory.
  """
  try:
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
      if image.width * image.height > Image.MAX_IMAGE_PIXELS:  # Pillow raises at twice that
        raise Image.DecompressionBombError
      check_png(data)
      return np.asarray(fit(_to_rgb(ImageOps.exif_transpose(image))))
  except Image.DecompressionBombError as error:
    why = f"more than {Image.MAX_IMAGE_PIXELS:,} pixels, or would have at data.stored_size"
    raise UserError(f"{where}: refused: the image has {why}") from error
  except Exception as error:  # Pillow's plug-ins raise whatever they trip over.
    why = reason(error)
    if isinstance(error, Image.UnidentifiedImageError):
      why = f"not an image; read are {', '.join(_FORMATS)}" if data else "the file is empty"
    raise UserError(f"{where}: broken image: {why}") from error


def check_png(data: bytes) -> None:
  """Raises a ValueError if a PNG's pixels are damaged: Pillow checks the other chunks alone."""
  at, kind = len(_PNG), b"" if data[: len(_PNG)] == _PNG else b"IEND"
  while kind != b"IEND" and at + 8 <= len(data):
    size, kind = struct.unpack_from(">I4s", data, at)
    end = at + 8 + size
    stored = int.from_bytes(data[end : end + 4])
    if kind == b"IDAT" and end + 4 <= len(data) and zlib.crc32(data[at + 4 : end]) != stored:
      raise ValueError("the checksum of its pixels is wrong")
    at = end + 4


def decode_all(records: Records, fit: Fit, allocate: cache.Allocate) -> dict[str, np.ndarray]:
  """Decodes all records: "images" uint8 [n, height, width, 3] and "labels", int32 [n] if ints.

  A UserError if an image is broken, or their sizes differ.
  """
  n = len(records)

  def decode(i):
    data, label = records.read(i)
    return decode_image(data, records.where(i), fit), label

  def decode_chunk(start):
    chunk = range(start, min(start + _CHUNK, n))
    for i in chunk:
      image, labels[i] = decode(i)
      check_size(records.where(i), image.shape, records.where(0), shape)
      images[i] = image
    return len(chunk)

  with (
    # Around the threads: filters belong to the process. A broken image is an error.
    warnings.catch_warnings(action="ignore"),
    futures.ThreadPoolExecutor(cpus.available()) as pool,
    # None: shown on a terminal alone.
    tqdm.tqdm(total=n, disable=n <= _SHOW_PROGRESS_ABOVE or None, **_BAR) as bar,
  ):
    first, label = decode(0)
    shape, kind = first.shape, np.int32 if np.ndim(label) == 0 else bool
    try:
      images = allocate("images", (n, *shape), np.uint8)
      labels = allocate("labels", (n, *np.shape(label)), kind)
    except MemoryError as error:
      why = "do not fit into memory; set data.stored_size to a smaller side in pixels"
      raise UserError(f"{records.where(0)}: {n:,} images of {_in_words(shape)} {why}") from error
    for done in pool.map(decode_chunk, range(0, n, _CHUNK)):
      bar.update(done)
  return {"images": images, "labels": labels}


@dataclasses.dataclass(frozen=True)
class Encoded:
  """A split as a `data.dataset.Streamed`; an example is {"image": uint8 [h, w, 3], "label"}."""

  parts: tuple[tuple[Records, range], ...]  # base splits and rows of them, one after the other
  shape: tuple[int, ...]  # of the decoded images, (height, width, 3)
  fit: Callable[..., Image.Image]  # to that size; if `random`, it takes a generator first
  random: bool
  num_classes: int  # labels have to lie below
  workers: int = 0
  read_ahead: int = 0
  label_sets: bool = False  # whether a label is bool [num_classes]

  def __len__(self) -> int:
    return sum(len(rows) for _, rows in self.parts)

  @property
  def spec(self) -> Any:
    label = jax.ShapeDtypeStruct((), np.int32)
    if self.label_sets:
      label = jax.ShapeDtypeStruct((self.num_classes,), bool)
    return {"image": jax.ShapeDtypeStruct(self.shape, np.uint8), "label": label}

  def arrays(self) -> None:
    """None: examples are read one by one."""

  @property
  def paths(self) -> np.ndarray | None:
    """The files of the examples, bytes [n], if all are files."""
    found = [(getattr(records, "paths", None), rows) for records, rows in self.parts]
    if any(paths is None for paths, _ in found):
      return None
    return np.concatenate([paths[rows.start : rows.stop] for paths, rows in found])

  @property
  def labels(self) -> np.ndarray | None:
    """The labels of the examples, if they are known without reading them."""
    found = [(getattr(records, "labels", None), rows) for records, rows in self.parts]
    if any(labels is None for labels, _ in found):
      return None
    return np.concatenate([labels[rows.start : rows.stop] for labels, rows in found])

  def read(self, i: int, rng: np.random.Generator) -> dict[str, Any]:
    """Reads and decodes example i; `rng` decides its crop where that is random.

    A UserError names a file or record that is broken, has another size or a label out of range.
    """
    for records, rows in self.parts:  # noqa: B007
      if i < len(rows):
        break
      i -= len(rows)
    data, label = records.read(rows[i])
    where = records.where(rows[i])
    if not self.label_sets and not 0 <= label < self.num_classes:
      allowed = f"0 to {self.num_classes - 1} (TFDS marks examples without a public label by -1)"
      raise UserError(f"{where}: has the label {label}; allowed: {allowed}")
    fit = functools.partial(self.fit, rng) if self.random else self.fit
    image = decode_image(data, where, fit)
    check_size(where, image.shape, "the first image", self.shape)
    return {"image": image, "label": label if self.label_sets else np.int32(label)}


def check_size(
  what: str, shape: tuple[int, ...], other: str, its_shape: tuple[int, ...], encoded: bool = True
) -> None:
  """Raises a UserError if an image [height, width, 3] has another size than another one."""
  if shape != its_shape:
    sizes = f"{_in_words(shape)}, but {other} has {_in_words(its_shape)}"
    remedy = "set data.stored_size to a side in pixels" if encoded else "allowed: one size"
    raise UserError(f"{what} has {sizes}; {remedy}")


def _in_words(shape: tuple[int, ...]) -> str:
  return f"{shape[1]}x{shape[0]} pixels (width x height)"


def _to_rgb(image: Image.Image) -> Image.Image:
  if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip
    grey = np.asarray(image).astype(np.int32)
    np.clip(grey, 0, 2**16 - 1, out=grey)  # in place, because a large image takes much memory
    grey += 128
    grey //= 257
    image = Image.fromarray(grey.astype(np.uint8))
  elif image.mode == "P" and "transparency" in image.info:
    image = image.convert("RGBA")
  return image.convert("RGB")
