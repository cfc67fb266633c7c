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
from PIL import ExifTags, Image, UnidentifiedImageError
import tqdm

from mixer_jax.data import cache, splits
from mixer_jax.errors import UserError, reason
from mixer_jax.images import decode, folder

_LOG = logging.getLogger(__name__)
_FORMAT = 2  # raise it when decoding changes, so that old cache entries are not read
_BIT_DEPTH = 24  # the byte of a PNG: 8 of signature, 8 of IHDR's head, 4 each of width and height
_LAYOUTS = "SPLIT and SPLITannot, or images/SPLIT and annotations/SPLIT"
_ENDINGS = {"image": folder.EXTENSIONS, "mask": (".png",)}
_BAR = dict(desc="Decoding pairs (once)", unit=" pairs", unit_scale=True)
_SHOW_PROGRESS_ABOVE = 1_000  # pairs


@dataclasses.dataclass(frozen=True)
class Pairs:
  """The files of a split, in a shuffled order that depends on their names only.

  With a `canvas`, (height, width), see `on_canvas`; the rest of a mask is then `void`. A UserError
  if a folder is missing or empty, or an image or a mask stands alone.
  """

  root: pathlib.Path
  base: str  # the name of the split
  canvas: tuple[int, ...]
  void: int

  def __post_init__(self):
    _ = self._files

  def __len__(self) -> int:
    return len(self._files)

  @functools.cached_property
  def _files(self) -> list[tuple[pathlib.Path, pathlib.Path]]:
    apart = (self.root / "images").is_dir()
    ends = (f"images/{self.base}", f"annotations/{self.base}")
    ends = ends if apart else (self.base, f"{self.base}annot")
    places = dict(zip(_ENDINGS, (self.root / end for end in ends)))
    files = {what: _by_stem(place, what) for what, place in places.items()}
    for what, other in (("image", "mask"), ("mask", "image")):
      if alone := sorted(files[what].keys() - files[other].keys()):
        count = f"the first of {len(alone)} (of {len(files[what])}) without its {other}"
        raise UserError(f"{files[what][alone[0]]}: {count} in {places[other]}")
    names = sorted(files["image"])
    order = splits.shuffled_order(len(names))
    return [(files["image"][names[i]], files["mask"][names[i]]) for i in order]

  @property
  def paths(self) -> np.ndarray:
    """The images' files below `root`, bytes [n]."""
    return np.array([os.fsencode(image.relative_to(self.root)) for image, _ in self._files])

  def where(self, i: int) -> str:
    """The mask, for messages."""
    return str(self._files[i][1])

  def arrays(self, cache_dir: str) -> dict[str, np.ndarray]:
    """All pairs: "images" uint8 [n, height, width, 3], "masks" uint8 [n, height, width], and "ids".

    `ids` bool [n, 256] are those in each mask. They are decoded once, see `data.cache`. A UserError
    if a file is broken, a mask is of another kind, or sizes differ.
    """
    with folder.readable(self.root):
      stats = [(str(path), os.stat(path)) for pair in self._files for path in pair]
    files = [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
    key = cache.fingerprint((_FORMAT, self.canvas, self.canvas and self.void), files)
    return cache.read(cache.place(cache_dir), f"pairs-{self.base}", key, self._decode_all)

  def _decode_all(self, allocate: cache.Allocate) -> dict[str, np.ndarray]:
    n, shape = len(self), self._decode(0, [])[1].shape
    images = allocate("images", (n, *shape, 3), np.uint8)
    masks, ids = allocate("masks", (n, *shape), np.uint8), allocate("ids", (n, 256), bool)

    turned = []

    def fill(i: int) -> None:
      image, mask = self._decode(i, turned)
      if mask.shape != shape:
        sizes = f"{_in_words(mask.shape)}, but {self.where(0)} has {_in_words(shape)}"
        raise UserError(f"{self.where(i)} has {sizes}; set data.canvas to a height and a width")
      images[i], masks[i] = image, mask
      ids[i] = np.bincount(mask.reshape(-1), minlength=256) > 0

    shown = dict(total=n, disable=n <= _SHOW_PROGRESS_ABOVE or None)
    with warnings.catch_warnings(action="ignore"), futures.ThreadPoolExecutor() as pool:
      for _ in tqdm.tqdm(pool.map(fill, range(n)), **shown, **_BAR):
        pass
    if turned:
      why = "its EXIF turns the image, and nothing turns its mask"
      _LOG.warning("%s: %s (%d of %d pairs)", min(turned), why, len(turned), n)
    return {"images": images, "masks": masks, "ids": ids}

  def _decode(self, i: int, turned: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """A pair as arrays; `turned` gets the path of an image with an orientation."""
    path, mask_path = map(str, self._files[i])
    content = folder.read_file(path)
    image = decode.decode_image(content, path)
    if _orientation(content) != 1:
      turned.append(path)
    mask = decode_mask(folder.read_file(mask_path), mask_path)
    if mask.shape != image.shape[:2]:
      sizes = f"{_in_words(mask.shape)}, but its image {_in_words(image.shape)}"
      raise UserError(f"{mask_path} has {sizes}")
    if self.canvas:
      image, mask = on_canvas(image, self.canvas, 0), on_canvas(mask, self.canvas, self.void)
    return image, mask


def _orientation(content: bytes) -> int:
  """The orientation in the EXIF of an image that has been decoded: 1 is upright."""
  with Image.open(io.BytesIO(content)) as image:
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def _by_stem(place: pathlib.Path, what: str) -> dict[str, pathlib.Path]:
  if not place.is_dir():
    raise UserError(f"{place}: no such folder; pairs of images and masks lie in {_LAYOUTS}")
  paths = [place / name for name in folder.listed(place)]
  found: dict[str, pathlib.Path] = {}
  for path in (path for path in paths if path.suffix.lower() in _ENDINGS[what]):
    if path.stem in found:
      raise UserError(f"{path}: a second {what} of this name, beside {found[path.stem].name}")
    found[path.stem] = path
  if not found:
    raise UserError(
      f"{place}: no {what}s in it; they end in {', '.join(_ENDINGS[what])}, and lie in {_LAYOUTS}"
    )
  return found


def decode_mask(data: bytes, where: str) -> np.ndarray:
  """The ids of a mask, uint8 [height, width]; of a palette the ids, not the colours.

  A UserError if the file is no PNG, is broken, or has pixels of another kind.
  """
  try:
    with Image.open(io.BytesIO(data), formats=("PNG",)) as mask:
      if mask.width * mask.height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(f"more than {Image.MAX_IMAGE_PIXELS:,} pixels")
      decode.check_png(data)
      mode, ids = mask.mode, np.asarray(mask.convert("L") if mask.mode == "1" else mask)
  except Exception as error:  # Pillow raises whatever it trips over
    why = "not a PNG" if isinstance(error, UnidentifiedImageError) else reason(error)
    raise UserError(f"{where}: broken mask: {why if data else 'the file is empty'}") from error
  if mode not in ("1", "L", "P"):
    raise UserError(
      f"{where}: a mask of mode {mode}; allowed: at most 8 bits, grey (1, L) or a palette (P)"
    )
  # Pillow stretches grey of fewer bits to 0 to 255, and names it "L", too.
  return ids if mode == "P" else ids // (255 // (2 ** data[_BIT_DEPTH] - 1))


def fitting(shape: tuple[int, ...], canvas: tuple[int, ...]) -> tuple[int, int]:
  """The largest height and width of an image [height, width, ...] that fit into a canvas."""
  scale = min(canvas[0] / shape[0], canvas[1] / shape[1])
  return tuple(min(n, max(1, round(scale * m))) for n, m in zip(canvas, shape))


def on_canvas(array: np.ndarray, canvas: tuple[int, ...], fill: int) -> np.ndarray:
  """Resizes an image or a mask to fit into a canvas (height, width), at its upper left.

  The ratio of its sides is kept. An image [h, w, 3] is interpolated as by Pillow's BILINEAR, a mask
  [h, w] takes the nearest pixel; `fill` is the value of the rest.
  """
  height, width = fitting(array.shape, canvas)
  how = Image.Resampling.NEAREST if array.ndim == 2 else Image.Resampling.BILINEAR
  result = np.full((*canvas, *array.shape[2:]), fill, np.uint8)
  result[:height, :width] = np.asarray(Image.fromarray(array).resize((width, height), how))
  return result


def _in_words(shape: tuple[int, ...]) -> str:
  return f"{shape[1]}x{shape[0]} pixels (width x height)"
