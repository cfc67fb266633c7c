"""From an encoded image to the size in which it is stored: for Pillow images, on the host."""

import math

import numpy as np
from PIL import Image, ImageOps

from mixer_jax.options import Size, pair

_TRIES = 10
LARGEST_RATIO = 4 / 3  # of a random area's sides


def centre(image: Image.Image, shorter: Size, size: Size) -> Image.Image:
  """Resizes the shorter side (bilinear, antialiased) and crops around the centre.

  With `shorter` of height and width the resized image is the smallest that covers them.

  Sizes and places are rounded as by torchvision's Resize and CenterCrop. An
  `Image.DecompressionBombError` if the resized image would have too many pixels.
  """
  least, crop = pair(shorter)[::-1], pair(size)[::-1]  # width and height, as Pillow has them
  n, length = max(zip(least, image.size), key=lambda side: side[0] / side[1])
  width, height = (max(m, n * own // length) for m, own in zip(least, image.size))
  if width * height > Image.MAX_IMAGE_PIXELS:
    raise Image.DecompressionBombError(f"{width}x{height} pixels once resized")
  image = image.resize((width, height), Image.Resampling.BILINEAR)
  left, top = middle(width, crop[0]), middle(height, crop[1])
  return image.crop((left, top, left + crop[0], top + crop[1]))


def middle(length: int, side: int) -> int:
  """Where a central part of an axis begins; halves are rounded to even, as by torchvision."""
  return round((length - side) / 2)


def fitted(image: Image.Image, size: Size, fit: str) -> Image.Image:
  """Brings an image to a size (bilinear, antialiased).

  Args:
    image: of any size and proportions.
    size: of the result, in pixels.
    fit: "pad" keeps all of the image between black borders, "crop" cuts out the centre, "squash"
      resizes both sides.
  """
  if fit == "crop":
    return centre(image, shorter=size, size=size)
  if fit == "pad":
    return ImageOps.pad(image, pair(size)[::-1], Image.Resampling.BILINEAR)
  return image.resize(pair(size)[::-1], Image.Resampling.BILINEAR)


def random_area(
  rng: np.random.Generator, image: Image.Image, smallest: float, size: Size
) -> Image.Image:
  """Resizes a random rectangle of an image to a size (bilinear, antialiased).

  The crop of Szegedy et al., Going Deeper with Convolutions (CVPR 2015), section 6: its area is
  uniform between the part `smallest` and all of the image's, the logarithm of its aspect ratio
  uniform between those of 3/4 and 4/3, its place uniform. If ten draws do not fit into the image,
  the largest centred rectangle of an allowed ratio is taken.
  """
  width, height = image.size
  w = min(width, max(1, round(height * LARGEST_RATIO)))
  h = min(height, max(1, round(width * LARGEST_RATIO)))
  left, top = (width - w) // 2, (height - h) // 2
  for _ in range(_TRIES):
    area = width * height * rng.uniform(smallest, 1)
    ratio = math.exp(rng.uniform(-1, 1) * math.log(LARGEST_RATIO))
    drawn_w, drawn_h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if 0 < drawn_w <= width and 0 < drawn_h <= height:
      w, h = drawn_w, drawn_h
      left, top = rng.integers(0, (width - w + 1, height - h + 1)).tolist()
      break
  box = (left, top, left + w, top + h)
  return image.resize(pair(size)[::-1], Image.Resampling.BILINEAR, box=box)
