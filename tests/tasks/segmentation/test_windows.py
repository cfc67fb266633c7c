"""Sliding windows against a loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.tasks.segmentation import windows


@pytest.mark.parametrize(
  "length, window, stride, expected",
  [
    (480, 224, 149, [0, 149, 256]),
    (10, 10, 6, [0]),
    (11, 10, 6, [0, 1]),
    (16, 10, 6, [0, 6]),
    (17, 10, 6, [0, 6, 7]),
  ],
)
def test_the_last_window_ends_with_the_axis(length, window, stride, expected):
  assert windows.starts(length, window, stride) == expected


def function(images):
  """Depends on the place in the window, as a model of tokens does."""
  ramp = jnp.arange(1.0, 7)[:, None, None] * jnp.arange(2.0, 8)[None, :, None]
  return jnp.concatenate([images * ramp, images[..., :1] + ramp], axis=-1)


@pytest.mark.parametrize("size", [(6, 9), (11, 15), (4, 20)])
def test_windows_that_are_not_square(size):
  """The number of a pixel in its window, counted by a loop."""
  window, stride = (6, 9), (3, 4)
  number = jnp.arange(54.0).reshape(6, 9, 1)
  found = windows.sliding(lambda x: x + number, jnp.zeros((1, *size, 1)), 1, window, stride)
  rows, columns = (max(a, b) for a, b in zip(size, window))
  total, count = np.zeros((2, rows, columns))
  for i in sorted({min(3 * k, rows - 6) for k in range(9)}):
    for j in sorted({min(4 * k, columns - 9) for k in range(9)}):
      total[i : i + 6, j : j + 9] += np.arange(54).reshape(6, 9)
      count[i : i + 6, j : j + 9] += 1
  np.testing.assert_allclose(found[0, ..., 0], (total / count)[: size[0], : size[1]], rtol=1e-6)


@pytest.mark.parametrize("size", [(6, 6), (6, 13), (14, 9), (4, 8)])
@pytest.mark.first(1)
def test_overlapping_answers_are_averaged(size):
  images = np.random.default_rng(0).normal(size=(2, *size, 3)).astype(np.float32)
  rows, columns = (max(n, 6) for n in size)
  padded = np.zeros((2, rows, columns, 3), np.float32)
  padded[:, : size[0], : size[1]] = images
  total, count = np.zeros((2, rows, columns, 4)), np.zeros((rows, columns, 1))
  for i in range(0, rows - 6 + 4, 4):
    for j in range(0, columns - 6 + 4, 4):
      i, j = min(i, rows - 6), min(j, columns - 6)
      total[:, i : i + 6, j : j + 6] += function(padded[:, i : i + 6, j : j + 6])
      count[i : i + 6, j : j + 6] += 1
  found = windows.sliding(function, images, 4, 6, 4)
  expected = (total / count)[:, : size[0], : size[1]]
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  if size == (6, 6):
    np.testing.assert_array_equal(found, function(images))
