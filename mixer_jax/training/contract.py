"""Answers of a task's methods, checked by shapes alone before a program is compiled."""

from typing import Any, Mapping

import jax
import jax.numpy as jnp

from mixer_jax import tasks
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.tasks import Aux, BaseTask, Metric, WeightedSum


def check(run: Experiment) -> None:
  """Raises a UserError for a method of the task whose answer is not that of `tasks.Task`."""
  task = run.task
  listed = isinstance(task.metrics, tuple | list) and task.metrics
  known = listed and all(isinstance(metric, Metric) for metric in task.metrics)
  known = known and task.metrics == tasks.find(run.config.task).metrics
  _require(run, "metrics", known, task.metrics, "a list of tasks.Metric, that of the class")
  answer = run.loss_shapes
  pair = isinstance(answer, tuple) and len(answer) == 2
  pair = pair and isinstance(answer[0], WeightedSum) and isinstance(answer[1], Aux)
  _require(run, "loss", pair, answer, "a pair of tasks.WeightedSum and tasks.Aux")
  _require_sums(run, "loss", answer[1].metrics)
  _check_collections(run, answer[1].collections)
  alike = {}  # names of splits by their arrays: most test sets have those of "test"
  for name, split in run.datasets.items():
    if name != "train":
      alike.setdefault(repr(split.spec), []).append(name)
  for names in alike.values():
    _check_evaluate(run, run.datasets[names[0]], not {"test", run.selection}.isdisjoint(names))


def _check_collections(run: Experiment, found: Any) -> None:
  """Changed collections have the names and shapes of `init`; a step gives them its types."""
  known = {name: x for name, x in run.variable_shapes.items() if name != "params"}
  fine = isinstance(found, Mapping) and found.keys() <= known.keys()
  told = {"collections": tuple(found) if isinstance(found, Mapping) else found}
  _require(run, "loss", fine, told, f"those of init, {', '.join(known) or 'none'}")
  own = {name: known[name] for name in found}
  paths = lambda tree: {
    jax.tree_util.keystr(path, simple=True, separator="/"): x
    for path, x in jax.tree.leaves_with_path(tree)
  }
  own, found = paths(own), paths(found)
  for path in sorted(own.keys() | found.keys()):
    old, new = own.get(path), found.get(path)
    both = old is not None and new is not None
    fine = both and old.shape == new.shape and _kind(old.dtype) == _kind(new.dtype)
    allowed = f"{_told(old)}, as init" if old is not None else "the names of init"
    _require(run, "loss", fine, {path: new}, allowed)


def _kind(dtype: Any) -> Any:
  """Floating or integer, else the type itself: a step casts among types of one kind."""
  kinds = (kind for kind in (jnp.floating, jnp.integer) if jnp.issubdtype(dtype, kind))
  return next(kinds, dtype)


def _check_evaluate(run: Experiment, split: Dataset, primary: bool) -> None:
  task, size = run.task, min(run.config.eval_batch_size, len(split))
  batched = lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype)
  prepare = lambda key, examples: task.prepare(key, examples, train=False)
  batch = jax.eval_shape(prepare, jax.random.key(0), jax.tree.map(batched, split.spec))
  mask = jax.ShapeDtypeStruct((size,), jnp.bool_)
  sums = jax.eval_shape(task.evaluate, run.variable_shapes, batch, mask)
  _require_sums(run, "evaluate", sums)
  own = getattr(tasks.find(run.config.task), "host_metrics", None)
  elsewhere = own is not BaseTask.host_metrics or "host_metrics" in vars(task)
  fine = not primary or elsewhere or task.metrics[0].name in sums
  _require(
    run, "evaluate", fine, sums, f"{task.metrics[0].name!r}, the first of metrics, and others"
  )


def _require_sums(run: Experiment, method: str, found: Any) -> None:
  parts = ("merge", "value", "empty")
  fine = isinstance(found, Mapping) and all(hasattr(x, p) for x in found.values() for p in parts)
  allowed = "a mapping of sums such as tasks.WeightedSum.of(values, mask)"
  _require(run, method, fine, found, allowed)


def _require(run: Experiment, name: str, fine: bool, found: Any, allowed: str) -> None:
  if not fine:
    raise UserError(f"task {run.config.task}: {name} gives {_told(found)}; allowed: {allowed}")


def _told(found: Any) -> str:
  """The types of an answer, in one line."""
  if isinstance(found, Mapping):
    return f"{{{', '.join(f'{name!r}: {_told(x)}' for name, x in found.items())}}}"
  if type(found) in (tuple, list):
    return f"({', '.join(map(_told, found))})"
  if found is None:
    return "nothing"
  if isinstance(found, jax.ShapeDtypeStruct):
    return f"{found.dtype.name}{list(found.shape)}"
  return repr(found) if isinstance(found, str) else type(found).__name__
