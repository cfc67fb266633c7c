"""Batches of a streamed dataset, read ahead by worker processes of Grain.

Grain moves the work and keeps the order. The order itself, and every random choice, are pure
functions of seed, epoch and example (`order.py`), whatever the number of workers. Workers run this
module, so it uses `jax.tree` alone of JAX, and nothing that takes a device.
"""

import contextlib
import dataclasses
import itertools
import multiprocessing
from multiprocessing import resource_tracker
import os
import signal
import sys
import threading
from typing import Any, Iterator
import warnings
import weakref

import jax
import numpy as np

from mixer_jax.data import order
from mixer_jax.data.dataset import Ids, Streamed
from mixer_jax.errors import UserError
from mixer_jax.runtime import processes

# A worker hands over so many examples at once: few enough that all workers share a batch, many
# enough that handing over costs little.
_CHUNK = 16


class Stream:
  """The batches of consecutive steps, from any step on.

  Workers start with the first step that is taken, go on by themselves, and end with `close`, with
  the stream, or with the process, however that ends.

  Args:
    dataset: the examples. It is sent to the workers, as are `ids`.
    ids: see `feed.Feed`; an IndexError ends the steps.
    rows: of each batch, the rows that are wanted here, [local] ascending.
    seed: of random choices.
  """

  def __init__(self, dataset: Streamed, ids: Ids, rows: np.ndarray, seed: int):
    self._rows = [rows[i : i + _CHUNK] for i in range(0, len(rows), _CHUNK)]
    self._chunks = _Chunks(dataset, ids, self._rows, seed)
    self._position = self._coming = None
    self._end = lambda: None

  def take(self, step: int, count: int) -> Any:
    """Returns examples [count, local, ...] from a step on, fast if they follow those taken last.

    Raises a UserError that names a broken example, or one that says that a worker died.
    """
    dataset, local = self._chunks.dataset, sum(map(len, self._rows))
    specs, structure = jax.tree.flatten(dataset.spec)
    arrays = [np.empty((count, local, *x.shape), x.dtype) for x in specs]
    try:
      if step != self._position:
        self._start(step)
      for i, start in itertools.product(range(count), range(0, local, _CHUNK)):
        for array, chunk in zip(arrays, next(self._coming), strict=True):
          array[i, start : start + _CHUNK] = chunk
    except (UserError, RuntimeError) as error:
      self.close()
      if isinstance(error, UserError):
        raise
      raise UserError(  # Grain's message has the exit code
        f"a process that reads examples died: {error} It may have run out of memory, or of shared"
        " memory (/dev/shm); data.workers and data.read_ahead set how much is used"
      ) from error
    self._position = step + count
    return structure.unflatten(arrays)

  def close(self) -> None:
    """Ends the workers; `take` starts new ones."""
    self._position = self._coming = None  # chunks hold shared memory
    self._end()

  def _start(self, step: int) -> None:
    import grain  # slow, so only when needed

    self.close()
    dataset = self._chunks.dataset
    chunks = grain.MapDataset.source(dataclasses.replace(self._chunks, first=step))
    chunks = chunks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    ahead = -(-dataset.read_ahead // _CHUNK) or 1
    options = grain.MultiprocessingOptions(dataset.workers, per_worker_buffer_size=ahead)
    with _signals_held_back():
      iterator = iter(chunks.mp_prefetch(options, worker_init_fn=_start_worker))
      self._end = weakref.finalize(self, iterator.close)
      self._coming = itertools.chain([next(iterator)], iterator)
    self._position = step


@dataclasses.dataclass(frozen=True)
class _Chunks:
  """The source for Grain: the wanted rows of all batches from a step on, in numbered pieces."""

  dataset: Streamed
  ids: Ids
  rows: list[np.ndarray]
  seed: int
  first: int = 0

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, number: int) -> list[np.ndarray]:
    """The arrays [rows, ...] of a piece, in the order of `jax.tree.leaves`."""
    batch, piece = divmod(number, len(self.rows))
    step = self.first + batch
    try:
      rows = self.rows[piece]
      ids = self.ids(step)[rows]
    except IndexError:  # read ahead of the last step; nobody takes it
      return []
    epoch = self.ids.epoch_of(step) if hasattr(self.ids, "epoch_of") else 1
    copies = self.ids.copies(step)[rows] if hasattr(self.ids, "copies") else np.zeros_like(ids)
    rngs = (order.crop_rng(self.seed, epoch, *key) for key in zip(ids.tolist(), copies.tolist()))
    examples = [self.dataset.read(i, rng) for i, rng in zip(ids.tolist(), rngs)]
    return [np.stack(leaves) for leaves in zip(*map(jax.tree.leaves, examples))]


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
  """Processes started within never see the signals that stop a run: they end with their run, in order."""
  resource_tracker.ensure_running()  # or it would let the signals through again
  before = signal.pthread_sigmask(signal.SIG_BLOCK, processes.SIGNALS)
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(*_: int) -> None:
  """Ends this worker when the process that started it is gone, killed perhaps."""
  warnings.simplefilter("ignore")  # Pillow's; an image that is really broken is an error

  def end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=end_with_parent, daemon=True).start()
