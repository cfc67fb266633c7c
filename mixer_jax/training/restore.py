"""A run with the variables of one of its checkpoints, on the devices that there are now."""

import functools
import os
import pathlib
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mixer_jax import config as config_lib
from mixer_jax import experiment, tasks
from mixer_jax.errors import UserError, check_list
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.rundir import provenance
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.runtime import precision
from mixer_jax.training import resume, session
from mixer_jax.training.checkpoint import Checkpoints
from mixer_jax.training.state import averages, evaluation_variables


class Restored(NamedTuple):
  """A run and its variables after a step; averaged ones if the run evaluates those."""

  run: experiment.Experiment
  variables: dict[str, Any]
  step: int

  @property
  def place(self) -> str:
    """The step and, if the training set that is here has epochs, the epoch, in words."""
    epochs = self.run.order.steps_per_epoch
    return f"step {self.step}" + (f" (epoch {self.run.clock.epoch(self.step):g})" if epochs else "")


def restore(
  path: str,
  which: str | int = "latest",
  data_dir: str | None = None,
  overrides: Sequence[str] | str = (),
  **data: str | None,
) -> Restored:
  """Restores a checkpoint of a run, with its data, whatever devices wrote it.

  Args:
    path: the directory of the run.
    which: "latest", "best", a step, or "mean:5": the latest with the mean of the variables of the five
      latest, as in "Attention is all you need" (Vaswani et al., 2017, Section 6.1); integers stay.
    data_dir: where the data are now, in the place of the config's `data.dir`.
    overrides: "field=value" of fields on which training does not depend.
    **data: further fields of `data` that replace the config's, unless they are None.

  Raises:
    UserError: no run, no such checkpoint, no data, other classes, or a field that cannot be changed.
  """
  directory, config = _opened(path, overrides, dir=data_dir, **data)
  # The machine that trained the run need not be the one that evaluates it.
  config.update(require_accelerator=False, deterministic=False, accum_steps=1)
  mesh, available = config.mesh, jax.device_count()
  if mesh.data * mesh.model > available or (mesh.data == -1 and available % mesh.model):
    mesh.update(data=-1, model=1)
  saved = Checkpoints(directory, read_only=True)
  _steps(saved, which, config.keep_checkpoints)  # a missing one is told before data are read
  run = experiment.make(config, provenance.notes(directory))
  session.check_classes(directory, run.task.class_names)
  averaged = averages(run.variable_shapes) if config.ema_decay else {}
  expected, where = run.variable_shapes | averaged, mesh_lib.replicated(run.mesh)
  step, variables = _variables(saved, which, config.keep_checkpoints, where, expected)
  return Restored(run, variables, step)


def change_data(config: ConfigDict, **data: Any) -> None:
  """Sets fields of the config's data; None leaves a field as it is."""
  path_as_text = lambda v: os.fspath(v) if isinstance(v, os.PathLike) else v
  own = {k: path_as_text(v) for k, v in data.items() if v is not None}
  if own and "data" not in config:
    raise UserError(f"task {config.task} has no group data, and so no data.{min(own)}")
  if own:
    config.data.update(own)


def _opened(
  path: str, overrides: Sequence[str] | str, **data: str | None
) -> tuple[pathlib.Path, ConfigDict]:
  """The directory of a run and its config, changed as `restore` says and checked."""
  directory = directory_lib.existing(path)
  config = config_lib.of_run(directory)
  directory_lib.check_place(directory / directory_lib.CONFIG)
  change_data(config, **data)
  free = config_lib.free_fields(config)
  overrides = [overrides] if isinstance(overrides, str) and overrides else overrides
  for assignment in overrides:
    if assignment.partition("=")[0] not in free:
      raise UserError(f"--set is {assignment!r}; allowed: {', '.join(sorted(free))}")
  config_lib.check(config_lib.override(config, overrides))
  resume.check_files(directory, config)
  session.warn_of_changes(directory, tasks.find(config.task))
  return directory, config


def stored(path: str, which: str | int = "latest") -> tuple[ConfigDict, dict[str, Any]]:
  """The config and the variables of a checkpoint (see `restore`), on the host."""
  directory = directory_lib.existing(path)
  config = config_lib.of_run(directory)
  directory_lib.check_place(directory / directory_lib.CONFIG)
  return config, _on_host(directory, config, which)


def _on_host(directory: pathlib.Path, config: ConfigDict, which: str | int) -> dict[str, Any]:
  precision.take(config)
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  saved = Checkpoints(directory, read_only=True)
  _, variables = _variables(saved, which, config.keep_checkpoints, device)
  return jax.device_get(variables)


def _steps(saved: Checkpoints, which: str | int, keep: int) -> list[str]:
  """The checkpoints whose variables are averaged."""
  which = str(which)
  if which.startswith("mean:"):
    return [str(step) for step in saved.latest_steps(which.removeprefix("mean:"), keep)]
  saved.find(which)
  return [which]


def _variables(
  saved: Checkpoints, which: str | int, keep: int, sharding: Any, shapes: Any = None
) -> tuple[int, dict[str, Any]]:
  """The step and the variables that are evaluated; see `Checkpoints.restore_variables`."""
  while True:
    first, *others = names = _steps(saved, which, keep)
    try:
      step, found = saved.restore_variables(first, sharding, shapes)
      total = evaluation_variables(found)
      for number, name in enumerate(others, 2):
        step, found = saved.restore_variables(name, sharding, shapes)
        total = jax.tree.map(
          functools.partial(_averaged, number), total, evaluation_variables(found)
        )
      return step, total
    except UserError:  # a live run may have removed one
      if _steps(saved, which, keep) == names:
        raise


def _averaged(number: int, mean: jax.Array, x: jax.Array) -> jax.Array:
  """Returns the mean of `number` arrays from the mean of one fewer; equal arrays stay bit for bit."""
  return mean + (x - mean) / number if jnp.issubdtype(x.dtype, jnp.inexact) else x


class LoadedRun(NamedTuple):
  """A run's model at one of its checkpoints; `load_run` makes it.

  Attributes:
    task: what the model is for, a `Task`.
    variables: parameters, and collections such as batch statistics, on the host; averaged ones if
      the run evaluates these.
  """

  task: tasks.Task
  variables: dict[str, Any]

  @property
  def model(self) -> Any:
    """The module, for `model.apply(variables, inputs)`; None if the task has none."""
    return getattr(self.task, "model", None)

  @property
  def class_names(self) -> Sequence[str]:
    """Names of the labels, in their order; () of a task without classes."""
    return self.task.class_names

  def answer(self, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """Answers raw inputs, such as paths of images or sentences.

    Args:
      inputs: a list of paths or sentences.

    Returns:
      A mapping for each input, with what `python -m mixer_jax.predict` prints of it.

    Raises:
      UserError: an input cannot be read, or the task answers none.

    Example:
      After the example of `load_run`:

      ```python
      from PIL import Image

      Image.new("RGB", (32, 32)).save("black.png")
      [answer] = run.answer(["black.png"])
      print(answer["class"], answer["probability"])
      ```
    """
    check_list(inputs, "paths or sentences")
    return self.task.answer(jax.device_put(self.variables), inputs)


def load_run(
  path: str,
  which: str | int = "latest",
  data_dir: str | None = None,
  overrides: Sequence[str] | str = (),
) -> LoadedRun:
  """Loads the model of a run's directory at a checkpoint; its data may be gone.

  Args:
    path: the directory of the run.
    which: "latest", "best", a step, or "mean:5": the latest with the mean of the variables of the
      five latest (Vaswani et al., 2017, Section 6.1).
    data_dir: where the data are now, in the place of the config's `data.dir`.
    overrides: "field=value" of fields on which training does not depend.

  Returns:
    A `LoadedRun`.

  Raises:
    UserError: there is no run, no such checkpoint, or a field cannot be changed.

  Example:
    After `python -m mixer_jax.main --config=configs/quickstart.py --workdir=runs/first`:

    ```python
    import jax.numpy as jnp
    import mixer_jax

    run = mixer_jax.load_run("runs/first", which="best")
    logits = run.model.apply(run.variables, jnp.zeros((1, 32, 32, 3)))
    ```
  """
  directory, config = _opened(path, overrides, dir=data_dir)
  variables, kind = _on_host(directory, config, which), tasks.find(config.task)
  task, names = kind(config), provenance.class_names(directory)
  if names and not isinstance(getattr(kind, "class_names", None), property):
    task.class_names = names
  task.recall(provenance.notes(directory))
  return LoadedRun(task, variables)
