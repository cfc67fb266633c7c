"""A task some of whose parameters are not trained.

They are a collection beside "params": the gradient, the optimizer and its curvature never see them,
checkpoints hold them once, and averages leave them out.
"""

import inspect
import re
from typing import Any, Callable, Mapping

from flax import traverse_util
import jax

from mixer_jax import models
from mixer_jax.errors import UserError
from mixer_jax.tasks.task import BaseTask, Batch, Prediction, ReadRun, Task, Variables

FROZEN = "frozen_params"
BACKBONE = "backbone"
_NAMED = 3  # parameters in a message


def joined(variables: Variables) -> Variables:
  """The variables with the parameters that are not trained among the others."""
  if FROZEN not in variables:
    return variables
  rest = {name: tree for name, tree in variables.items() if name != FROZEN}
  return rest | {"params": _merged(variables["params"], variables[FROZEN])}


def _merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
  flat = traverse_util.flatten_dict(dict(a)) | traverse_util.flatten_dict(dict(b))
  return traverse_util.unflatten_dict(flat)


def frozen(task: Task, pattern: str) -> Task:
  """The task without training of the parameters whose paths `pattern` finds; of "" the task itself.

  A UserError for a pattern that is no regular expression and, in `init`, for one that finds all
  parameters or none.
  """
  if not pattern:
    return task
  try:
    return _Frozen(task, pattern, re.compile(pattern))
  except re.error as e:
    raise UserError(f"freeze is {pattern!r}, no regular expression: {e}") from e


class _Frozen:
  """The task with `FROZEN` split off its parameters; all else is the task's own."""

  def __init__(self, task: Task, pattern: str, found: re.Pattern):
    self._task, self._pattern, self._found = task, pattern, found

  def __getattr__(self, name: str) -> Any:
    """The task's own; a method whose first argument is `variables` gets them joined.

    Of the contract's methods the contract's names count, for all calls are by position.
    """
    if name.startswith("_"):  # as copy and pickle ask before there is a task
      raise AttributeError(name)
    found = getattr(self._task, name)
    known = getattr(BaseTask, name, getattr(Task, name, found))
    named = [*inspect.signature(known).parameters] if callable(known) else []
    if [x for x in named if x != "self"][:1] != ["variables"]:
      return found
    return lambda variables, *args, **kwargs: found(joined(variables), *args, **kwargs)

  def init(self, key: jax.Array) -> Variables:
    variables = self._task.init(key)
    return self._split(variables) if "params" in variables else variables  # which is told later

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
      some, which = ", ".join(list(flat)[:_NAMED]), "all" if held else "none"
      found = f"finds {which} of the {len(flat)} parameters ({some}, ...)"
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
