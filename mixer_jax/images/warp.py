"""Affine maps, random areas and blur of one image: each pixel becomes a mean of others."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.images.crops import LARGEST_RATIO
from mixer_jax.options import Size, pair

GEOMETRY = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
_TRIES = 10  # of a random rectangle, as on the host
BOX = 2 * _TRIES + 2  # random numbers that it takes
_REACH = 8  # taps to each side of a blur


def matrix(kind: jax.Array, value: jax.Array, height: int, width: int) -> jax.Array:
  """The map from a pixel of the result to its place in the image: [2, 3], rows for x and y.

  `kind` is an index of `GEOMETRY`, another number gives the identity. `value` is in degrees
  counter-clockwise around the centre, pixels aside for a pixel down (or the reverse), or pixels.
  Coordinates are those of Pillow: the centre of the first pixel is (0.5, 0.5).
  """
  angle = jnp.where(kind == 0, jnp.deg2rad(value), 0.0)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  shear_x, shear_y, left, top = (jnp.where(kind == i, value, 0.0) for i in range(1, 5))
  x, y = width / 2, height / 2
  across = jnp.stack([cos, shear_x - sin, left + x - cos * x + sin * y])
  down = jnp.stack([shear_y + sin, cos, top + y - sin * x - cos * y])
  return jnp.stack([across, down])


def warp(image: jax.Array, matrices: jax.Array, fill: jax.Array) -> jax.Array:
  """Applies maps [n, 2, 3] one after the other, with one bilinear interpolation for all of them.

  A pixel that any of them moves in from outside has the colour `fill`, [3]. As in Pillow, the
  outermost half pixel repeats the border, and values are truncated: with one map, and others that
  are the identity, the result is that of `Image.transform` with AFFINE and BILINEAR.
  """
  height, width, _ = image.shape
  x, y = jnp.arange(width) + 0.5, jnp.arange(height)[:, None] + 0.5
  inside = True
  for a in matrices[::-1]:
    x, y = (row[0] * x + row[1] * y + row[2] for row in a)
    inside &= (x >= 0) & (x < width) & (y >= 0) & (y < height)
  # The four neighbours lie side by side, three bytes in a word: one gather instead of twelve.
  bytes_ = jnp.pad(image, ((1, 1), (1, 1), (0, 0)), mode="edge").astype(jnp.uint32)
  words = bytes_[..., 0] | bytes_[..., 1] << 8 | bytes_[..., 2] << 16
  four = jnp.stack([words[:-1, :-1], words[:-1, 1:], words[1:, :-1], words[1:, 1:]], axis=-1)
  left, top = jnp.floor(x - 0.5), jnp.floor(y - 0.5)
  column = jnp.clip(left.astype(jnp.int32) + 1, 0, width)
  row = jnp.clip(top.astype(jnp.int32) + 1, 0, height)
  found = four.reshape(-1, 4).at[row * (width + 1) + column].get(mode="promise_in_bounds")
  right, below = x - 0.5 - left, y - 0.5 - top
  shifts = jnp.arange(0, 24, 8, dtype=jnp.uint32)
  a, b, c, d = ((found[..., i, None] >> shifts & 255).astype(jnp.float32) for i in range(4))
  right, below = right[..., None], below[..., None]
  upper, lower = a + (b - a) * right, c + (d - c) * right
  mixed = (upper + (lower - upper) * below).astype(jnp.uint8)
  return jnp.where(inside[..., None], mixed, fill.astype(jnp.uint8))


def axis_matrix(start: Any, length: Any, size_out: int, size_in: int, xp: Any = jnp) -> Any:
  """Resizes a part of an axis as Pillow's BILINEAR with a `box` does: [size_out, size_in].

  Pixel centres are at half-integers; when it shrinks, the triangle widens by the scale. `xp` is
  `jax.numpy`, or NumPy where the numbers are constants.
  """
  scale = length / size_out
  centres = start + (xp.arange(size_out) + 0.5) * scale
  distances = xp.abs(xp.arange(size_in) + 0.5 - centres[:, None])
  weights = xp.maximum(0.0, 1.0 - distances / xp.maximum(scale, 1.0))
  return weights / weights.sum(axis=1, keepdims=True)


def random_box(
  uniform: jax.Array, size: tuple[int, int], share: tuple[float, float], ratio: float
) -> jax.Array:
  """A random rectangle in an image of (height, width): float32 [4] left, top, width, height.

  Its share of the area is uniform between two bounds, the logarithm of its aspect ratio between
  those of 1/ratio and ratio, its place uniform. The first of ten draws that fits counts; if none
  does, the width and height are 0. `uniform` are `BOX` random numbers in [0, 1).
  """
  height, width = size
  shares, ratios, (x, y) = uniform[:_TRIES], uniform[_TRIES : 2 * _TRIES], uniform[-2:]
  area = height * width * (share[0] + (share[1] - share[0]) * shares)
  aspect = jnp.exp(math.log(ratio) * (2 * ratios - 1))
  w, h = jnp.round(jnp.sqrt(area * aspect)), jnp.round(jnp.sqrt(area / aspect))
  fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
  first = jnp.argmax(fits)
  w, h = (jnp.where(fits[first], side[first], 0.0) for side in (w, h))
  return jnp.stack([jnp.floor(x * (width - w + 1)), jnp.floor(y * (height - h + 1)), w, h])


def random_area(
  uniform: jax.Array, image: jax.Array, share: tuple[float, float], size: Size
) -> jax.Array:
  """`crops.random_area` on the device: uint8 [*size, 3] of an image [height, width, 3].

  Bilinear and antialiased, rounded once, where Pillow rounds after each axis. `uniform` and `share`
  are as in `random_box`.
  """
  height, width, _ = image.shape
  box = random_box(uniform, (height, width), share, LARGEST_RATIO)
  most_w, most_h = (
    min(width, round(height * LARGEST_RATIO)),
    min(height, round(width * LARGEST_RATIO)),
  )
  whole = jnp.array([(width - most_w) // 2, (height - most_h) // 2, most_w, most_h], jnp.float32)
  left, top, w, h = jnp.where(box[2] > 0, box, whole)
  out = pair(size)
  rows, columns = axis_matrix(top, h, out[0], height), axis_matrix(left, w, out[1], width)
  image = image.astype(jnp.float32)
  return to_bytes(jnp.einsum("ih,hwc,jw->ijc", rows, image, columns, precision="highest"))


def to_bytes(image: jax.Array) -> jax.Array:
  """Rounds values in [0, 255] to uint8."""
  return image if image.dtype == jnp.uint8 else (image + 0.5).astype(jnp.uint8)


def blurred(image: jax.Array, radius: jax.Array) -> jax.Array:
  """A Gaussian blur, uint8, that repeats the border; `radius` is its standard deviation.

  Pillow's GaussianBlur is three box blurs, which come close to it. Along an axis it is a product of
  matrices: XLA would compute a sum of slices anew for each slice of the other axis.
  """
  weights = jnp.exp(-0.5 * jnp.square(jnp.arange(-_REACH, _REACH + 1) / radius))
  weights /= weights.sum()
  rows, columns = (jnp.tensordot(weights, _taps(size), 1) for size in image.shape[:2])
  image = image.astype(jnp.float32)
  return to_bytes(jnp.einsum("ih,hwc,jw->ijc", rows, image, columns, precision="highest"))


def _taps(size: int) -> np.ndarray:
  """The places that each tap of a blur reads, [taps, size, size] of 0 and 1."""
  places = np.arange(size) + np.arange(-_REACH, _REACH + 1)[:, None]
  return np.eye(size, dtype=np.float32)[places.clip(0, size - 1)]
