"""A task some of whose parameters are not trained.

These parameters are a collection beside "params". The gradient, the optimizer and its curvature
never see them, checkpoints hold them once, and averages leave them out.
"""

import inspect
import re
from typing import Any, Callable, Mapping

from flax import traverse_util
import jax

from mixer_jax import models
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.tasks.task import BaseTask, Batch, Prediction, ReadRun, Task, Variables

FROZEN = "frozen_params"
BACKBONE = "backbone"


def joined(variables: Variables) -> Variables:
  """The variables with the frozen parameters among "params"."""
  if FROZEN not in variables:
    return variables
  parts = (traverse_util.flatten_dict(dict(variables[name])) for name in ("params", FROZEN))
  rest = {name: tree for name, tree in variables.items() if name != FROZEN}
  return rest | {
    "params": traverse_util.unflatten_dict({k: x for part in parts for k, x in part.items()})
  }


def frozen(task: Task, pattern: str) -> Task:
  """The task without training of the parameters whose paths `pattern` finds; "" freezes nothing.

  A UserError for a pattern that is not a regular expression and, in `init`, for one that finds all
  parameters or none.
  """
  if not pattern:
    return task
  with as_user_error(f"freeze is {pattern!r}, no regular expression", re.error):
    return _Frozen(task, pattern, re.compile(pattern))


class _Frozen:
  """A task with `FROZEN` split off its parameters; all else is the task's own."""

  def __init__(self, task: Task, pattern: str, found: re.Pattern):
    self._task, self._pattern, self._found = task, pattern, found

  def __getattr__(self, name: str) -> Any:
    """The task's own attribute; a method whose first argument is `variables` gets them joined.

    For a method of the contract the contract's name of that argument counts, not the task's.
    """
    if name.startswith("_"):  # copy and pickle ask for these before there is a task
      raise AttributeError(name)
    found = getattr(self._task, name)
    known = getattr(BaseTask, name, getattr(Task, name, found))
    named = [*inspect.signature(known).parameters] if callable(known) else []
    if [x for x in named if x != "self"][:1] != ["variables"]:
      return found
    return lambda variables, *args, **kwargs: found(joined(variables), *args, **kwargs)

  def init(self, key: jax.Array) -> Variables:
    variables = self._task.init(key)
    return self._split(variables) if "params" in variables else variables  # refused later

  def initial(self, shapes: Variables, read_run: ReadRun) -> Variables | None:
    variables = self._task.initial(joined(shapes), read_run)
    return variables and self._split(variables)

  def curvature_view(self) -> Callable[[Variables, Batch], Prediction]:
    predict = self._task.curvature_view()
    return lambda variables, batch: predict(joined(variables), batch)

  def _split(self, variables: Variables) -> Variables:
    flat = traverse_util.flatten_dict(dict(variables["params"]), sep="/")
    held = {path for path in flat if self._holds(path, flat)}
    if not held or len(held) == len(flat):
      found = f"finds {'all' if held else 'none'} of the parameters, such as {next(iter(flat))}"
      raise UserError(f"freeze is {self._pattern!r}, which {found}; allowed: some of them")
    part = lambda own: {path: x for path, x in flat.items() if (path in held) == own}
    params, rest = (traverse_util.unflatten_dict(part(own), sep="/") for own in (False, True))
    return {**variables, "params": params, FROZEN: rest}

  def _holds(self, path: str, others: Mapping[str, Any]) -> bool:
    if self._pattern != BACKBONE:
      return bool(self._found.search(path))
    inside = ("backbone/", "encoder/")
    if any(other.startswith(inside) for other in others):
      return path.startswith(inside)
    return models.layer_kind(path) != "head"
