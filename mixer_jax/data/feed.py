"""Feeds the devices with batches of a dataset.

A set that fits lives on every device, and only example ids travel. For a larger set the host
prepares a window of some steps ahead of the devices: it gathers examples from memory maps, or worker
processes read them (`stream.py`). `take` makes batches of a window in the compiled step.
"""

from concurrent import futures
import math
from typing import Any, Iterable, Iterator

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from mixer_jax.data import stream
from mixer_jax.data.dataset import Dataset, Ids
from mixer_jax.runtime import mesh as mesh_lib

# A set up to this size is copied to the devices whole.
DEVICE_BYTES = 4 << 30
# Windows of a larger set have at most this size; at least two are on the devices at once.
WINDOW_BYTES = 256 << 20

# Examples [n, ...] on the devices with ids [steps, batch_size]; or None with batches
# [steps, batch_size, ...].
Window = tuple[Any, Any]


def take(examples: Any, rows: Any, sharding: NamedSharding) -> Any:
  """The stacked examples [batch_size, ...] of one step of a `Window` (traceable).

  `rows` is the window's second part without its leading axis, `sharding` the batch's.
  """
  batch = rows if examples is None else jax.tree.map(lambda x: x[rows], examples)
  return jax.lax.with_sharding_constraint(batch, sharding)


def is_resident(dataset: Dataset) -> bool:
  """Whether a set is copied to every device whole."""
  arrays = dataset.arrays()
  return arrays is not None and sum(x.nbytes for x in jax.tree.leaves(arrays)) <= DEVICE_BYTES


def window_shapes(
  dataset: Dataset, sharding: NamedSharding, steps: int, batch_size: int
) -> tuple[Any, Any]:
  """Shapes of a `Window` of some steps, placed as a `Feed` places it."""
  whole = mesh_lib.replicated(sharding.mesh)
  shape = lambda lead, x, where: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=where)
  if is_resident(dataset):
    ids = jax.ShapeDtypeStruct((steps, batch_size), np.int32, sharding=whole)
    return jax.tree.map(lambda x: shape((len(dataset),), x, whole), dataset.spec), ids
  split = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
  return None, jax.tree.map(lambda x: shape((steps, batch_size), x, split), dataset.spec)


def fitting(dataset: Dataset, steps: int, local_batch: int) -> int:
  """`steps`, the length of a window, or fewer where they would take too much memory."""
  if is_resident(dataset):
    return steps
  arrays = jax.tree.leaves(dataset.spec)
  example = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
  return max(1, min(steps, WINDOW_BYTES // (local_batch * example)))


def local_rows(
  sharding: NamedSharding, batch_size: int, devices: Iterable[jax.Device] | None = None
) -> np.ndarray:
  """The rows [local] of a batch that some devices (None: of this process) hold, ascending."""
  where = sharding.devices_indices_map((batch_size,))
  devices = sharding.addressable_devices if devices is None else devices
  rows = np.arange(batch_size)
  return np.unique(np.concatenate([rows[where[device]] for device in devices]))


class Feed:
  """Hands out a dataset's batches, window by window.

  Args:
    dataset: the examples.
    ids: the same in every process; those of a window are equally many. A method `epoch_of`, such as
      that of `order.Order`, says which epoch a step belongs to; without one all are of epoch 1.
    sharding: of a batch. Each process reads, or gathers, the rows of its own devices.
    seed: of the random choices of a stream, see `order.crop_rng`.
  """

  def __init__(self, dataset: Dataset, ids: Ids, sharding: NamedSharding, seed: int = 0):
    self._dataset, self._ids, self._seed = dataset, ids, seed
    self._batch = sharding
    self._sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    self._rows = local_rows(sharding, len(ids(0)))
    self._resident = self._stream = None
    self._ahead: list[futures.Future] = []
    self._arrays = dataset.arrays()
    if self._arrays is None:
      self.reorder(ids)
    elif is_resident(dataset):
      everywhere = mesh_lib.replicated(sharding.mesh)
      self._resident = mesh_lib.place(jax.tree.map(np.asarray, self._arrays), everywhere)

  def reorder(self, ids: Ids) -> None:
    """Continues with other example ids, as many in every step."""
    self.close()
    self._ids = ids
    if self._arrays is None:
      self._stream = stream.Stream(self._dataset, ids, self._rows, self._seed)

  def windows(self, plan: Iterable[tuple[int, int]]) -> Iterator[Window]:
    """Yields a window for each first step and number of steps of a plan, read one entry ahead.

    A UserError names an example that cannot be read (see `stream.Stream.take`).
    """
    if self._resident is not None:
      yield from ((self._resident, self._window_ids(*entry)) for entry in plan)
      return
    with futures.ThreadPoolExecutor(1) as pool:
      self._ahead = ahead = []
      for entry in plan:
        ahead.append(pool.submit(self._prepare, *entry))
        if len(ahead) > 1:
          yield None, ahead.pop(0).result()
      for last in ahead:
        yield None, last.result()

  def close(self) -> None:
    """Ends worker processes after the current read; they start again with the next window."""
    for read in self._ahead:
      read.cancel()
    futures.wait(self._ahead)  # Grain would leave its thread to wait for them for ever
    if self._stream:
      self._stream.close()

  def _window_ids(self, first: int, count: int) -> np.ndarray:
    return np.stack([self._ids(step) for step in range(first, first + count)])

  def _prepare(self, first: int, count: int) -> Any:
    ids = self._window_ids(first, count)
    if self._stream:
      local = self._stream.take(first, count)
    else:  # from the host's memory maps, in sorted reads
      own = ids[:, local_rows(self._batch, ids.shape[1])]
      examples, inverse = np.unique(own, return_inverse=True)
      local = jax.tree.map(lambda x: x[examples][inverse], self._arrays)
    shape = ids.shape
    make = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: make(self._sharding, x, shape + x.shape[2:]), local)
