"""The order of examples and their windows."""

import jax
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


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["streamed", "resident"])
def test_windows_hold_the_examples_asked_for(limit, monkeypatch):
  monkeypatch.setattr(batches, "DEVICE_BYTES", limit)
  rng = np.random.default_rng(0)
  split = Split(rng.integers(0, 256, (50, 4, 4, 3), dtype=np.uint8), np.arange(50, dtype=np.int32))
  feed = batches.Feed(split, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
  assert feed.on_device == bool(limit)
  indices = rng.integers(0, 50, (6, 5)).astype(np.int32)
  shapes = set()
  for row, (images, labels, ids) in zip(indices.reshape(3, 2, 5), feed.windows(indices, 2)):
    np.testing.assert_array_equal(images[ids], split.images[row])
    np.testing.assert_array_equal(labels[ids], row)
    shapes.add(images.shape)
  assert len(shapes) == 1
