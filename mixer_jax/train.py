"""A run from its first epoch, or its last checkpoint, to its end."""

import contextlib
import os
import pathlib
import sys
from typing import Any, Iterator

import ml_collections
import numpy as np

from mixer_jax import (
  check,
  checkpoint,
  experiment,
  fine_tuning,
  lock,
  optim,
  processes,
  provenance,
  sharding,
  signals,
  steps,
  workdir,
)
from mixer_jax.checkpoint import Progress
from mixer_jax.errors import UserError
from mixer_jax.evaluate import Evaluator
from mixer_jax.experiment import Experiment
from mixer_jax.report import console, curves
from mixer_jax.steps import EpochTrainer, TrainState, init_state, make_train_steps, update

__all__ = [
  "STOP",
  "EpochTrainer",
  "TrainState",
  "init_state",
  "make_train_steps",
  "train",
  "update",
]

# A file of this name in a run's directory ends it with a checkpoint after the epoch.
STOP = "stop"


def train(config: ml_collections.ConfigDict, path: str | None) -> pathlib.Path:
  """Trains, or resumes, the run that a config describes.

  Args:
    config: see `mixer_jax.config`.
    path: the run's directory; None makes a fresh one under `runs/`.

  Returns:
    The run's directory: config.json, metrics.jsonl, checkpoints/, tensorboard/
    and curves.png.

  Raises:
    UserError: something that the user can mend.
    SystemExit: SIGINT or SIGTERM came. The steps under way were finished and a
      checkpoint was written; the code is 130 or 143. A second one of the same
      signal ends the process at once.
  """
  console.print_devices()
  check.check(config)
  config, weights = fine_tuning.adopt(config, workdir.stored_config(path))
  run = experiment.build(config)
  params = weights and weights.fit(run.param_shapes, config.resize_tokens)
  _ = run.tx  # an unusable optimizer is refused before the directory exists
  directory = processes.lead(lambda: workdir.create(path)) or workdir.existing(path)
  with _alone(directory), contextlib.closing(checkpoint.Checkpoints(directory)) as saved:
    started = saved.latest() is not None
    processes.lead(lambda: workdir.store_config(directory, config, started))
    print(f"workdir {directory}: the same --config with --workdir={directory} resumes", flush=True)
    state, progress, part = _start(run, saved, params)
    if progress.epoch >= config.num_epochs:
      print(f"finished already: {console.summary(progress, config.target_accuracy)}")
      if not (directory / "curves.png").exists():  # killed before they were drawn
        processes.lead(lambda: curves.draw(directory))
      return directory
    console.print_model(run)
    with provenance.session(directory, run, progress.epoch), signals.heeded() as asked:
      agreed = processes.Agreement(asked, run.mesh)
      progress = _run_epochs(run, directory, saved, state, progress, part, agreed)
      saved.wait()
    if agreed.now() and progress.epoch < config.num_epochs:
      print(
        f"stopped by {asked.name}; the checkpoint of step {saved.latest()} is written, the"
        f" same --config with --workdir={directory} goes on from it",
        flush=True,
      )
      sys.exit(asked.exit_code)
  figure = processes.lead(lambda: curves.draw(directory))
  done = "done" if progress.epoch == config.num_epochs else "stopped"
  print(f"{done}: {console.summary(progress, config.target_accuracy)}\ncurves in {figure}")
  return directory


@contextlib.contextmanager
def _alone(directory: pathlib.Path) -> Iterator[None]:
  """Keeps other runs from training in a run's directory."""

  def hold():
    descriptor = lock.hold(directory)
    if descriptor is None:
      raise UserError(f"workdir {directory} is in use: another process trains in it")
    return descriptor

  descriptor = processes.lead(hold)
  try:
    yield
  finally:
    if descriptor is not None:
      os.close(descriptor)


def _start(
  run: Experiment, saved: checkpoint.Checkpoints, params: Any
) -> tuple[TrainState, Progress, steps.Part | None]:
  """The newest checkpoint's state, or one before step 0 (see `init_state`)."""
  step = saved.latest()
  if step is None:
    return init_state(run, params), Progress(), None
  shapes = steps.state_shapes(run)
  params, rest, progress = saved.restore(step, shapes.params, _without_params(shapes))
  part = None
  if begun := step - progress.epoch * run.steps_per_epoch:
    part_shapes = steps.part_shapes(run, shapes.opt_state, begun)
    everywhere = sharding.replicated(run.mesh)
    part = saved.restore_part(step, checkpoint.template(part_shapes, everywhere))
  print(f"resumed from step {step}, epoch {progress.epoch}", flush=True)
  return TrainState(params=params, **rest), progress, part


def _without_params(state: TrainState) -> dict[str, Any]:
  return {"step": state.step, "opt_state": state.opt_state, "key_data": state.key_data}


def _run_epochs(
  run: Experiment,
  directory: pathlib.Path,
  saved: checkpoint.Checkpoints,
  state: TrainState,
  progress: Progress,
  part: steps.Part | None,
  agreed: processes.Agreement,
) -> Progress:
  """Runs what is left, or until `STOP` or a signal: train, evaluate, report, save."""
  config = run.config
  evaluator, trainer = Evaluator(run), EpochTrainer(run)
  writer = processes.lead(lambda: workdir.MetricWriter(directory, progress.epoch))
  for epoch in range(progress.epoch + 1, config.num_epochs + 1):
    try:
      state, metrics, seconds = trainer(state, epoch, part, agreed.soon)
    except steps.Cut as cut:
      step = int(cut.state.step)
      _refuse_nonfinite(float(cut.part.totals.compute()["loss"]), epoch, step, saved)
      rest = _without_params(cut.state)
      saved.save(step, cut.state.params, rest, progress, top1=None, part=cut.part)
      break
    part, step = None, epoch * run.steps_per_epoch
    _refuse_nonfinite(metrics["loss"], epoch, step, saved)
    test = evaluator(state.params)
    _refuse_nonfinite(test["loss"], epoch, step, saved)
    progress = progress.after(epoch, test["top1"], config.target_accuracy)
    row = _row(run, step, metrics, test, progress, seconds)
    if writer:
      writer.write(row)
    print(console.epoch_line(row, config.num_epochs), flush=True)
    stop = agreed.now(processes.is_first() and (directory / STOP).exists())
    due = epoch % config.checkpoint_epochs == 0 or epoch == config.num_epochs or stop
    if due or progress.best_epoch == epoch:
      saved.save(step, state.params, _without_params(state), progress, test["top1"])
    if stop:
      processes.lead(lambda: (directory / STOP).unlink(missing_ok=True))
      break
  if writer:
    writer.close()
  return progress


def _row(run, step, metrics, test, progress, seconds) -> dict[str, Any]:
  """What is written of an epoch; the names carry the split."""
  if run.dataset.num_classes < 100:
    test = {name: value for name, value in test.items() if name != "top5"}
  rate = optim.learning_rate(run.config.optimizer, run.multiplier)
  return {
    "epoch": progress.epoch,
    "step": step,
    **{f"train/{name}": value for name, value in metrics.items()},
    **{f"test/{name}": value for name, value in test.items()},
    "test/best_top1": progress.best_top1,
    "test/best_epoch": progress.best_epoch,
    "test/target_epoch": progress.target_epoch,
    "learning_rate": float(rate(step - 1)),
    "images_per_second": run.steps_per_epoch * run.config.batch_size / seconds,
    "seconds_per_epoch": seconds,
  }


def _refuse_nonfinite(loss: float, epoch: int, step: int, saved: checkpoint.Checkpoints) -> None:
  if not np.isfinite(loss):
    last = saved.latest()
    kept = f"the last good checkpoint is that of step {last}" if last else "no checkpoint is left"
    raise UserError(
      f"the loss is {loss} in epoch {epoch}, which ends at step {step}; {kept}. Try a lower"
      " optimizer.learning_rate or, with K-FAC, a higher optimizer.damping"
    )
