"""The mesh of devices and where arrays live on it.

The batch is split over all devices. Parameters and the state of the optimizer are whole on
every device along the axis "data" and split along "model" (fully sharded data parallelism:
Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054).
"""

import dataclasses
from typing import Annotated, Any, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import ml_collections
import numpy as np

from mixer_jax.errors import UserError
from mixer_jax.options import Option

AXES = ("data", "model")
# Smaller arrays stay whole: to gather one would cost more than it saves.
_SPLIT_FROM = 1 << 12


@dataclasses.dataclass(frozen=True)
class Devices:
  """The devices of a run, data x model: the batch is split over all of them."""

  data: Annotated[int, Option("devices of this axis; -1: all left", -1, free=True)] = -1
  model: Annotated[int, Option("devices that share parameters and state", 1, free=True)] = 1


def make_mesh(
  config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """A mesh of `config.mesh.data` x `config.mesh.model` devices; a UserError if there are too few.

  `devices` are those that it may take; None: all that JAX has.
  """
  devices = jax.devices() if devices is None else devices
  data, model, available = config.mesh.data, config.mesh.model, len(devices)
  if model > available:
    raise UserError(f"mesh.model is {model}; allowed: 1 to {available} devices")
  most, rest = divmod(available, model)
  if data == -1 and not rest:
    data = most
  if not 1 <= data <= most:
    each = f" of {model} (mesh.model) each" if model > 1 else ""
    every = "" if rest else "-1 for all, or "
    raise UserError(f"mesh.data is {data}; allowed: {every}1 to {most} devices{each}")
  if data * model != available and jax.process_count() > 1:
    shape = f"mesh.data x mesh.model is {data} x {model}"
    raise UserError(f"{shape}; several processes use all {available} devices")
  # Automatic axes: kfac-jax's contractions are refused under explicit ones.
  return jax.make_mesh((data, model), AXES, (AxisType.Auto,) * 2, devices=devices[: data * model])


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batched(mesh: Mesh) -> NamedSharding:
  """The first axis split over all devices."""
  return NamedSharding(mesh, PartitionSpec(AXES))


def stored(mesh: Mesh, tree: Any) -> Any:
  """The sharding of each array, or shape, of a train state between steps.

  The longest axis that the "model" devices divide is split over them; a small array, or one
  without such an axis, is whole everywhere.
  """
  parts = mesh.shape["model"]

  def rule(x):
    axes = [i for i, size in enumerate(x.shape) if size % parts == 0]
    if parts == 1 or x.size < _SPLIT_FROM or not axes:
      return replicated(mesh)
    longest = max(axes, key=lambda i: x.shape[i])
    spec = ("model" if i == longest else None for i in range(x.ndim))
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree.map(rule, tree)


def gathered(mesh: Mesh, tree: Any) -> Any:
  """The whole of `stored` arrays on every device (traceable)."""
  whole = mesh.shape["model"] == 1
  return tree if whole else jax.lax.with_sharding_constraint(tree, replicated(mesh))


def of_process(tree: Any) -> tuple[Any, Mesh]:
  """Arrays, whole, on the devices that this process has of their mesh, and the mesh of these.

  For work that each process does alone. Arrays of the host get one device.
  """
  placed = [x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
  whole = next((replicated(x.mesh) for x in placed if isinstance(x, NamedSharding)), None)
  if whole is None:
    own = Mesh(np.array(jax.local_devices()[:1])[:, None], AXES)
    return jax.device_put(tree, replicated(own)), own
  own = Mesh(np.array(whole.mesh.local_devices)[:, None], AXES)

  def part(x):
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, replicated(own), parts)

  return jax.tree.map(part, jax.device_put(tree, whole)), own


def place(tree: Any, sharding: NamedSharding) -> Any:
  """Puts arrays, which all processes have alike, on the devices of a sharding."""
  if sharding.is_fully_addressable:
    return jax.device_put(tree, sharding)
  make = jax.make_array_from_callback
  return jax.tree.map(lambda x: make(np.shape(x), sharding, np.asarray(x).__getitem__), tree)
