"""Answers of a task's methods, checked by shapes alone before a program is compiled.

A wrong answer would otherwise end the run at its first evaluation, or inside JAX.
"""

from typing import Any, Mapping

import jax
import jax.numpy as jnp

from mixer_jax import tasks
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.runtime import draws
from mixer_jax.tasks import Aux, BaseTask, WeightedSum


def check_task(run: Experiment) -> None:
  """Raises a UserError for a method of the task whose answer is not that of `tasks.Task`."""
  if tuple(run.task.metrics) != tuple(tasks.find(run.config.task).metrics):
    raise _wrong(run, "metrics", run.task.metrics, "those of the class, which reports read")
  match run.loss_shapes:
    case (WeightedSum(), Aux() as aux):
      _check_sums(run, "loss", aux.metrics)
      _check_collections(run, aux.collections)
    case answer:
      raise _wrong(run, "loss", answer, "a pair of tasks.WeightedSum and tasks.Aux")
  alike = {}  # names of splits by their arrays: most test sets have those of "test"
  for name, split in run.datasets.items():
    if name != "train":
      alike.setdefault(repr(split.spec), []).append(name)
  for names in alike.values():
    _check_evaluate(run, run.datasets[names[0]], not {"test", run.selection}.isdisjoint(names))


def _check_collections(run: Experiment, found: Mapping[str, Any]) -> None:
  """Changed collections have the names and shapes of `init`; a step casts among types of one kind."""
  kind = lambda dtype: next(
    (k for k in (jnp.floating, jnp.integer) if jnp.issubdtype(dtype, k)), dtype
  )
  named = lambda tree: {
    jax.tree_util.keystr(k, simple=True, separator="/"): (x.shape, kind(x.dtype))
    for k, x in jax.tree.leaves_with_path(tree)
  }
  own = named({name: run.variable_shapes.get(name) for name in found})
  for path, of_loss in named(dict(found)).items():
    if own.pop(path, None) != of_loss or path.partition("/")[0] == "params":
      raise _wrong(run, "loss", f"the collection {path}", "the names, shapes and types of init")
  if own:
    raise _wrong(run, "loss", f"no collection {min(own)}", "all of a collection, as init")


def _check_evaluate(run: Experiment, split: Dataset, primary: bool) -> None:
  task, size = run.task, min(run.config.eval_batch_size, len(split))
  batched = lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype)
  prepare = lambda key, examples: task.prepare(key, examples, train=False)
  batch = jax.eval_shape(prepare, draws.key(0), jax.tree.map(batched, split.spec))
  mask = jax.ShapeDtypeStruct((size,), jnp.bool_)
  sums = jax.eval_shape(task.evaluate, run.variable_shapes, batch, mask)
  _check_sums(run, "evaluate", sums)
  own = getattr(tasks.find(run.config.task), "host_metrics", None)
  on_host = own is not BaseTask.host_metrics or "host_metrics" in vars(task)
  if primary and not on_host and (name := task.metrics[0].name) not in sums:
    raise _wrong(run, "evaluate", list(sums), f"{name!r}, the first of metrics, and others")


def _check_sums(run: Experiment, method: str, found: Any) -> None:
  parts = ("merge", "value", "empty")
  fine = isinstance(found, Mapping) and all(hasattr(x, p) for x in found.values() for p in parts)
  if not fine:
    raise _wrong(run, method, found, "a mapping of sums such as tasks.WeightedSum.of(values, mask)")


def _wrong(run: Experiment, name: str, found: Any, allowed: str) -> UserError:
  return UserError(f"task {run.config.task}: {name} gives {found}; allowed: {allowed}")
