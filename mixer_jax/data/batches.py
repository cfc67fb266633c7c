"""From a split to batches on the devices.

A set that fits lives on every device as uint8 and only example ids travel. Of a
larger one, the host prepares a window of some batches ahead of the devices: it
gathers them from decoded images on disk, or has them decoded by worker processes
(`stream.py`). Either way a window is a pair that `take` makes batches of, inside
the compiled step.
"""

from concurrent import futures
from typing import Any, Callable, Iterable, Iterator

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from mixer_jax import sharding as sharding_lib
from mixer_jax.data import stream
from mixer_jax.data.encoded import Encoded
from mixer_jax.data.order import epoch_order, test_indices, train_indices
from mixer_jax.data.sources import Split

__all__ = [
  "Feed",
  "epoch_order",
  "local_rows",
  "take",
  "test_indices",
  "train_indices",
]

# A set up to this size is copied to the device whole.
DEVICE_BYTES = 4 << 30
# Of a larger one, windows up to this size: at least two are on the devices at once.
WINDOW_BYTES = 256 << 20

# Images [n, h, w, 3] and labels [n] on the devices with example ids [batches,
# batch_size]; or None with images [batches, batch_size, h, w, 3] and labels
# [batches, batch_size].
Window = tuple[Any, Any]


def take(examples: Any, batch: Any, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
  """Images [batch_size, h, w, 3] and labels [batch_size] of one batch (traceable).

  Args:
    examples: the first of a `Window`.
    batch: the second, without its leading axis.
    sharding: of the batch.
  """
  images_and_labels = batch if examples is None else tuple(x[batch] for x in examples)
  return jax.lax.with_sharding_constraint(images_and_labels, sharding)


def local_rows(
  sharding: NamedSharding, batch_size: int, devices: Iterable[jax.Device] | None = None
) -> np.ndarray:
  """The rows of a batch that some devices hold, ascending.

  Args:
    sharding: of the batch, whatever the mesh.
    batch_size: rows in all.
    devices: default: those of this process.
  """
  where = sharding.devices_indices_map((batch_size,))
  devices = sharding.addressable_devices if devices is None else devices
  rows = np.arange(batch_size)
  return np.unique(np.concatenate([rows[where[device]] for device in devices]))


class Feed:
  """Hands out a split's batches, window by window.

  Args:
    split: the examples.
    ids: epoch -> example ids of its batches, [batches, batch_size]; the same
      number of batches in every epoch, and the same ids in every process.
    sharding: of a batch. Each process decodes, or gathers, what its devices hold.
    seed: of random crops by worker processes.
  """

  def __init__(
    self,
    split: Split,
    ids: Callable[[int], np.ndarray],
    sharding: NamedSharding,
    seed: int = 0,
  ):
    self._split, self._ids = split, ids
    self._sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    self._batch_size = ids(1).shape[1]
    self._rows = local_rows(sharding, self._batch_size)
    self._seed = seed
    self._resident = self._stream = None
    if isinstance(split.images, Encoded):
      self._stream = stream.Stream(split.images, ids, self._rows, seed)
    elif split.images.nbytes <= DEVICE_BYTES:
      everywhere = NamedSharding(sharding.mesh, PartitionSpec())
      self._resident = sharding_lib.place((np.asarray(split.images), split.labels), everywhere)

  def reorder(self, ids: Callable[[int], np.ndarray]) -> None:
    """Goes on with other example ids, as many batches in every epoch."""
    self._ids = ids
    if self._stream:
      self._stream.close()
      self._stream = stream.Stream(self._split.images, ids, self._rows, self._seed)

  def fitting(self, batches: int) -> int:
    """So many batches a window, or fewer where they would take much memory."""
    if self._resident:
      return batches
    batch_bytes = len(self._rows) * int(np.prod(self._split.images.shape[1:]))
    return max(1, min(batches, WINDOW_BYTES // batch_bytes))

  def windows(self, epoch: int, batches: int, begun: int = 0) -> Iterator[Window]:
    """Yields the windows of an epoch, or of the rest of it.

    Args:
      epoch: its number.
      batches: in a window; it divides those left.
      begun: batches to be left out.

    Raises:
      UserError: an image cannot be decoded (see `stream.Stream.take`).
    """
    ids = self._ids(epoch)
    starts = range(begun, len(ids), batches)
    if self._resident:
      yield from ((self._resident, ids[i : i + batches]) for i in starts)
      return
    with futures.ThreadPoolExecutor(1) as pool:
      ahead = None
      for i in starts:
        ready, ahead = ahead, pool.submit(self._prepare, epoch, ids, i, batches)
        if ready is not None:
          yield None, ready.result()
      if ahead is not None:
        yield None, ahead.result()

  def close(self) -> None:
    """Ends worker processes; they start again with the next window."""
    if self._stream:
      self._stream.close()

  def _prepare(self, epoch: int, ids: np.ndarray, start: int, batches: int) -> Any:
    """Images and labels of a window on the devices."""
    if self._stream:
      local = self._stream.take(epoch, start, batches)
    else:
      local = self._gather(ids[start : start + batches, self._rows])
    shape = (batches, self._batch_size)
    return tuple(
      jax.make_array_from_process_local_data(self._sharding, x, shape + x.shape[2:]) for x in local
    )

  def _gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies examples from the host's memory map, in sorted reads."""
    examples, inverse = np.unique(ids, return_inverse=True)
    return self._split.images[examples][inverse], self._split.labels[ids]
