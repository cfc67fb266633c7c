"""The mesh of devices and where arrays live on it."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import ml_collections
import numpy as np

from mixer_jax.errors import UserError


def make_mesh(config: ml_collections.ConfigDict) -> Mesh:
  """A mesh with the axis "data" over `config.mesh.data` devices (-1: all).

  Raises:
    UserError: more devices than there are, or a batch they do not divide.
  """
  available = jax.device_count()
  size = available if config.mesh.data == -1 else config.mesh.data
  if not 1 <= size <= available:
    raise UserError(
      f"mesh.data is {config.mesh.data}; allowed: -1 for all, or 1 to {available} devices"
    )
  for field in ("batch_size", "eval_batch_size"):
    parts = size * (config.accum_steps if field == "batch_size" else 1)
    if config[field] < 1 or config[field] % parts:
      raise UserError(
        f"{field} is {config[field]}; it must be a positive multiple of {parts}"
        f" ({size} devices x {parts // size} accumulation steps)"
      )
  # Automatic axes: kfac-jax's contractions are refused under explicit ones.
  devices = np.array(jax.devices()[:size])
  return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batched(mesh: Mesh) -> NamedSharding:
  """The first axis split over the devices."""
  return NamedSharding(mesh, PartitionSpec("data"))
