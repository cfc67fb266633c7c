"""Encoded images to uint8 arrays, with Pillow in a pool of threads."""

from concurrent import futures
import dataclasses
import functools
import io
import os
from typing import Callable
import warnings

import numpy as np
from PIL import Image, ImageOps
import tqdm

from mixer_jax.data import crops
from mixer_jax.errors import UserError, reason

Fit = Callable[[Image.Image], Image.Image]

_CHUNK = 64  # images a task: small ones decode in less time than a task costs
_SHOW_PROGRESS_ABOVE = 5_000  # images
# Pillow knows many more; of PostScript it runs the program in the file.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")


@dataclasses.dataclass(frozen=True)
class Records:
  """The encoded images of one base split.

  Attributes:
    num: how many there are.
    fingerprint: () -> a hash that changes whenever any image, label or their
      order may have. It looks at every file.
    read: index -> (encoded image, label); called from several threads, and, as
      `where`, sent to worker processes.
    where: index -> the file (or record) in words, for messages.
  """

  num: int
  fingerprint: Callable[[], str]
  read: Callable[[int], tuple[bytes, int]]
  where: Callable[[int], str]


def unchanged(image: Image.Image) -> Image.Image:
  """The `Fit` that keeps an image as it is."""
  return image


def stored(stored_size: int) -> Fit:
  """What `data.stored_size` asks for: its centre as a square of that side; 0: all of it."""
  if not stored_size:
    return unchanged
  return functools.partial(crops.centre, shorter=stored_size, side=stored_size)


def decode_image(data: bytes, where: str, fit: Fit = unchanged) -> np.ndarray:
  """Decodes one image file, upright as its EXIF tag says.

  Args:
    data: the bytes of a JPEG, PNG, WebP or BMP file; of an animation, the first frame.
    where: names the image in messages.
    fit: crops and resizes the decoded RGB image.

  Returns:
    [height, width, 3] uint8 RGB. 16-bit grey is scaled to 8 bits; an alpha
    channel is dropped.

  Raises:
    UserError: if it is broken, or so large that decoding may fill the memory.
  """
  if not data:
    raise UserError(f"{where}: broken image: the file is empty")
  try:
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
      too_large = image.width * image.height > Image.MAX_IMAGE_PIXELS
      if not too_large:
        return np.asarray(fit(_to_rgb(ImageOps.exif_transpose(image))))
  except Image.DecompressionBombError:
    too_large = True
  except Exception as error:  # Pillow's plug-ins raise whatever they trip over.
    unknown = isinstance(error, Image.UnidentifiedImageError)
    why = f"not an image; read are {', '.join(_FORMATS)}" if unknown else reason(error)
    raise UserError(f"{where}: broken image: {why}") from error
  raise UserError(
    f"{where}: refused: the image has more than {Image.MAX_IMAGE_PIXELS:,} pixels, or would have at"
    " data.stored_size"
  )


def decode_all(
  records: Records,
  stored_size: int,
  allocate: Callable[[tuple[int, ...]], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
  """Decodes every record.

  Args:
    records: what to decode.
    stored_size: see `stored`.
    allocate: shape -> a writable uint8 array of that shape, to be filled.

  Returns:
    images [n, height, width, 3] uint8 from `allocate`, labels [n] int32.

  Raises:
    UserError: if an image is broken, or if their sizes differ.
  """
  fit = stored(stored_size)

  # Here, not in the threads: filters belong to the process. What is broken is an error.
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    return _decode_all(records, fit, allocate)


def _decode_all(records, fit, allocate):
  def decode(i):
    data, label = records.read(i)
    return decode_image(data, records.where(i), fit), label

  shape = decode(0)[0].shape
  try:
    images = allocate((records.num, *shape))
  except MemoryError as error:
    raise UserError(
      f"{records.where(0)}: {records.num:,} images of {size_in_words(shape)} pixels (width x height) do not"
      " fit into memory; set data.stored_size to a smaller side in pixels"
    ) from error
  labels = np.empty(records.num, np.int32)

  def decode_chunk(start):
    chunk = range(start, min(start + _CHUNK, records.num))
    for i in chunk:
      image, labels[i] = decode(i)
      if image.shape != shape:
        raise UserError(
          f"{records.where(i)}: is {size_in_words(image.shape)} pixels (width x height) but {records.where(0)} is {size_in_words(shape)};"
          " set data.stored_size to a side in pixels, e.g. --config.data.stored_size=256"
        )
      images[i] = image
    return len(chunk)

  with (
    futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    tqdm.tqdm(
      total=records.num,
      desc="Decoding images (once)",
      unit=" images",
      unit_scale=True,
      disable=records.num <= _SHOW_PROGRESS_ABOVE,
    ) as bar,
  ):
    for done in pool.map(decode_chunk, range(0, records.num, _CHUNK)):
      bar.update(done)
  return images, labels


def _to_rgb(image: Image.Image) -> Image.Image:
  if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip
    image = _eight_bits(image)
  elif image.mode == "P" and "transparency" in image.info:
    image = image.convert("RGBA")
  return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
  """Of 16, rounded; in place, because a large image takes much memory."""
  grey = np.asarray(image).astype(np.int32)
  np.clip(grey, 0, 2**16 - 1, out=grey)
  grey += 128
  grey //= 257
  return Image.fromarray(grey.astype(np.uint8))


def size_in_words(shape: tuple[int, ...]) -> str:
  """Width and height of an image [height, width, 3]."""
  return f"{shape[1]}x{shape[0]}"
