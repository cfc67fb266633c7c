"""A run from its first epoch, or its last checkpoint, to its end."""

import contextlib
import functools
import os
import pathlib
import sys
from typing import Any, Callable, Iterator

import jax
import ml_collections
import numpy as np

from mixer_jax import (
  check,
  checkpoint,
  divergence,
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

# What a run goes on from: of an epoch that was cut, also what the rest of it needs.
Start = tuple[TrainState, Progress, steps.Part | None]


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
    Diverged: loss, update or test loss were not finite, and `config.on_nonfinite`
      does not help it. Nothing of it was saved.
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
  with contextlib.ExitStack() as stack:
    stack.enter_context(workdir.writing(directory))
    stack.enter_context(_alone(directory))
    saved = stack.enter_context(contextlib.closing(checkpoint.Checkpoints(directory)))
    started = saved.latest() is not None
    processes.lead(lambda: workdir.store_config(directory, config, started))
    print(f"workdir {directory}: the same --config with --workdir={directory} resumes", flush=True)
    start = functools.partial(_start, run, saved, params)
    _, progress, _ = begin = start()
    if progress.epoch >= config.num_epochs:
      print(f"finished already: {console.summary(progress, config.target_accuracy)}")
      if not (directory / "curves.png").exists():  # killed before they were drawn
        processes.lead(lambda: curves.draw(directory))
      return directory
    processes.lead(lambda: saved.check_room(steps.state_shapes(run)))
    console.print_model(run)
    with provenance.session(directory, run, progress.epoch), signals.heeded() as asked:
      agreed = processes.Agreement(asked, run.mesh)
      progress = _run(run, directory, saved, start, begin, agreed)
      saved.wait()
    if agreed.now() and progress.epoch < config.num_epochs:
      print(
        f"stopped by {asked.name}; the checkpoint of step {saved.latest()} is written, the"
        f" same --config with --workdir={directory} goes on from it",
        flush=True,
      )
      sys.exit(asked.exit_code)
  with workdir.writing(directory):
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


def _start(run: Experiment, saved: checkpoint.Checkpoints, params: Any) -> Start:
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


def _run(
  run: Experiment,
  directory: pathlib.Path,
  saved: checkpoint.Checkpoints,
  start: Callable[[], Start],
  begin: Start,
  agreed: processes.Agreement,
) -> Progress:
  """Runs what is left; once a step was not finite, from the last checkpoint if so configured."""
  config, evaluator, trainer = run.config, Evaluator(run), EpochTrainer(run)
  back_to, tries = None, 0
  while True:
    try:
      return _run_epochs(run, directory, saved, evaluator, trainer, begin, agreed)
    except divergence.Nonfinite as bad:
      saved.wait()
      bad.__traceback__ = None  # it holds the arrays of a state that nobody wants
      step = saved.latest() or 0
      back_to, tries = step, tries + 1 if step == back_to else 1
      if tries > divergence.MOST_TRIES:
        bad.why += f", after {divergence.MOST_TRIES} other orders of examples from step {step}"
      if config.on_nonfinite != "restore" or tries > divergence.MOST_TRIES:
        rows = workdir.read_metrics(directory)
        raise divergence.error(bad, config, rows, saved.latest()) from bad
      print(
        f"the {bad.what} of step {bad.step} is not finite: back to step {step}, to go on in"
        f" another order of examples (try {tries} of {divergence.MOST_TRIES})",
        flush=True,
      )
      state, progress, part = start()
      begin = _otherwise(state, tries), progress.again(tries), part


def _otherwise(state: TrainState, tries: int) -> TrainState:
  """The state with another random key: what has diverged would do it again."""
  key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), tries)
  key_data = jax.device_put(jax.random.key_data(key), state.key_data.sharding)
  return state.replace(key_data=key_data)


def _run_epochs(
  run: Experiment,
  directory: pathlib.Path,
  saved: checkpoint.Checkpoints,
  evaluator: Evaluator,
  trainer: EpochTrainer,
  begin: Start,
  agreed: processes.Agreement,
) -> Progress:
  """Runs what is left, or until `STOP` or a signal: train, evaluate, report, save."""
  config, (state, progress, part) = run.config, begin
  with contextlib.ExitStack() as stack:
    writer = processes.lead(lambda: workdir.MetricWriter(directory, progress.epoch))
    if writer:
      stack.enter_context(contextlib.closing(writer))
    for epoch in range(progress.epoch + 1, config.num_epochs + 1):
      try:
        state, metrics, seconds = trainer(state, epoch, part, agreed.soon, progress.restores)
      except steps.Cut as cut:
        step, rest = int(cut.state.step), _without_params(cut.state)
        saved.save(step, cut.state.params, rest, progress, top1=None, part=cut.part)
        break
      part, step = None, epoch * run.steps_per_epoch
      test = evaluator(state.params)
      if not np.isfinite(test["loss"]):
        raise divergence.Nonfinite("test loss", step, epoch, metrics)
      top1, skipped = test["top1"], metrics.get("skipped", 0)
      progress = progress.after(epoch, top1, config.target_accuracy, skipped)
      row = _row(run, step, metrics, test, progress, seconds)
      if writer:
        writer.write(row)
      saved.check()
      print(console.epoch_line(row, config.num_epochs), flush=True)
      stop = agreed.now(processes.is_first() and (directory / STOP).exists())
      due = epoch % config.checkpoint_epochs == 0 or epoch == config.num_epochs or stop
      if due or progress.best_epoch == epoch:
        saved.save(step, state.params, _without_params(state), progress, top1)
      if stop:
        processes.lead(lambda: (directory / STOP).unlink(missing_ok=True))
        break
  return progress


def _row(run, step, metrics, test, progress, seconds) -> dict[str, Any]:
  """What is written of an epoch; the names carry the split."""
  if run.dataset.num_classes < 100:
    test = {name: value for name, value in test.items() if name != "top5"}
  rate = optim.learning_rate(run.config.optimizer, run.multiplier)
  restores = {"restores": progress.restores} if run.config.on_nonfinite == "restore" else {}
  return {
    "epoch": progress.epoch,
    "step": step,
    **{f"train/{name}": value for name, value in metrics.items()},
    **{f"test/{name}": value for name, value in test.items()},
    "test/best_top1": progress.best_top1,
    "test/best_epoch": progress.best_epoch,
    "test/target_epoch": progress.target_epoch,
    "learning_rate": float(rate(step - 1 - progress.skipped)),
    "images_per_second": run.steps_per_epoch * run.config.batch_size / seconds,
    "seconds_per_epoch": seconds,
    **restores,
  }
