"""The mesh of devices and where arrays live on it.

The batch is split over all devices. Parameters and what an optimizer keeps of
them are whole on every device along the axis "data" and split along "model"
(fully sharded data parallelism: Rajbhandari et al., 2020,
https://arxiv.org/abs/1910.02054).
"""

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import ml_collections
import numpy as np

from mixer_jax.errors import UserError

AXES = ("data", "model")
# Smaller arrays stay whole: to gather one would cost more than it saves.
_SPLIT_FROM = 1 << 12


def make_mesh(config: ml_collections.ConfigDict) -> Mesh:
  """A mesh of `config.mesh.data` x `config.mesh.model` devices (data -1: all that are left).

  Raises:
    UserError: other devices than there are, or a batch they do not divide.
  """
  shape = mesh_shape(config)
  size = math.prod(shape)
  for field in ("batch_size", "eval_batch_size"):
    parts = size * (config.accum_steps if field == "batch_size" else 1)
    if config[field] < 1 or config[field] % parts:
      raise UserError(
        f"{field} is {config[field]}; it must be a positive multiple of {parts}"
        f" ({size} devices x {parts // size} accumulation steps)"
      )
  # Automatic axes: kfac-jax's contractions are refused under explicit ones.
  return jax.make_mesh(shape, AXES, (AxisType.Auto,) * 2, devices=jax.devices()[:size])


def mesh_shape(config: ml_collections.ConfigDict) -> tuple[int, int]:
  """Devices along "data" and "model" (see `make_mesh`)."""
  data, model = config.mesh.data, config.mesh.model
  available = jax.device_count()
  if not 1 <= model <= available:
    raise UserError(f"mesh.model is {model}; allowed: 1 to {available} devices")
  most = available // model
  if data == -1 and available % model == 0:
    return most, model
  if not 1 <= data <= most:
    rest = f" of {model} (mesh.model) each" if model > 1 else ""
    every = "" if available % model else "-1 for all, or "
    raise UserError(f"mesh.data is {data}; allowed: {every}1 to {most} devices{rest}")
  if data * model != available and jax.process_count() > 1:
    raise UserError(
      f"mesh.data x mesh.model is {data} x {model}; several processes use all {available} devices"
    )
  return data, model


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batched(mesh: Mesh) -> NamedSharding:
  """The first axis split over all devices."""
  return NamedSharding(mesh, PartitionSpec(AXES))


def stored(mesh: Mesh, tree: Any) -> Any:
  """Where the arrays of a train state are between steps.

  Args:
    mesh: the devices.
    tree: arrays or their shapes.

  Returns:
    A sharding for each: the longest axis that `mesh`'s "model" devices divide is
    split over them; a small array, or one without such an axis, is whole
    everywhere.
  """
  parts = mesh.shape["model"]

  def rule(x):
    axes = [i for i, size in enumerate(x.shape) if size % parts == 0]
    if parts == 1 or x.size < _SPLIT_FROM or not axes:
      return replicated(mesh)
    longest = max(axes, key=lambda i: x.shape[i])
    spec = [None] * x.ndim
    spec[longest] = "model"
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree.map(rule, tree)


def gathered(mesh: Mesh, tree: Any) -> Any:
  """The whole of `stored` arrays on every device (traceable)."""
  if mesh.shape["model"] == 1:
    return tree
  return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def place(tree: Any, sharding: NamedSharding) -> Any:
  """Puts arrays, which all processes have alike, on the devices of a sharding."""
  if sharding.is_fully_addressable:
    return jax.device_put(tree, sharding)
  return jax.tree.map(
    lambda x: jax.make_array_from_callback(np.shape(x), sharding, np.asarray(x).__getitem__), tree
  )
