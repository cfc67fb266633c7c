"""Exact metrics of the test sets of a run."""

import contextlib
import functools
from typing import Any, Callable, Iterator, Sequence

import jax
import numpy as np

from mixer_jax.data import feed, order
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.runtime import draws
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.tasks import metrics as metrics_lib


def each_batch(
  run: Experiment, split: str, function: Callable, rows: np.ndarray | None = None
) -> Callable[..., Iterator[Any]]:
  """A function from variables to `function(variables, batch, mask)` of each batch of a split.

  Each example, or each of the given rows [n], comes once and in its order; where mask, bool [batch
  size], is False a row is padding; with the second argument `padding=True` all rows are. The function
  is jitted, its results are whole on every device.
  """
  rows = np.arange(len(run.datasets[split])) if rows is None else rows
  ids, masks = order.test_indices(len(rows), batch_size(run, len(rows)))
  ids = rows[ids]
  examples_feed = feed.Feed(run.datasets[split], ids.__getitem__, mesh_lib.batched(run.mesh))
  compute = program(run, function)

  def results(variables, padding=False):
    windows = examples_feed.windows((i, 1) for i in range(len(masks)))
    try:
      for i, (window, mask) in enumerate(zip(windows, masks)):
        yield compute(variables, *window, mask & (not padding), np.int32(i))
    finally:
      examples_feed.close()

  return results


def batch_size(run: Experiment, number: int) -> int:
  """Rows of a batch that evaluates some examples.

  A multiple of the devices, and no larger than these need: more rows would all be padding.
  """
  devices = run.mesh.size
  return -(-min(run.config.eval_batch_size, number) // devices) * devices


def program(run: Experiment, function: Callable) -> Callable:
  """The jitted `function` of variables, a window of one step (see `data.feed`), a mask and its number."""
  batched = mesh_lib.batched(run.mesh)

  @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(run.mesh))
  def compute(variables, examples, rows, mask, number):
    key = jax.random.fold_in(draws.key(0), number)  # the same in every evaluation
    examples = feed.take(examples, jax.tree.map(lambda x: x[0], rows), batched)
    batch = run.task.prepare(key, examples, train=False)
    return function(mesh_lib.gathered(run.mesh, variables), batch, mask)

  return compute


class Evaluator:
  """Metrics over exactly the examples of a split in `run.datasets`, each counted once."""

  def __init__(self, run: Experiment, split: str = "test"):
    self._run, self._split = run, run.datasets[split]
    self._sums = each_batch(run, split, lambda *args: dict(run.task.evaluate(*args)))

  def check_padding(self, variables: Any) -> None:
    """Raises a UserError for a task that counts padding: its metrics would not be those of the set."""
    with contextlib.closing(self._sums(variables, padding=True)) as sums:
      padding = next(sums)
    for name, none in metrics_lib.empty(padding).items():
      if not all(map(np.array_equal, *map(jax.tree.leaves, (padding[name], none)))):
        raise UserError(
          f"task {self._run.config.task}: evaluate counts rows of padding in {name!r}; allowed: rows"
          " whose mask is False have no weight"
        )

  def __call__(self, variables: Any, per_class: bool = False) -> dict[str, float]:
    """The task's metrics of some variables, by name; maybe also of each class, see `metrics.by_class`."""
    task = self._run.task
    with contextlib.closing(self._sums(variables)) as sums:
      first = next(sums)  # a task with metrics of the host alone has no sums, and needs no pass
      total = functools.reduce(_merge, sums, first) if first else {}
    found = metrics_lib.values(total)
    if per_class:
      found |= metrics_lib.by_class(total, task.class_names)
    own = task.host_metrics(variables, self._split)
    return found | {name: float(x) for name, x in own.items()}  # NumPy's numbers are no JSON


_merge = jax.jit(metrics_lib.merge)


def evaluators(run: Experiment, splits: Sequence[str] = ()) -> dict[str, Evaluator]:
  """An evaluator for each split of a run but the training set, or for some of them."""
  splits = splits or [name for name in run.datasets if name != "train"]
  return {name: Evaluator(run, name) for name in splits}
