"""From a split to indexed batches on the device.

A set that fits lives on the device as uint8 and only indices travel; of a
larger one, the host gathers a window of some batches ahead of the device.
Either way the compiled step gathers `images[indices]`.
"""

from concurrent import futures
from typing import Any, Iterator

import jax
import numpy as np

from mixer_jax import sharding
from mixer_jax.data.sources import Split

# A set up to this size is copied to the device whole.
DEVICE_BYTES = 4 << 30

Window = tuple[Any, Any, np.ndarray]


def epoch_order(seed: int, epoch: int, num_examples: int, restores: int = 0) -> np.ndarray:
  """The permutation of an epoch: a pure function of its arguments.

  Args:
    seed: of the run.
    epoch: from 1.
    num_examples: of the split.
    restores: how often the run went back after it diverged: never in the same order.
  """
  entropy = (seed, epoch, restores) if restores else (seed, epoch)
  return np.random.default_rng(entropy).permutation(num_examples).astype(np.int32)


def train_indices(
  seed: int, epoch: int, num_examples: int, batch_size: int, restores: int = 0
) -> np.ndarray:
  """Example ids of an epoch's batches, int32 [steps, batch_size].

  The examples that do not fill a last batch are left out: other ones every
  epoch, as the order is new.
  """
  steps = num_examples // batch_size
  order = epoch_order(seed, epoch, num_examples, restores)
  return order[: steps * batch_size].reshape(steps, -1)


def test_indices(num_examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Ids and mask, [batches, batch_size], covering each example exactly once."""
  batches = -(-num_examples // batch_size)
  ids = np.arange(batches * batch_size).reshape(batches, batch_size)
  return np.minimum(ids, num_examples - 1).astype(np.int32), ids < num_examples


class Feed:
  """Hands out (images, labels, indices) for rows of batch indices.

  Args:
    split: the examples.
    sharding: where images and labels are placed.
  """

  def __init__(self, split: Split, sharding: jax.sharding.Sharding):
    self._split = split
    self._sharding = sharding
    self.on_device = split.images.nbytes <= DEVICE_BYTES
    if self.on_device:
      self._resident = self._put(np.asarray(split.images), split.labels)

  def _put(self, images: np.ndarray, labels: np.ndarray) -> tuple[jax.Array, jax.Array]:
    return sharding.place((images, labels), self._sharding)

  def windows(self, indices: np.ndarray, batches: int) -> Iterator[Window]:
    """Yields consecutive windows of `batches` rows of `indices`.

    Args:
      indices: example ids, [rows, batch_size].
      batches: rows a window; it divides the rows.

    Yields:
      images and labels on the device, and ids into them, [batches, batch_size].
    """
    rows = indices.reshape(-1, batches, indices.shape[-1])
    if self.on_device:
      yield from ((*self._resident, row) for row in rows)
      return
    with futures.ThreadPoolExecutor(1) as pool:
      ahead = None
      for row in rows:
        gathered, ahead = ahead, pool.submit(self._gather, row)
        if gathered is not None:
          yield gathered.result()
      if ahead is not None:
        yield ahead.result()

  def _gather(self, row: np.ndarray) -> Window:
    """Copies one window's examples to the device, in sorted reads."""
    ids, local = np.unique(row, return_inverse=True)
    # A fixed size, or every window would be a new shape to compile.
    padded = np.concatenate([ids, np.full(row.size - len(ids), ids[-1], ids.dtype)])
    images, labels = self._put(self._split.images[padded], self._split.labels[padded])
    return images, labels, local.reshape(row.shape).astype(np.int32)
