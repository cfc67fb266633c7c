"""A config made real: mesh, task, data, clock and optimizer."""

import copy
import dataclasses
import functools
import os
from typing import Any, Callable, Mapping, Sequence

from flax import traverse_util
import jax
import ml_collections
import numpy as np
import optax

from mixer_jax import config as config_lib
from mixer_jax import models, optimizers, options, tasks
from mixer_jax.data import buckets
from mixer_jax.data.dataset import Dataset
from mixer_jax.data.order import Order
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.runtime import draws, precision
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.tasks import freeze, labels


@dataclasses.dataclass(frozen=True)
class Clock:
  """When things happen, in optimizer steps; the last one is always evaluated and saved."""

  steps_per_epoch: int
  num_steps: int
  eval_every: int
  checkpoint_every: int

  def evaluates(self, step: int) -> bool:
    return step % self.eval_every == 0 or step == self.num_steps

  def saves(self, step: int) -> bool:
    return step % self.checkpoint_every == 0 or step == self.num_steps

  def epoch(self, step: int) -> float:
    return round(step / self.steps_per_epoch, 6)


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The parts of a run that training, evaluation and benchmarks share."""

  config: ml_collections.ConfigDict
  mesh: jax.sharding.Mesh
  task: tasks.Task
  datasets: Mapping[str, Dataset]  # the splits by name, "train" and "test" among them

  @property
  def selection(self) -> str:
    """The split that picks the best checkpoint."""
    return "validation" if "validation" in self.datasets else "test"

  @functools.cached_property
  def order(self) -> Order | buckets.BucketOrder:
    """The order of the training examples, before any restore."""
    config, train = self.config, self.datasets["train"]
    task = self.task
    how = (config.seed, config.batch_size, task.repeats, task.sampled_labels())
    return buckets.order_of(train, *how)

  @functools.cached_property
  def clock(self) -> Clock:
    config, epoch = self.config, self.order.steps_per_epoch
    steps = lambda n: config[f"{n}_steps"] or max(1, round(config[f"{n}_epochs"] * epoch))
    return Clock(epoch, steps("num"), steps("eval"), steps("checkpoint"))

  @functools.cached_property
  def multiplier(self) -> optimizers.Schedule:
    """The schedule of the learning rate, a function of the update count."""
    length = self.clock.num_steps, self.clock.steps_per_epoch
    self._schedule.check_warmup(*length)
    return self._schedule.build(*length)

  @property
  def _schedule(self) -> optimizers.Multiplier:
    return options.made(optimizers.Multiplier, self.config.schedule)

  @functools.cached_property
  def variable_shapes(self) -> dict[str, Any]:
    """Shapes of the task's variables, without the averaged parameters."""
    shapes = jax.eval_shape(self.task.init, draws.key(0))
    if not isinstance(shapes, Mapping) or "params" not in shapes:
      found = list(shapes) if isinstance(shapes, Mapping) else type(shapes).__name__
      allowed = "a mapping of collections, 'params' among them"
      raise UserError(f"task {self.config.task}: init gives {found}; allowed: {allowed}")
    return dict(shapes)

  @functools.cached_property
  def loss_shapes(self) -> Any:
    """Shapes of the task's loss and its `Aux`, for a training batch."""
    return jax.eval_shape(self.task.loss, self.variable_shapes, self.batch_shapes, draws.key(0))

  @functools.cached_property
  def batch_shapes(self) -> Any:
    """Shapes of a training batch; of several kinds the longest."""
    order = self.order
    batched = lambda x: jax.ShapeDtypeStruct((order.batch_size, *x.shape), x.dtype)
    examples = jax.tree.map(batched, self.datasets["train"].spec)
    prepare = lambda key, examples: self.task.prepare(key, order.cut(examples), train=True)
    return jax.eval_shape(prepare, draws.key(0), examples)

  @functools.cached_property
  def problem(self) -> optimizers.Problem:
    """The task as K-FAC sees it; its batch is a pair of a batch and the other collections."""
    predict = self.task.curvature_view()
    collections = dict(self.variable_shapes)
    shapes = collections.pop("params")

    def prediction(params, batch):
      batch, collections = batch
      return predict({"params": params, **collections}, batch)

    parts = (prediction, shapes, (self.batch_shapes, collections), self.task.likelihood)
    return optimizers.Problem(*parts, in_axes=(0, None), mesh=self.mesh)

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformationExtraArgs:
    """The optimizer, whose state has learning rates and dampings (see `optimizers.numbers`)."""
    config, decay = self.config.optimizer, self._schedule.decay(self.clock.num_steps)
    return optimizers.build(config, self.multiplier, self.problem, self.task.decayed, decay)

  @functools.cached_property
  def update_scales(self) -> Any:
    """Factors of the updates of all parameters, `config.layer_decay` to the power of their depth.

    A tree like "params" of arrays that broadcast to them; a UserError if their layers have no order.
    """
    flat = lambda tree: traverse_util.flatten_dict(dict(tree), sep="/")
    params = flat(freeze.joined(self.variable_shapes)["params"])
    decay = self.config.layer_decay
    with as_user_error(f"layer_decay is {decay}, but of task {self.config.task}", ValueError):
      depths = models.depths({path: x.shape for path, x in params.items()})
    own = flat(self.variable_shapes["params"])
    scales = {path: np.float32(decay ** depths[path]) for path in own}
    return traverse_util.unflatten_dict(scales, sep="/")


def build(config: ml_collections.ConfigDict) -> Experiment:
  """Loads the data and builds the task of a config; a UserError if either is not usable.

  The experiment has a copy of the config.
  """
  config_lib.check(config)
  return make(config)


def make(
  config: ml_collections.ConfigDict,
  notes: Mapping[str, Any] | None = None,
  devices: Sequence[jax.Device] | None = None,
  datasets: Callable[[tasks.Task], Mapping[str, Dataset]] = lambda task: task.datasets(),
) -> Experiment:
  """As `build`, of a config that has been checked.

  Args:
    config: of the run.
    notes: those of a finished run's record, which the task recalls. Such a run is not trained: its
      training set may be any.
    devices: of the mesh; None: all that JAX has.
    datasets: takes the task and gives the splits by name.
  """
  config = copy.deepcopy(config)
  precision.take(config)
  if devices is None:
    check_accelerator(config)
  mesh = mesh_lib.make_mesh(config, devices)
  task = tasks.find(config.task)(config)
  if notes:
    task.recall(notes)
  task = freeze.frozen(task, config.freeze)
  found = dict(datasets(task))
  for name in {"train": 0, "test": 0} | found:
    if not len(found.get(name, ())):
      raise UserError(f"task {config.task} gives no example of the split {name!r}")
  run = Experiment(config, mesh, task, found)
  if notes is None:
    _check_batch(run)
  name = config.model.name if "model" in config and "name" in config.model else config.task
  with as_user_error(f"model {name}", ValueError):  # a Linen module's own check
    shapes = run.variable_shapes
  for split, dataset in found.items():
    labels.check(task, split, dataset, shapes)
  _check_trained(run)
  return run


def check_accelerator(config: ml_collections.ConfigDict) -> None:
  """Raises a UserError for a device that the config does not allow."""
  platform = jax.devices()[0].platform
  if config.require_accelerator and platform == "cpu":
    raise UserError("require_accelerator is True, but JAX finds only a CPU")
  name = "--xla_gpu_deterministic_ops"
  given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith(name)]
  if config.deterministic and platform == "gpu" and given[-1:] != [f"{name}=true"]:
    raise UserError(f"deterministic is True, but the environment's XLA_FLAGS lack {name}=true")


def _check_batch(run: Experiment) -> None:
  """Raises a UserError for a batch that devices or training examples cannot make."""
  size, number = run.config.batch_size, len(run.datasets["train"])
  (data, model), steps = run.mesh.devices.shape, run.config.accum_steps
  if size % (data * model * steps):
    fewer = [n for n in range(1, data) if size % (n * model * steps) == 0]
    raise UserError(
      f"batch_size is {size}; it must be a positive multiple of {data * model * steps}"
      f" ({data * model} devices x {steps} accumulation steps)"
      + (f", or mesh.data={fewer[-1]} takes fewer devices" if fewer else "")
    )
  if size > number:
    raise UserError(f"batch_size is {size}, more than the {number} training examples")
  _ = run.order  # tells a batch of too few tokens


def _check_trained(run: Experiment) -> None:
  """Raises a UserError for `layer_decay` or `freeze` that the optimizer cannot do with."""
  decay, optimizer = run.config.layer_decay, run.config.optimizer
  if decay != 1 and run.update_scales and optimizers.makes_whole_steps(optimizer):
    raise UserError(f"layer_decay is {decay}; the optimizer reckons with whole updates: allowed: 1")
  parts = (run.variable_shapes.get(freeze.FROZEN, {}), run.variable_shapes["params"])
  layers = [{path[:-1] for path in traverse_util.flatten_dict(dict(part))} for part in parts]
  by_kfac = any(side.name.startswith("kfac") for side in optimizers.leaves(optimizer))
  if by_kfac and (split := sorted(layers[0] & layers[1])):
    why = f"parts {'/'.join(split[0])}; K-FAC takes a layer as a whole"
    raise UserError(f"freeze is {run.config.freeze!r}, which {why}")
