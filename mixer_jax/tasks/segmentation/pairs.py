"""Folders of pairs of an image and a mask, matched by the names of their files without the endings.

  DIR/SPLIT/IMAGE          DIR/SPLITannot/MASK.png          as CamVid in the SegNet tutorial
  DIR/images/SPLIT/IMAGE   DIR/annotations/SPLIT/MASK.png   as ADE20K

A mask is a PNG of at most 8 bits, grey or with a palette, whose pixels are ids of classes.
"""

from concurrent import futures
import dataclasses
import functools
import io
import logging
import os
import pathlib
import warnings

import numpy as np
from PIL import ExifTags, Image
import tqdm

from mixer_jax.data import cache, splits
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.images import decode, folder

_LOG = logging.getLogger(__name__)
_FORMAT = 2  # a change of the decoding raises it, so that old cache entries are not read
_BIT_DEPTH = 24  # the byte of a PNG: 8 of signature, 8 of IHDR's head, 4 each of width and height
_LAYOUTS = "SPLIT and SPLITannot, or images/SPLIT and annotations/SPLIT"
_ENDINGS = {"image": folder.EXTENSIONS, "mask": (".png",)}
_BAR = dict(desc="Decoding pairs (once)", unit=" pairs", unit_scale=True)
_SHOW_PROGRESS_ABOVE = 1_000  # pairs


@dataclasses.dataclass(frozen=True)
class Pairs:
  """The files of a split, in a shuffled order that depends on their names alone.

  With a `canvas`, (height, width), pairs are resized by `on_canvas`, which fills masks with `void`.
  A UserError if a folder is missing or empty, or an image or a mask stands alone.
  """

  root: pathlib.Path
  base: str  # the name of the split
  canvas: tuple[int, ...]
  void: int

  @functools.cached_property
  def _files(self) -> list[tuple[pathlib.Path, pathlib.Path]]:
    ends = self.base, f"{self.base}annot"
    if (self.root / "images").is_dir():
      ends = f"images/{self.base}", f"annotations/{self.base}"
    images, masks = (_by_stem(self.root / end, what) for what, end in zip(_ENDINGS, ends))
    if alone := sorted(images.keys() ^ masks.keys()):
      path, lacking = (images | masks)[alone[0]], "mask" if alone[0] in images else "image"
      raise UserError(f"{path}: no {lacking} has its name; {len(alone)} files stand alone")
    names = sorted(images)
    order = splits.shuffled_order(len(names))
    return [(images[names[i]], masks[names[i]]) for i in order]

  @property
  def paths(self) -> np.ndarray:
    """The paths of the images below `root`, bytes [n]."""
    return np.array([os.fsencode(image.relative_to(self.root)) for image, _ in self._files])

  def where(self, i: int) -> str:
    """The path of a mask, for messages."""
    return str(self._files[i][1])

  def arrays(self, cache_dir: str) -> dict[str, np.ndarray]:
    """All pairs: "images" uint8 [n, height, width, 3], "masks" uint8 [n, height, width], and "ids".

    `ids`, bool [n, 256], are those in each mask. Pairs are decoded once, see `data.cache`. A
    UserError if a file is broken, a mask is of another kind, or sizes differ.
    """
    with folder.readable(self.root):
      stats = [(str(path), os.stat(path)) for pair in self._files for path in pair]
    files = [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
    key = cache.fingerprint((_FORMAT, self.canvas, self.canvas and self.void), files)
    return cache.read(cache.place(cache_dir), f"pairs-{self.base}", key, self._decode_all)

  def _decode_all(self, allocate: cache.Allocate) -> dict[str, np.ndarray]:
    n, shape = len(self._files), self._decode(0)[1].shape
    images = allocate("images", (n, *shape, 3), np.uint8)
    masks, ids = allocate("masks", (n, *shape), np.uint8), allocate("ids", (n, 256), bool)

    def fill(i: int) -> bool:
      image, mask, turned = self._decode(i)
      if mask.shape != shape:
        sizes = f"{_in_words(mask.shape)}, but {self.where(0)} has {_in_words(shape)}"
        raise UserError(f"{self.where(i)} has {sizes}; set data.canvas to a height and a width")
      images[i], masks[i] = image, mask
      ids[i] = np.bincount(mask.reshape(-1), minlength=256) > 0
      return turned

    shown = dict(total=n, disable=n <= _SHOW_PROGRESS_ABOVE or None)
    with warnings.catch_warnings(action="ignore"), futures.ThreadPoolExecutor() as pool:
      turned = list(tqdm.tqdm(pool.map(fill, range(n)), **shown, **_BAR))
    if any(turned):
      first, why = self._files[turned.index(True)][0], "its EXIF turns it, but nothing its mask"
      _LOG.warning("%s: %s (%d of %d pairs)", first, why, sum(turned), n)
    return {"images": images, "masks": masks, "ids": ids}

  def _decode(self, i: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """An image and its mask as arrays, and whether EXIF turned the image."""
    path, mask_path = map(str, self._files[i])
    content = folder.read_file(path)
    image = decode.decode_image(content, path)
    with Image.open(io.BytesIO(content)) as file:
      turned = file.getexif().get(ExifTags.Base.Orientation, 1) != 1
    mask = decode_mask(folder.read_file(mask_path), mask_path)
    if mask.shape != image.shape[:2]:
      sizes = f"{_in_words(mask.shape)}, but its image {_in_words(image.shape)}"
      raise UserError(f"{mask_path} has {sizes}")
    if self.canvas:
      image, mask = on_canvas(image, self.canvas, 0), on_canvas(mask, self.canvas, self.void)
    return image, mask, turned


def _by_stem(place: pathlib.Path, what: str) -> dict[str, pathlib.Path]:
  """The images or the masks of a folder by their names without the endings."""
  if not place.is_dir():
    raise UserError(f"{place}: no such folder; pairs of images and masks lie in {_LAYOUTS}")
  found: dict[str, pathlib.Path] = {}
  for path in (place / name for name in folder.listed(place)):
    if path.suffix.lower() in _ENDINGS[what]:
      if path.stem in found:
        raise UserError(f"{path}: a second {what} of this name, beside {found[path.stem].name}")
      found[path.stem] = path
  if not found:
    raise UserError(f"{place}: no {what}s; they end in {', '.join(_ENDINGS[what])}")
  return found


def decode_mask(data: bytes, where: str) -> np.ndarray:
  """The ids of a mask, uint8 [height, width]; for a palette the ids, not the colours.

  A UserError if the file is not a PNG, is broken, or has pixels of another kind.
  """
  with as_user_error(f"{where}: broken mask"):  # Pillow raises exceptions of many kinds
    with Image.open(io.BytesIO(data), formats=("PNG",)) as mask:
      decode.check_png(data)
      mode, ids = mask.mode, np.asarray(mask.convert("L") if mask.mode == "1" else mask)
  if mode not in ("1", "L", "P"):
    allowed = "at most 8 bits, grey (1, L) or a palette (P)"
    raise UserError(f"{where}: a mask of mode {mode}; allowed: {allowed}")
  # Pillow stretches grey of fewer bits to 0 to 255, and names it "L", too.
  return ids if mode == "P" else ids // (255 // (2 ** data[_BIT_DEPTH] - 1))


def fitting(shape: tuple[int, ...], canvas: tuple[int, ...]) -> tuple[int, int]:
  """The largest height and width of an image [height, width, ...] that fit into a canvas."""
  scale = min(canvas[0] / shape[0], canvas[1] / shape[1])
  return tuple(min(n, max(1, round(scale * m))) for n, m in zip(canvas, shape))


def on_canvas(array: np.ndarray, canvas: tuple[int, ...], fill: int) -> np.ndarray:
  """Resizes an image or a mask to fit into a canvas (height, width), at its upper left.

  The ratio of its sides is kept. An image [h, w, 3] is interpolated as by Pillow's BILINEAR, a mask
  [h, w] takes the nearest pixel. The rest of the canvas is `fill`.
  """
  height, width = fitting(array.shape, canvas)
  how = Image.Resampling.NEAREST if array.ndim == 2 else Image.Resampling.BILINEAR
  result = np.full((*canvas, *array.shape[2:]), fill, np.uint8)
  result[:height, :width] = np.asarray(Image.fromarray(array).resize((width, height), how))
  return result


def _in_words(shape: tuple[int, ...]) -> str:
  return f"{shape[1]}x{shape[0]} pixels (width x height)"
