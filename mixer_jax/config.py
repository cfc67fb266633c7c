"""The config of a run: its groups are made from the options of the code that takes them.

A config file calls `default` and changes fields. A field that is None takes the
default of the model or optimizer that its group names.
"""

import dataclasses
import pathlib
from typing import Annotated, Any, Mapping

from ml_collections import ConfigDict

from mixer_jax import optimizers, options, tasks
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.optimizers import group as optimizer
from mixer_jax.options import Option, one_of
from mixer_jax.rundir import directory
from mixer_jax.runtime import mesh
from mixer_jax.runtime.overrides import override

__all__ = (
  "REQUIRED",
  "data",
  "default",
  "grafted",
  "in_turn",
  "model",
  "model_and_optimizer",
  "optimizer",
  "override",
)

REQUIRED = "(required)"
"""Value of a field that a command line has to give."""
_FREEZE = (
  'regular expression of the paths of parameters to keep fixed; "backbone" means all but the head,'
  ' "" none'
)
_TARGET = (
  "stop watch: report the first step at which the primary metric reaches this value; 0 turns it off"
)


def _option(kind: type, help: str, *limits: float, free: bool = False) -> Any:
  """The type of a field with its lowest and highest value."""
  return Annotated[kind, Option(help, *limits, free=free)]


@dataclasses.dataclass(frozen=True)
class Run:
  """The options of a run of any task."""

  task: _option(str, "kind of task, or module.path:Class") = "image_classification"
  seed: _option(int, "random seed of parameters, order, augmentation and sampling", 0) = 0
  num_epochs: _option(int, "length of the run in epochs", 1) = 100
  num_steps: _option(int, "length of the run in steps; 0 means that num_epochs decides", 0) = 0
  batch_size: _option(int, "examples a step, over all devices and parts", 1) = 64
  accum_steps: _option(int, "parts of a batch whose gradients are summed", 1) = 1
  eval_batch_size: _option(int, "examples an evaluation batch", 1, free=True) = 256
  eval_epochs: _option(float, "epochs between evaluations", 1e-6) = 1.0
  eval_steps: _option(int, "steps between evaluations; 0 means that eval_epochs decides", 0) = 0
  checkpoint_epochs: _option(float, "epochs between checkpoints", 1e-6) = 1.0
  checkpoint_steps: _option(
    int, "steps between checkpoints; 0 means that checkpoint_epochs decides", 0
  ) = 0
  keep_checkpoints: _option(
    int, "number of recent checkpoints to keep; the best one is always kept", 2, free=True
  ) = 2
  save_best: _option(
    bool, "also save a checkpoint at each evaluation that is the best so far", free=True
  ) = True
  steps_per_dispatch: _option(
    int, "training steps per compiled call; 0 means 1 on a CPU and 16 elsewhere", 0, free=True
  ) = 0
  ema_decay: _option(
    float,
    "decay of a moving average of the parameters, which is evaluated in their place; 0 turns it off",
    *(0, 0.9999999),
  ) = 0.0
  freeze: _option(str, _FREEZE) = ""
  layer_decay: _option(
    float,
    "factor by which updates shrink from each block to the next, from the head down; 1 turns it off",
    *(1e-6, 1),
  ) = 1.0
  target: _option(float, _TARGET, 0) = 0.0
  patience: _option(
    int,
    "end the run after this many evaluations without a better primary metric; 0 turns it off",
    0,
  ) = 0
  max_seconds: _option(
    float,
    "end the run at the first evaluation after this many seconds of training steps; 0 turns it off",
    0,
  ) = 0.0
  on_nonfinite: one_of(
    "what to do when a loss or an update is not finite", ("stop", "skip", "restore"), free=True
  ) = "stop"
  require_accelerator: _option(bool, "refuse to start on a CPU", free=True) = False
  deterministic: _option(
    bool, "require deterministic GPU kernels; see docs/running.md", free=True
  ) = False


def _groups(task: str) -> dict[str, options.Group]:
  """The groups of a run of a task but for its optimizer; "" stands for the config itself."""
  return {"mesh": mesh.Devices, "schedule": optimizers.Multiplier, **tasks.find(task).options}


def default(task: str = "image_classification", model: str = "mixer_b4") -> ConfigDict:
  """Returns a config with the defaults of a task, of the named model if it has several, and SGD.

  Another group with several names, such as `problem`, has its first one. A field that is None takes
  the default of the model or optimizer that its group names.

  Args:
    task: a key of `tasks.TASKS`, or "module.path:Class".
    model: name of the model, of a task that has several.

  Returns:
    A config to be changed and returned by a config file's `get_config`.

  Raises:
    UserError: there is no such task.

  Example:
    ```python
    from mixer_jax import config as config_lib

    config = config_lib.default(model="resmlp_s12")
    config.num_epochs = 10
    config.schedule.update(name="cosine", warmup_epochs=0.5)
    ```
  """
  config = options.group(Run, task=task)
  for name, made_of in _groups(task).items():
    chosen = ""
    if isinstance(made_of, Mapping):
      chosen = model if name == "model" else next(iter(made_of))
    group = options.group(made_of, chosen)
    if name:
      config[name] = group
    else:
      config.update(group)
  config.optimizer = optimizer("sgd", learning_rate=1e-3)
  return config


def model(name: str, task: str = "image_classification", **overrides: Any) -> ConfigDict:
  """Returns the model part of a config.

  Args:
    name: name of a model of the task.
    task: a key of `tasks.TASKS`, or "module.path:Class".
    **overrides: values of any fields of the task's models.

  Returns:
    The part, for `config.model`.

  Example:
    ```python
    from mixer_jax import config as config_lib

    config = config_lib.default()
    config.model = config_lib.model("mixer_b16", dropout_rate=0.1)
    ```
  """
  return options.group(tasks.find(task).options["model"], name, **overrides)


def model_and_optimizer(
  choice: str, optimizers: Mapping[str, Mapping[str, Any]]
) -> tuple[str, ConfigDict]:
  """Splits the argument of a config file, "MODEL[,OPTIMIZER]", in a name and an optimizer part.

  Args:
    choice: the argument, such as "mixer_s4" or "mixer_s4,kfac".
    optimizers: settings by name, with a field "name" where the optimizer has another one; the first
      is the default.

  Returns:
    The model's name and the part for `config.optimizer`.

  Raises:
    UserError: there are no settings of this name.

  Example:
    ```python
    from mixer_jax import config as config_lib

    settings = {"adamw": dict(learning_rate=1e-3), "kfac": dict(learning_rate=0.05)}
    name, optimizer = config_lib.model_and_optimizer("mixer_s4,kfac", settings)
    assert (name, optimizer.name) == ("mixer_s4", "kfac")
    ```
  """
  model, _, name = choice.partition(",")
  name = name or next(iter(optimizers))
  if name not in optimizers:
    raise UserError(f"the config takes the optimizer {name!r}; allowed: {', '.join(optimizers)}")
  return model, optimizer(**{"name": name, **optimizers[name]})


def grafted(magnitude: ConfigDict, direction: ConfigDict) -> ConfigDict:
  """Returns the optimizer part of a config for `optim.graft` of two complete optimizers.

  Args:
    magnitude: part of the optimizer that gives the norm.
    direction: part of the optimizer that gives the direction.

  Returns:
    The part, for `config.optimizer`.

  Example:
    ```python
    from mixer_jax import config as config_lib

    config = config_lib.default()
    sgd, adam = (config_lib.optimizer(name, learning_rate=0.1) for name in ("sgd", "adam"))
    config.optimizer = config_lib.grafted(magnitude=sgd, direction=adam)
    ```
  """
  config = options.group(optimizers.Graft)
  config.update(dict(name="graft", magnitude=magnitude, direction=direction))
  return config


def in_turn(first: ConfigDict, second: ConfigDict, steps: int) -> ConfigDict:
  """Returns the optimizer part of a config for one optimizer after another.

  Adam and then L-BFGS are such a pair. The second begins as if the run began there: its schedule
  counts from 0, too.

  Args:
    first: part of the first optimizer.
    second: part of the second optimizer.
    steps: updates that the first makes.

  Returns:
    The part, for `config.optimizer`.

  Example:
    ```python
    from mixer_jax import config as config_lib

    adam = config_lib.optimizer("adam", learning_rate=1e-3)
    config = config_lib.default("physics")
    config.optimizer = config_lib.in_turn(adam, config_lib.optimizer("lbfgs"), steps=1000)
    ```
  """
  config = options.group(optimizers.InTurn, steps=steps)
  config.update(dict(name="in_turn", first=first, second=second))
  return config


def data(name: str, like: str = "", **fields: Any) -> ConfigDict:
  """Returns the data part of image classification, with the augmentation of 32x32 images.

  Args:
    name: name of the data set.
    like: pixels are normalised, and images mirrored, as those of this set; "": as of `name`.
    **fields: values of any other fields of the part.

  Returns:
    The part, for `config.data`.

  Example:
    ```python
    from mixer_jax import config as config_lib

    config = config_lib.default()
    config.data = config_lib.data("folder", like="cifar10", dir="my_images")
    ```
  """
  made_of = tasks.find("image_classification").options["data"]
  same = made_of(name=like) if like else None
  own = {k: getattr(same, k) for k in ("mean", "std", "flip")} if like else {}
  return options.group(made_of, name=name, **own | fields)


def check(config: ConfigDict) -> None:
  """Checks all that needs no data, devices or weights; a UserError names the first wrong field."""
  options.of(Run)["task"].check("task", config.get("task"))
  task = tasks.find(config.task)
  groups = _groups(config.task)
  own = options.of(groups.pop("")) if "" in groups else {}
  if isinstance(groups.get("model"), Mapping):
    options.chosen(config.model, groups["model"], "model")  # its name says more than its fields
  top = {k: v for k, v in config.items() if k not in {*groups, "optimizer"}}
  if missing := [k for k, v in top.items() if v == REQUIRED]:
    raise UserError(f"{missing[0]} is missing; this config needs it: --config.{missing[0]}=VALUE")
  options.check(top, Run, "", own, also_named=(*groups, "optimizer"))
  for group, made_of in groups.items():
    options.check(config[group], made_of, group)
  optimizers.check(config.optimizer)
  task.check(config)
  if not (config.num_steps or config.schedule.warmup_steps):  # `experiment` checks those in steps
    options.made(optimizers.Multiplier, config.schedule).check_warmup(config.num_epochs, 1)


def from_json(stored: Mapping[str, Any]) -> ConfigDict:
  """A config that was written as JSON; options that are newer than it take their defaults."""
  with as_user_error("it is no config", TypeError, ValueError, AttributeError):
    config = ConfigDict(stored)
    for path, made_of in [("", Run), *_groups(config.task).items()]:
      group = config.get(path) if path else config
      if isinstance(group, ConfigDict) and not isinstance(made_of, Mapping):
        for name, option in options.of(made_of).items():
          if name not in group and option.default not in (None, options.REQUIRED):
            group[name] = option.default
  return config


def restored(stored: Mapping[str, Any]) -> ConfigDict:
  """As `from_json`, and checked; a UserError if no run can have it."""
  config = from_json(stored)
  check(config)
  return config


def of_run(workdir: pathlib.Path) -> ConfigDict:
  """The config of a run as its last start had it, its files those that the run keeps.

  Raises:
    UserError: the directory holds no run, or none of a task that is there.
  """
  stored = directory.read_config(workdir)
  try:
    return from_json(stored)
  except UserError as e:
    raise UserError(f"{workdir / directory.CONFIG} is not the config of a run: {e}") from e


def free_fields(config: ConfigDict) -> frozenset[str]:
  """The fields that may differ when a run is resumed: results do not depend on them."""
  groups = [("", Run), *_groups(config.task).items()]
  free = [(group, k) for group, of in groups for k, o in options.any_of(of).items() if o.free]
  return frozenset(f"{group}.{name}" if group else name for group, name in free)


def table(task: str = "image_classification") -> str:
  """All fields of a task's config in Markdown, a table for each group."""
  groups, parts = _groups(task), {"The run": options.table(Run, "")}
  if own := groups.pop("", None):
    parts[f"The task `{task}`"] = options.table(own, "")
  parts |= {f"`{name}`": options.table(made_of, f"{name}.") for name, made_of in groups.items()}
  parts["`optimizer`"] = optimizers.table()
  return "\n\n".join(f"### {head}\n\n{text}" for head, text in parts.items()) + "\n"
