"""A config made real: mesh, data, model, task, schedule and optimizer."""

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from mixer_jax import check, data, models, optim, sharding, tasks
from mixer_jax.data import augment
from mixer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What training, evaluation and benchmarks of one config share.

  Attributes:
    config: see `mixer_jax.config`.
    mesh: the devices.
    dataset: train and test images.
    task: the model with its loss and metrics.
  """

  config: ml_collections.ConfigDict
  mesh: jax.sharding.Mesh
  dataset: data.Dataset
  task: tasks.Classification

  @functools.cached_property
  def steps_per_epoch(self) -> int:
    return len(self.dataset.train) // self.config.batch_size

  @functools.cached_property
  def multiplier(self) -> optim.schedules.Schedule:
    """The schedule of the learning rate, a function of the update count."""
    config = self.config
    return optim.schedules.build(config.schedule, self.steps_per_epoch, config.num_epochs)

  @functools.cached_property
  def param_shapes(self) -> Any:
    return jax.eval_shape(self.task.init, jax.random.key(0))

  @functools.cached_property
  def problem(self) -> optim.Problem:
    """What K-FAC is told about the task; it has to see each layer apart, where loops hide them."""
    images = self.dataset.train.images
    size = (self.config.batch_size,)
    batch = jax.eval_shape(
      functools.partial(self.task.batch, train=True),
      jax.random.key(0),
      jax.ShapeDtypeStruct(size + images.shape[1:], images.dtype),
      jax.ShapeDtypeStruct(size, jnp.int32),
    )
    model, shapes, layout = self.task.model, self.param_shapes, None
    task = dataclasses.replace(self.task, model=model.clone(scan_blocks=False, remat=False))
    if model.scan_blocks:
      shapes = jax.eval_shape(models.unrolled, shapes)
      layout = optim.Layout(models.unrolled, models.stacked)
    return optim.Problem(task.predict, shapes, batch, task.likelihood, layout, self.mesh)

  @functools.cached_property
  def tx(self) -> optax.GradientTransformationExtraArgs:
    """The optimizer."""
    return optim.build(self.config.optimizer, self.multiplier, self.problem)


def build(config: ml_collections.ConfigDict) -> Experiment:
  """Loads the data and builds the model that a config describes.

  Raises:
    UserError: a field of the config, or the data, is not usable.
  """
  check.check(config)
  if config.require_accelerator and jax.devices()[0].platform == "cpu":
    raise UserError("require_accelerator is True, but JAX finds only a CPU")
  mesh = sharding.make_mesh(config)
  images = _image_spec(config)
  _check_model(build_model(config.model, 1), config.model.name, images)
  dataset = data.load(config.data)
  if config.batch_size > len(dataset.train):
    raise UserError(
      f"batch_size is {config.batch_size}, more than the {len(dataset.train)}"
      f" training images of {dataset.name}"
    )
  augment.check(images, dataset.train.images.shape)
  model = build_model(config.model, dataset.num_classes)
  run = Experiment(config, mesh, dataset, tasks.Classification(model, images))
  if (steps := run.steps_per_epoch * config.num_epochs) >= 2**31:
    raise UserError(f"num_epochs is {config.num_epochs}, {steps} steps; allowed: below 2^31 steps")
  return run


def build_model(config: ml_collections.ConfigDict, num_classes: int) -> Any:
  """The Linen module that `config.model` describes."""
  overrides = {k: v for k, v in config.items() if k != "name" and v is not None}
  return models.build(config.name, num_classes, **overrides)


def _check_model(model: Any, name: str, images: augment.ImageSpec) -> None:
  """Refuses a bad model before data are read or downloaded."""
  try:
    shapes = jax.eval_shape(tasks.Classification(model, images).init, jax.random.key(0))
  except ValueError as e:
    raise UserError(f"model {name}: {e}") from e
  size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
  if size > (memory := _memory()):
    raise UserError(
      f"model {name}: its parameters take {size / 2**30:,.1f} GiB, more than the {memory / 2**30:,.1f}"
      " GiB of the device; check the fields of the model and data.image_size"
    )


def _memory() -> float:
  """Bytes of a device's memory, as far as it says; of a CPU the machine's."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if limit := stats.get("bytes_limit"):
    return limit
  if jax.devices()[0].platform == "cpu" and hasattr(os, "sysconf"):
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return math.inf


def _image_spec(config: ml_collections.ConfigDict) -> augment.ImageSpec:
  fields = ("image_size", "resize", "pad", "flip", "random_crop")
  values = {f: config.data[f] for f in fields}
  if config.data.get("crop"):  # the workers hand over images of the right size
    values |= dict(resize=0, pad=0)
  statistics = {f: tuple(config.data[f]) for f in ("mean", "std")}
  return augment.ImageSpec(**values, **statistics)
