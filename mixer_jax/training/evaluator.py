"""Exact metrics of the test sets of a run."""

import functools
from typing import Any, Iterator, Sequence

import jax
import numpy as np

from mixer_jax.data import feed, order
from mixer_jax.experiment import Experiment
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.tasks import metrics as metrics_lib


class Batches:
  """The examples of a split, each once and in its order.

  Attributes:
    masks: whether an example is no padding, bool [batches, batch size].
  """

  def __init__(self, run: Experiment, split: str):
    self._run, devices, number = run, run.mesh.size, len(run.datasets[split])
    # A batch that the devices do not divide is padded; one larger than the split would be padding.
    size = -(-min(run.config.eval_batch_size, number) // devices) * devices
    ids, self.masks = order.test_indices(number, size)
    self._batched = mesh_lib.batched(run.mesh)
    self._feed = feed.Feed(run.datasets[split], ids.__getitem__, self._batched)

  def windows(self) -> Iterator[feed.Window]:
    """The batches, a window each."""
    yield from self._feed.windows((i, 1) for i in range(len(self.masks)))
    self._feed.close()

  def prepare(self, key: jax.Array, examples: Any, rows: Any) -> Any:
    """The task's batch of a window (traceable)."""
    examples = feed.take(examples, jax.tree.map(lambda x: x[0], rows), self._batched)
    return self._run.task.prepare(key, examples, train=False)


class Evaluator:
  """Metrics over exactly the examples of a split in `run.datasets`, each counted once."""

  def __init__(self, run: Experiment, split: str = "test"):
    self._run, self._split = run, run.datasets[split]
    self._batches = batches = Batches(run, split)

    @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(run.mesh))
    def evaluate_batch(variables, examples, rows, mask, number):
      key = jax.random.fold_in(jax.random.key(0), number)  # the same in every evaluation
      batch = batches.prepare(key, examples, rows)
      return dict(run.task.evaluate(mesh_lib.gathered(run.mesh, variables), batch, mask))

    self._evaluate_batch = evaluate_batch

  def __call__(self, variables: Any) -> dict[str, float]:
    """The task's metrics of some variables, by name."""
    total = None
    for i, window in enumerate(self._batches.windows()):
      sums = self._evaluate_batch(variables, *window, self._batches.masks[i], np.int32(i))
      total = sums if total is None else _merge(total, sums)
    return metrics_lib.values(total) | dict(self._run.task.host_metrics(variables, self._split))


_merge = jax.jit(metrics_lib.merge)
Scorers = dict[str, Evaluator]


def evaluators(run: Experiment, splits: Sequence[str] = ()) -> Scorers:
  """An evaluator for each split of a run but the training set, or for some of them."""
  return {name: Evaluator(run, name) for name in splits or run.datasets if name != "train"}


def evaluate_all(scorers: Scorers, variables: Any) -> dict[str, float]:
  """The metrics of several splits as "SPLIT/NAME"."""
  found = {split: scorer(variables) for split, scorer in scorers.items()}
  return {f"{split}/{k}": value for split, values in found.items() for k, value in values.items()}
