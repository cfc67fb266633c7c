"""A model of images of one size sees others in windows; answers are averaged where these overlap."""

import itertools
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.options import Size, pair


def starts(length: int, window: int, stride: int) -> list[int]:
  """Where windows begin on an axis that is at least a window long; the last ends with the axis."""
  count = -(-(length - window) // stride) + 1
  return [min(i * stride, length - window) for i in range(count)]


def sliding(
  function: Callable[[jax.Array], jax.Array],
  images: jax.Array,
  channels: int,
  window: Size,
  stride: Size,
) -> jax.Array:
  """Applies a function to windows of images [batch, height, width, any].

  The function maps [batch, *window, any] to float32 [batch, *window, channels]. Each
  pixel of the result [batch, height, width, channels] is the mean over the windows that see it.
  Images with a side below `window` are padded with zeros.
  """
  _, height, width, _ = images.shape
  sides = pair(window)
  if (height, width) == sides:
    return function(images)
  rows, columns = max(height, sides[0]), max(width, sides[1])
  images = jnp.pad(images, ((0, 0), (0, rows - height), (0, columns - width), (0, 0)))
  each_axis = map(starts, (rows, columns), sides, pair(stride))
  places = np.array([*itertools.product(*each_axis)], np.int32)
  counts = np.zeros((rows, columns, 1), np.float32)
  for i, j in places:
    counts[i : i + sides[0], j : j + sides[1]] += 1

  def add(total: jax.Array, place: jax.Array) -> tuple[jax.Array, None]:
    corner = jnp.pad(place, 1)
    seen = jax.lax.dynamic_slice(images, corner, (len(images), *sides, images.shape[3]))
    values = function(seen)
    before = jax.lax.dynamic_slice(total, corner, values.shape)
    return jax.lax.dynamic_update_slice(total, before + values, corner), None

  total = jnp.zeros((len(images), rows, columns, channels), jnp.float32)
  total, _ = jax.lax.scan(add, total, places)
  return (total / counts)[:, :height, :width]
