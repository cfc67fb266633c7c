"""The order of examples and their windows."""

import dataclasses
import pickle
import threading
import time

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from mixer_jax.data import feed, order
from mixer_jax.data.dataset import Arrays


def test_order_is_a_function_of_seed_and_epoch():
  drawn = lambda seed, epoch: order.train_indices(seed, epoch, 100, 10).ravel()
  np.testing.assert_array_equal(drawn(3, 5), drawn(3, 5))
  np.testing.assert_array_equal(np.sort(drawn(3, 5)), np.arange(100))
  assert not np.array_equal(drawn(3, 5), drawn(3, 6))
  assert not np.array_equal(drawn(3, 5), drawn(4, 5))


def test_no_example_comes_twice_in_an_epoch():
  ids = order.train_indices(0, 1, 103, 10)
  assert ids.shape == (10, 10)
  assert len(np.unique(ids)) == 100


def test_repeats_come_in_a_row_and_keep_the_length_of_an_epoch():
  drawn = order.train_indices(0, 1, 103, 10, repeats=3)
  assert drawn.shape == (10, 10)
  ids, counts = np.unique(drawn, return_counts=True)
  assert len(ids) == 34 and sorted(counts) == [1] + [3] * 33  # 100 = 33 x 3 + 1
  flat = drawn.ravel()
  np.testing.assert_array_equal(flat[:99].reshape(33, 3), np.repeat(flat[:99:3, None], 3, 1))
  once = order.train_indices(0, 1, 103, 10).ravel()
  np.testing.assert_array_equal(flat[::3], once[:34])
  assert not np.array_equal(drawn, order.train_indices(0, 2, 103, 10, repeats=3))


def test_copies_are_numbered_across_batches():
  ordered = order.Order(seed=0, num_examples=103, batch_size=10, repeats=3)
  for epoch in (0, 1):
    pairs = [
      (i, copy)
      for step in range(10 * epoch, 10 * epoch + 10)
      for i, copy in zip(ordered(step).tolist(), ordered.copies(step).tolist())
    ]
    assert len(set(pairs)) == 100 and {copy for _, copy in pairs} == {0, 1, 2}


@pytest.mark.parametrize("size, batch_size", [(10, 4), (8, 4), (3, 4), (1, 1)])
def test_each_test_example_is_counted_once(size, batch_size):
  ids, mask = order.test_indices(size, batch_size)
  np.testing.assert_array_equal(ids[mask], np.arange(size))


def test_steps_are_the_batches_of_their_epochs():
  ordered = order.Order(seed=3, num_examples=25, batch_size=7)
  assert ordered.steps_per_epoch == 3
  for restores in (0, 2):
    again = pickle.loads(pickle.dumps(dataclasses.replace(ordered, restores=restores)))
    for epoch in (2, 1):
      rows = order.train_indices(3, epoch, 25, 7, restores)
      steps = range(3 * (epoch - 1), 3 * epoch)
      assert {again.epoch_of(step) for step in steps} == {epoch}
      np.testing.assert_array_equal([again(step) for step in steps], rows)


def dataset(n=50):
  """Examples that are trees of a float, a pair of arrays and a label."""
  rng = np.random.default_rng(0)
  pair = (
    rng.integers(0, 256, (n, 4, 3), dtype=np.uint8),
    rng.normal(size=(n, 2)).astype(np.float32),
  )
  return Arrays({"pair": pair, "label": np.arange(n, dtype=np.int32)})


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["gathered", "resident"])
@pytest.mark.parametrize("devices", [1, 5])
@pytest.mark.first(2)
def test_windows_hold_the_examples_asked_for(limit, devices, monkeypatch):
  monkeypatch.setattr(feed, "DEVICE_BYTES", limit)
  examples, sharding = dataset(), batched(devices)
  ids = np.random.default_rng(1).integers(0, 50, (12, 5)).astype(np.int32)
  opened = feed.Feed(examples, ids.__getitem__, sharding)
  plan = [(2, 2), (4, 1), (5, 3), (11, 1)]
  windows = list(opened.windows(iter(plan)))
  assert len(windows) == len(plan)
  for (first, count), (resident, rows) in zip(plan, windows):
    assert (resident is None) == (not limit)
    for i in range(count):
      batch = feed.take(resident, jax.tree.map(lambda x: x[i], rows), sharding)
      wanted = jax.tree.map(lambda x: x[ids[first + i]], examples.tree)
      jax.tree.map(np.testing.assert_array_equal, batch, wanted)
      assert batch["pair"][0].sharding.is_equivalent_to(sharding, 3)


def test_windows_after_a_new_order_have_other_examples():
  examples, sharding = dataset(), batched(1)
  opened = feed.Feed(examples, lambda step: np.full(4, step), sharding)
  opened.reorder(lambda step: np.full(4, step + 1))
  [(_, rows)] = opened.windows([(3, 2)])
  np.testing.assert_array_equal(rows, [[4] * 4, [5] * 4])


@pytest.mark.parametrize("end", ["close", "reorder"])
def test_a_stream_is_not_ended_under_a_read(end, monkeypatch):
  """Grain would leave the reading thread, and with it the run, to wait for ever."""
  reading, ended_under = threading.Event(), []

  class SlowStream:
    def __init__(self, *args):
      del args

    def take(self, step, count):
      reading.set()
      time.sleep(0.3 * (step > 0))
      reading.clear()
      return np.zeros((count, 4))

    def close(self):
      ended_under.append(reading.is_set())

  monkeypatch.setattr(feed.stream, "Stream", SlowStream)
  opened = feed.Feed(Squares(), lambda step: np.arange(4), batched(1))
  windows = opened.windows((step, 1) for step in range(9))
  next(windows)
  assert reading.wait(10)
  opened.close() if end == "close" else opened.reorder(lambda step: np.arange(4))
  assert ended_under == [False]
  windows.close()
  assert len(list(opened.windows([(0, 1), (1, 1)]))) == 2


@dataclasses.dataclass(frozen=True)
class Squares:
  """A streamed dataset of other things than images."""

  workers: int = 0
  read_ahead: int = 4
  spec = {"x": (jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((2,), np.int32))}

  def __len__(self):
    return 30

  def arrays(self):
    return None

  def read(self, i, rng):
    return {"x": (np.float32(i * i), np.array([i, rng.integers(1 << 30)]))}


def test_any_tree_can_be_streamed():
  ordered, sharding = order.Order(seed=1, num_examples=30, batch_size=4), batched(2)
  opened = feed.Feed(Squares(), ordered, sharding, seed=6)
  assert feed.fitting(Squares(), 16, 4) == 16
  windows = list(opened.windows([(5, 2), (7, 1)]))
  opened.close()
  steps = [(window, i) for _, window in windows for i in range(len(window["x"][0]))]
  for step, (window, i) in zip((5, 6, 7), steps, strict=True):
    ids = order.train_indices(1, ordered.epoch_of(step), 30, 4)[step % 7]
    squares, drawn = (np.asarray(x[i]) for x in window["x"])
    np.testing.assert_array_equal(squares, ids.astype(np.float32) ** 2)
    rngs = [order.crop_rng(6, 1 + step // 7, int(k)) for k in ids]
    numbers = [rng.integers(1 << 30) for rng in rngs]
    np.testing.assert_array_equal(drawn, np.array([ids, numbers]).T.astype(drawn.dtype))


def test_a_stream_of_a_few_steps_ends_with_them():
  ids = np.arange(8).reshape(2, 4)
  opened = feed.Feed(Squares(), ids.__getitem__, batched(1))
  for _ in range(2):
    [(_, window)] = opened.windows([(0, 2)])
    np.testing.assert_array_equal(window["x"][0], (ids**2).astype(np.float32))
    opened.close()


def batched(devices, model=1):
  grid = np.array(jax.devices()[:devices]).reshape(-1, model)
  mesh = Mesh(grid, ("data", "model"))
  return NamedSharding(mesh, PartitionSpec("data"))


def test_large_windows_are_made_shorter(monkeypatch):
  images = Arrays({"image": np.broadcast_to(np.uint8(0), (50, 64, 64, 3))})  # 12 KiB each
  monkeypatch.setattr(feed, "DEVICE_BYTES", 0)
  monkeypatch.setattr(feed, "WINDOW_BYTES", 5 * 10 * 12288)
  assert (feed.fitting(images, 16, 10), feed.fitting(images, 2, 10)) == (5, 2)
  monkeypatch.setattr(feed, "WINDOW_BYTES", 1)
  assert feed.fitting(images, 16, 10) == 1


@pytest.mark.parametrize("arranged", ["as they are", "interleaved"])
def test_processes_share_a_batch_between_them(arranged):
  """Eight devices of two processes; each decodes its rows, and together they have the batch."""
  devices = np.array(jax.devices())
  if arranged == "interleaved":  # a mesh that no process has a contiguous part of
    devices = devices.reshape(2, 4).T.ravel()
  mesh = Mesh(devices, ("data",))
  sharding = NamedSharding(mesh, PartitionSpec("data"))
  whole = np.random.default_rng(0).integers(0, 256, (16, 3))
  found = {}
  for process in (0, 1):
    own = jax.devices()[4 * process : 4 * process + 4]
    rows = feed.local_rows(sharding, 16, own)
    assert len(rows) == 8 and (np.diff(rows) > 0).all()
    found |= {int(row): whole[row] for row in rows}
    for device in own:  # JAX cuts what a process has into what its devices need
      (needed, *_) = sharding.devices_indices_map((16, 3))[device]
      assert set(np.arange(16)[needed]) <= set(rows)
  np.testing.assert_array_equal([found[row] for row in range(16)], whole)
  expected = np.arange(8) if arranged == "as they are" else [0, 1, 4, 5, 8, 9, 12, 13]
  np.testing.assert_array_equal(feed.local_rows(sharding, 16, jax.devices()[:4]), expected)


def test_rows_are_decoded_once_where_devices_share_them():
  sharding = batched(8, model=4)
  np.testing.assert_array_equal(feed.local_rows(sharding, 6, jax.devices()[:4]), [0, 1, 2])
  np.testing.assert_array_equal(feed.local_rows(sharding, 6), np.arange(6))
