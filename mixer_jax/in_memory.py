"""Training without a directory, an epoch at a time: for notebooks and loops of one's own.

  for state, row in in_memory.epochs(experiment.build(config)):
    print(row["epoch"], row["test/top1"])

Nothing is saved: `train.train` keeps checkpoints, metrics and curves.
"""

from typing import Any, Iterator

from mixer_jax import steps
from mixer_jax.evaluate import Evaluator
from mixer_jax.experiment import Experiment


def epochs(run: Experiment, params: Any = None) -> Iterator[tuple[steps.TrainState, dict]]:
  """Trains a run from its first epoch to its last.

  Args:
    run: what is trained; the same steps as `train.train` takes.
    params: where to start; None: fresh ones, drawn with the run's seed.

  Yields:
    After each epoch the state, which the next epoch overwrites, and a row of metrics with
    the names of `metrics.jsonl`: "epoch", "train/loss" (nats), "test/top1" (in [0, 1]),
    "seconds_per_epoch", ...
  """
  state = steps.init_state(run, params)
  trainer, evaluator = steps.EpochTrainer(run), Evaluator(run)
  for epoch in range(1, run.config.num_epochs + 1):
    state, metrics, seconds = trainer(state, epoch)
    test = evaluator(state.params)
    row = {"epoch": epoch} | {f"train/{name}": value for name, value in metrics.items()}
    row |= {f"test/{name}": value for name, value in test.items()}
    yield state, row | {"seconds_per_epoch": seconds}
