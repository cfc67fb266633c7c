"""Images and masks are scaled, cropped, mirrored and jittered at random, inside the step."""

import jax
import jax.numpy as jnp

from mixer_jax.images import augment, rand_augment, warp
from mixer_jax.options import pair
from mixer_jax.tasks.segmentation.data import SegmentationData


def train_input(
  key: jax.Array, images: jax.Array, masks: jax.Array, how: SegmentationData
) -> tuple[jax.Array, jax.Array]:
  """Crops images [batch, height, width, 3] and masks [batch, height, width], uint8, at random scales.

  The results have the size `how.image_size`. Images are float32, normalised, interpolated
  (bilinear, antialiased), and 0 outside the old ones. Masks are uint8, take the nearest pixel, and
  are `how.void` outside. Each image has its own random numbers.
  """
  place_key, jitter_key = jax.random.split(key)
  uniform = jax.random.uniform(place_key, (len(images), 4), jnp.float32)
  images, masks, inside = jax.vmap(lambda *args: _placed(*args, how))(uniform, images, masks)
  if how.jitter:
    images = rand_augment.colour_jitter(jitter_key, images, (how.jitter,) * 3)
  return jnp.where(inside[..., None], augment.normalise(images, how), 0), masks


def _placed(
  uniform: jax.Array, image: jax.Array, mask: jax.Array, how: SegmentationData
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One crop, its mask, and which of its pixels lie inside the old image."""
  scale = how.smallest_scale + (how.largest_scale - how.smallest_scale) * uniform[0]
  axes = []
  for u, side, n in zip(uniform[1:3], pair(how.image_size), mask.shape):
    length = side / scale  # of the crop, in old pixels
    axes.append(_axis(u * (n - length), length, side, n))
  (rows, row_ids, row_in), (columns, column_ids, column_in) = axes
  # At a lower precision GPUs would round pixels to 10 bits or fewer.
  pixels = image.astype(jnp.float32)
  pixels = jnp.einsum("ih,hwc,jw->ijc", rows, pixels, columns, precision="highest")
  inside = row_in[:, None] & column_in
  ids = jnp.where(inside, mask[row_ids[:, None], column_ids], jnp.uint8(how.void))
  found = warp.to_bytes(pixels), ids, inside
  if how.flip:
    found = tuple(jnp.where(uniform[3] < 0.5, x[:, ::-1], x) for x in found)
  return found


def _axis(
  start: jax.Array, length: jax.Array, side: int, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The weights [side, size] of an axis, the nearest pixels [side], and whether these exist."""
  places = start + (jnp.arange(side) + 0.5) * (length / side)
  inside = (places >= 0) & (places < size)
  weights = warp.axis_matrix(start, length, side, size)
  nearest = jnp.clip(jnp.floor(places).astype(jnp.int32), 0, size - 1)
  return jnp.where(inside[:, None], weights, 0), nearest, inside
