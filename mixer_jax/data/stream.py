"""Batches of encoded images, decoded ahead by worker processes of Grain.

Grain moves the work and keeps the order; what the order is, and every crop, are
pure functions of seed, epoch and example (`order.py`), whatever the number of
workers. Workers run this: nothing in it may use JAX, which would take a device.
"""

import contextlib
import itertools
import multiprocessing
from multiprocessing import resource_tracker
import os
import signal
import sys
import threading
from typing import Any, Callable, Iterator
import warnings
import weakref

import numpy as np

from mixer_jax.data import order
from mixer_jax.data.encoded import Encoded
from mixer_jax.errors import UserError

# Images that a worker hands over at once: few enough that a batch is shared by all
# workers, many enough that handing over costs little.
_CHUNK = 16


class Stream:
  """Consecutive batches of a split, from any batch on and over all epochs without end.

  Workers start with the first batch, go on to the next epoch by themselves, and
  end with `close`, with the stream, or with the process, however that ends.

  Args:
    images: the split.
    ids: epoch -> example ids of its batches, [batches, batch_size], as many
      batches in every epoch. It is sent to the workers.
    rows: of each batch, those that are wanted here, [local] ascending.
    seed: of the crops.

  Raises:
    UserError: Grain is not installed.
  """

  def __init__(
    self, images: Encoded, ids: Callable[[int], np.ndarray], rows: np.ndarray, seed: int
  ):
    _grain()
    self._chunks = _Chunks(images, ids, rows, seed)
    self._position = None
    self._running = []  # Grain's iterator, and the chunks still to come from it
    weakref.finalize(self, _close, self._running)

  def take(self, epoch: int, batch: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Waits for some batches; quick where they follow those taken last.

    Args:
      epoch: of the first of them.
      batch: its number in the epoch, from 0.
      count: how many; they may not reach over the epoch's end.

    Returns:
      Images [count, local, height, width, 3] uint8 and labels [count, local] int32.

    Raises:
      UserError: an image is broken (it is named), or a worker died.
    """
    position = self._chunks.position(epoch, batch)
    images, labels = self._chunks.allocate(count)
    try:
      if position != self._position:
        self._start(position)
      for i in range(count):
        for part in self._chunks.slices:
          images[i, part], labels[i, part] = next(self._running[1])
    except UserError:
      self.close()
      raise
    except RuntimeError as error:  # Grain's, with the exit code in words
      self.close()
      raise UserError(
        f"a process that decodes images died: {error} It may have run out of memory, or of shared"
        " memory (/dev/shm); data.workers and data.read_ahead set how much is used"
      ) from error
    self._position = position + count
    return images, labels

  def close(self) -> None:
    """Ends the workers; `take` starts new ones."""
    self._position = None
    _close(self._running)

  def _start(self, position: int) -> None:
    self.close()
    grain = _grain()
    images = self._chunks.images
    dataset = grain.MapDataset.source(self._chunks.starting_at(position)).to_iter_dataset(
      grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    dataset = dataset.mp_prefetch(
      grain.MultiprocessingOptions(
        num_workers=images.workers, per_worker_buffer_size=-(-images.read_ahead // _CHUNK) or 1
      ),
      worker_init_fn=_start_worker,
    )
    with _signals_held_back():
      iterator = iter(dataset)
      self._running += iterator, iterator
      self._running[1] = itertools.chain([next(iterator)], iterator)
    self._position = position


class _Chunks:
  """Grain's source: the wanted rows of all batches in pieces, by number."""

  def __init__(
    self, images: Encoded, ids: Callable[[int], np.ndarray], rows: np.ndarray, seed: int
  ):
    self.images = images
    self.slices = [slice(i, i + _CHUNK) for i in range(0, len(rows), _CHUNK)]
    self._ids, self._rows, self._seed = ids, rows, seed
    self._per_epoch = len(ids(1))
    self._first = 0
    self._cached = None, None

  def allocate(self, batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays for the images and labels of some batches."""
    shape = (batches, len(self._rows))
    return np.empty(shape + self.images.shape[1:], np.uint8), np.empty(shape, np.int32)

  def position(self, epoch: int, batch: int) -> int:
    """The number of a batch, counted over all epochs."""
    return epoch * self._per_epoch + batch

  def starting_at(self, position: int) -> "_Chunks":
    chunks = _Chunks(self.images, self._ids, self._rows, self._seed)
    chunks._first = position
    return chunks

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
    batch, piece = divmod(number, len(self.slices))
    epoch, batch = divmod(self._first + batch, self._per_epoch)
    if self._cached[0] != epoch:
      self._cached = epoch, self._ids(epoch)
    ids = self._cached[1][batch, self._rows[self.slices[piece]]]
    images = np.empty((len(ids), *self.images.shape[1:]), np.uint8)
    labels = np.empty(len(ids), np.int32)
    for i, example in enumerate(ids.tolist()):
      rng = order.crop_rng(self._seed, epoch, example)
      images[i], labels[i] = self.images.read(example, rng)
    return images, labels


def _close(running: list[Any]) -> None:
  if running:
    iterator, _ = running
    running.clear()  # for chunks in it hold shared memory
    iterator.close()


def _grain() -> Any:
  try:
    import grain  # slow, so only when needed  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise UserError(
      f"data.stream: streaming needs the package grain, which cannot be imported ({error}):"
      " pip install grain"
    ) from error
  return grain


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
  """Processes started within never see Ctrl-C or SIGTERM, which reach a whole group.

  The run that they work for ends in order, and they with it.
  """
  resource_tracker.ensure_running()  # or it would let the signals through again
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(index: int, count: int) -> None:
  """Ends this worker when the process that started it is gone, killed perhaps."""
  del index, count
  warnings.simplefilter("ignore")  # Pillow's; an image that is really broken is an error

  def end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=end_with_parent, daemon=True).start()
