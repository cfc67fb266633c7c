"""Arrays of a mesh on the devices of one process."""

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from mixer_jax.runtime import mesh as mesh_lib


@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
def test_a_process_has_whole_arrays_on_its_devices(shape):
  devices = jax.devices()[2:6]
  mesh = jax.make_mesh(shape, mesh_lib.AXES, (AxisType.Auto,) * 2, devices=devices)
  tree = {"large": np.arange(2**14, dtype=np.float32).reshape(128, 128), "small": np.ones(3)}
  placed = jax.device_put(tree, mesh_lib.stored(mesh, tree))
  found, own = mesh_lib.of_process(placed)
  assert own.size == 4 and set(own.devices.flat) == set(devices) and own.shape["model"] == 1
  for name, x in found.items():
    assert x.sharding == NamedSharding(own, PartitionSpec())
    assert [part.data.shape for part in x.addressable_shards] == [tree[name].shape] * 4
    np.testing.assert_array_equal(x, tree[name])


def test_arrays_of_the_host_get_one_device():
  found, own = mesh_lib.of_process({"a": np.ones(3)})
  assert own.size == 1 and found["a"].devices() == set(own.devices.flat)
