"""The order of examples and their windows."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from mixer_jax.data import batches
from mixer_jax.data.sources import Split


def test_order_is_a_function_of_seed_and_epoch():
  order = lambda seed, epoch: batches.epoch_order(seed, epoch, 100)
  np.testing.assert_array_equal(order(3, 5), order(3, 5))
  np.testing.assert_array_equal(np.sort(order(3, 5)), np.arange(100))
  assert not np.array_equal(order(3, 5), order(3, 6))
  assert not np.array_equal(order(3, 5), order(4, 5))


def test_no_example_comes_twice_in_an_epoch():
  ids = batches.train_indices(0, 1, 103, 10)
  assert ids.shape == (10, 10)
  assert len(np.unique(ids)) == 100


@pytest.mark.parametrize("size, batch_size", [(10, 4), (8, 4), (3, 4), (1, 1)])
def test_each_test_example_is_counted_once(size, batch_size):
  ids, mask = batches.test_indices(size, batch_size)
  np.testing.assert_array_equal(ids[mask], np.arange(size))


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["gathered", "resident"])
@pytest.mark.parametrize("devices", [1, 5])
def test_windows_hold_the_examples_asked_for(limit, devices, monkeypatch):
  monkeypatch.setattr(batches, "DEVICE_BYTES", limit)
  rng = np.random.default_rng(0)
  split = Split(rng.integers(0, 256, (50, 4, 4, 3), dtype=np.uint8), np.arange(50, dtype=np.int32))
  ids = {epoch: rng.integers(0, 50, (6, 5)).astype(np.int32) for epoch in (1, 2)}
  sharding = batched(devices)
  feed = batches.Feed(split, ids.__getitem__, sharding)
  windows = list(feed.windows(2, batches=2, begun=2))
  assert len(windows) == 2
  for row, (examples, rows) in zip(ids[2][2:].reshape(2, 2, 5), windows):
    assert (examples is None) == (not limit)
    for i in range(2):
      images, labels = batches.take(examples, jax.tree.map(lambda x: x[i], rows), sharding)
      np.testing.assert_array_equal(images, split.images[row[i]])
      np.testing.assert_array_equal(labels, row[i])
      assert images.sharding.is_equivalent_to(sharding, 4)


def batched(devices, model=1):
  grid = np.array(jax.devices()[:devices]).reshape(-1, model)
  mesh = Mesh(grid, ("data", "model"))
  return NamedSharding(mesh, PartitionSpec("data"))


def test_large_windows_are_made_shorter():
  images = np.broadcast_to(np.uint8(0), (50, 64, 64, 3))  # 12 KiB each, 600 KiB
  split = Split(images, np.zeros(50, np.int32))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(batches, "DEVICE_BYTES", 0)
    patch.setattr(batches, "WINDOW_BYTES", 5 * 10 * 12288)
    feed = batches.Feed(split, lambda _: np.zeros((8, 10), int), batched(1))
    assert (feed.fitting(16), feed.fitting(2)) == (5, 2)
    patch.setattr(batches, "WINDOW_BYTES", 1)
    assert feed.fitting(16) == 1


@pytest.mark.parametrize("order", ["as they are", "interleaved"])
def test_processes_share_a_batch_between_them(order):
  """Eight devices of two processes; each decodes its rows, and together they have the batch."""
  devices = np.array(jax.devices())
  if order == "interleaved":  # a mesh that no process has a contiguous part of
    devices = devices.reshape(2, 4).T.ravel()
  mesh = Mesh(devices, ("data",))
  sharding = NamedSharding(mesh, PartitionSpec("data"))
  whole = np.random.default_rng(0).integers(0, 256, (16, 3))
  found = {}
  for process in (0, 1):
    own = jax.devices()[4 * process : 4 * process + 4]
    rows = batches.local_rows(sharding, 16, own)
    assert len(rows) == 8 and (np.diff(rows) > 0).all()
    found |= {int(row): whole[row] for row in rows}
    for device in own:  # JAX cuts what a process has into what its devices need
      (needed, *_) = sharding.devices_indices_map((16, 3))[device]
      assert set(np.arange(16)[needed]) <= set(rows)
  np.testing.assert_array_equal([found[row] for row in range(16)], whole)
  expected = np.arange(8) if order == "as they are" else [0, 1, 4, 5, 8, 9, 12, 13]
  np.testing.assert_array_equal(batches.local_rows(sharding, 16, jax.devices()[:4]), expected)


def test_rows_are_decoded_once_where_devices_share_them():
  sharding = batched(8, model=4)
  np.testing.assert_array_equal(batches.local_rows(sharding, 6, jax.devices()[:4]), [0, 1, 2])
  np.testing.assert_array_equal(batches.local_rows(sharding, 6), np.arange(6))
