"""A run from its first step, or its last checkpoint, to its end."""

import contextlib
import math
import os
import pathlib
import sys
from typing import Any, Iterator, Sequence

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mixer_jax import experiment, tasks
from mixer_jax.errors import Diverged, UserError
from mixer_jax.experiment import Experiment
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.rundir import lock, metrics_file
from mixer_jax.rundir.metrics_file import Row
from mixer_jax.runtime import devices, draws, processes
from mixer_jax.runtime.processes import Request
from mixer_jax.training import contract, nonfinite, restore, resume, session, summary
from mixer_jax.training.checkpoint import Checkpoints
from mixer_jax.training.evaluator import Evaluator, evaluators
from mixer_jax.training.state import TrainState, evaluation_variables, init_state, state_shapes
from mixer_jax.training.trainer import Trainer


def train(
  config: ConfigDict,
  path: str | None,
  verbose_model: bool = False,
  config_file: str | None = None,
) -> pathlib.Path:
  """Trains, or resumes, the run that a config describes, and returns its directory.

  Args:
    config: of the run.
    path: the directory of the run, see docs/running.md; None makes a fresh one under `runs/`.
    verbose_model: print the tables of parameters and curvature blocks, too.
    config_file: the file of the config, which the record of the run remembers.

  Raises:
    UserError: something that the user can mend.
    Diverged: loss, update or test metrics were not finite, and `config.on_nonfinite` does not
      help it: nothing of it was saved. Or the task has a `complaint`: a checkpoint was written.
    SystemExit: 128 and the number of the signal that came, one of `processes.SIGNALS`. The steps
      under way were finished and a checkpoint was written. A second signal of a kind ends the
      process at once.
  """
  devices.print_line()
  begun, given = resume.begun(path), config
  config = resume.resolve(config, begun)
  run = experiment.make(resume.with_copies(config, begun) if begun else config)
  contract.check_task(run)
  variables = None if begun else run.task.initial(run.variable_shapes, restore.stored)
  # An optimizer that cannot train these parameters is refused before the directory exists.
  jax.eval_shape(run.optimizer.init, run.variable_shapes["params"])
  with _claimed(run, path) as (directory, saved):
    processes.on_first(lambda: _store(directory, run, begun, given, config, config_file))
    again = "the same --config and overrides with this --workdir resume"
    print(f"workdir {directory}: {again}", flush=True)
    state, seconds = _start(run, saved, variables)
    _tell_lost(run, directory, int(state.step))
    if not ended(run, int(state.step), metrics_file.read(directory)):
      processes.on_first(lambda: saved.check_room(state))
      _tell(run, directory, verbose_model)
      recorded = session.session(directory, int(state.step), run, config_file)
      with recorded, processes.stop_signals(run.mesh) as asked:
        trainer = Trainer(run, state, seconds)
        del state  # the trainer's first step donates it
        _run(directory, saved, trainer, variables, asked)
        saved.wait()
      if not ended(run, trainer.step, metrics_file.read(directory)):
        again = f"the same --config and overrides with --workdir={directory} go on from it"
        written = f"the checkpoint of step {saved.latest()} is written"
        print(f"stopped by {asked.name}; {written}, {again}", flush=True)
        sys.exit(asked.exit_code)
    rows, primary = metrics_file.read(directory), run.task.metrics[0]
    tested = f"the test set has {len(run.datasets['test']):,} examples"
    print(f"done: {summary.of_run(rows, primary, run.selection, config.target)}; {tested}")
  return directory


@contextlib.contextmanager
def _claimed(run: Experiment, path: str | None) -> Iterator[tuple[pathlib.Path, Checkpoints]]:
  """The run's directory, held by this process alone, and its checkpoints."""
  directory = processes.on_first(lambda: directory_lib.create(path)) or directory_lib.existing(path)
  with contextlib.ExitStack() as stack:
    stack.enter_context(directory_lib.writing(directory))
    if (descriptor := processes.on_first(lambda: _hold(directory))) is not None:
      stack.callback(os.close, descriptor)
    saved = Checkpoints(directory, keep=run.config.keep_checkpoints)
    stack.enter_context(contextlib.closing(saved))
    yield directory, saved


def _store(
  directory: pathlib.Path,
  run: Experiment,
  begun: pathlib.Path | None,
  given: ConfigDict,
  config: ConfigDict,
  config_file: str | None,
) -> None:
  """Writes the config of a start; a UserError if the directory holds a run of other data."""
  if resume.begun(directory) and not begun:
    raise UserError(f"workdir {directory}: another process has begun a run in it; start again")
  if begun:
    session.check_data(directory, run)
    session.warn_of_changes(directory, tasks.find(config.task), config_file)
  else:
    resume.store_first(directory, given, config)
  resume.store(directory, config)


def _tell(run: Experiment, directory: pathlib.Path, verbose_model: bool) -> None:
  """Prints the size of the model and how examples are ordered; writes the tables of parameters."""
  line, tables = summary.of_model(run)
  print(f"{line}; tables in {directory / 'parameters.txt'}", flush=True)
  if line := run.order.summary():
    print(line, flush=True)
  if bool((schedule := run.config.schedule).epochs) != (schedule.name == "step"):
    given = f"schedule.name is {schedule.name} and schedule.epochs {tuple(schedule.epochs)}"
    print(f"{given}: the rate falls at epochs where both are given, name=step", flush=True)
  length = run.clock.epoch(run.clock.num_steps)
  if late := [epoch for epoch in schedule.epochs if schedule.name == "step" and epoch >= length]:
    print(f"schedule.epochs {late} lie beyond the run's {length:g} epochs: no effect", flush=True)
  processes.on_first(lambda: (directory / "parameters.txt").write_text(tables))
  if verbose_model:
    print(tables, flush=True)


def _tell_lost(run: Experiment, directory: pathlib.Path, step: int) -> None:
  """Prints a line if rows of evaluations up to a checkpoint are gone."""
  every, there = run.clock.eval_every, {row["step"] for row in metrics_file.read(directory)}
  made = {*range(every, step + 1, every)} | ({step} if step == run.clock.num_steps else set())
  if lost := sorted(made - there):
    found = f"rows of {len(lost)} evaluations are lost, steps {lost[0]} to {lost[-1]}"
    print(f"{directory / metrics_file.FILE}: {found}", flush=True)


def _run(
  directory: pathlib.Path, saved: Checkpoints, trainer: Trainer, variables: Any, asked: Request
) -> None:
  """Trains to the end; if a step is not finite and the config says so, again from the last checkpoint."""
  run, most = trainer.run, nonfinite.MOST_TRIES
  back_to, tries, scorers = None, 0, evaluators(run)
  scorers[run.selection].check_padding(evaluation_variables(trainer.state.variables))
  while True:
    try:
      return _loop(directory, saved, trainer, scorers, asked)
    except nonfinite.Nonfinite as bad:
      saved.wait()
      step = saved.latest() or 0
      back_to, tries = step, tries + 1 if step == back_to else 1
      if tries > most:
        bad.tried = f"after {most} other orders of examples from step {step}"
      if run.config.on_nonfinite != "restore" or tries > most:
        rows = metrics_file.read(directory)
        raise nonfinite.diverged(bad, run, trainer.state, rows, step) from None
      again = f"to go on in another order of examples (try {tries} of {most})"
      print(f"{bad}: back to step {step}, {again}", flush=True)
    trainer.state = None  # its memory is needed
    state, seconds = _start(run, saved, variables)
    # With another random key and order: an exact repetition would diverge again.
    key = jax.random.fold_in(draws.wrap(state.key_data), tries)
    key_data = jax.device_put(jax.random.key_data(key), state.key_data.sharding)
    restores = state.restores + jnp.int32(tries)
    trainer.reset(state.replace(key_data=key_data, restores=restores), seconds)


def _loop(
  directory: pathlib.Path, saved: Checkpoints, trainer: Trainer, scorers: dict, asked: Request
) -> None:
  """Trains, evaluates, reports and saves until the end or a signal."""
  run = trainer.run
  rows = [row for row in metrics_file.read(directory) if row["step"] <= trainer.step]
  with contextlib.ExitStack() as stack:
    if writer := processes.on_first(lambda: metrics_file.Writer(directory, trainer.step)):
      stack.enter_context(contextlib.closing(writer))
    while not ended(run, trainer.step, rows):
      trainer.advance(asked.soon)
      stop, score, improved, complaint = asked.now(), None, False, ""
      evaluates, saves = run.clock.evaluates(trainer.step), run.clock.saves(trainer.step)
      if evaluates:
        score, improved = _evaluate(trainer, scorers, rows, writer)
      if evaluates or saves:
        complaint = run.task.complaint(trainer.state.variables)
      saved.check_saved()
      last = ended(run, trainer.step, rows)
      if stop or complaint or last or saves or (improved and run.config.save_best):
        saved.save(trainer.step, trainer.state, trainer.seconds, score, last or saves)
      if complaint:
        saved.wait()
        raise Diverged(f"stopped at step {trainer.step}, whose checkpoint is written: {complaint}")
      if last and trainer.step < run.clock.num_steps:
        print(_ended_early(run, trainer.step, rows), flush=True)
      if stop:
        return


def _evaluate(
  trainer: Trainer, scorers: dict, rows: list[Row], writer: metrics_file.Writer | None
) -> tuple[float, bool]:
  """Adds and prints a row; returns its score (higher is better) and whether it is the best so far."""
  run, metrics = trainer.run, trainer.run.task.metrics
  rows.append(row := _row(trainer, scorers, rows))
  if writer:
    writer.write(row)
  print(summary.of_row(row, run.clock.num_steps, metrics, list(scorers)), flush=True)
  score = row[f"{run.selection}/{metrics[0].name}"]
  best = row[f"{run.selection}/best_step"] == trainer.step
  return score if metrics[0].higher_is_better else -score, best


def evaluations(run: Experiment) -> Iterator[tuple[TrainState, Row]]:
  """Trains a run without a directory: for notebooks and loops of one's own.

  The steps are those of `train`, and so are the variables to start from: those of
  `config.pretrained`, or fresh ones. Yields after each evaluation the state, which the next steps
  overwrite, and its row of metrics.

  Raises:
    Diverged: as of `train`; without checkpoints `on_nonfinite="restore"` does not help.
  """
  contract.check_task(run)
  variables = run.task.initial(run.variable_shapes, restore.stored)
  trainer, scorers, rows = Trainer(run, init_state(run, variables)), evaluators(run), []
  scorers[run.selection].check_padding(evaluation_variables(trainer.state.variables))
  while not ended(run, trainer.step, rows):
    try:
      trainer.advance()
      if run.clock.evaluates(trainer.step):
        rows.append(_row(trainer, scorers, rows))
    except nonfinite.Nonfinite as bad:
      raise nonfinite.diverged(bad, run, trainer.state, rows, None) from None
    if run.clock.evaluates(trainer.step):
      complaint = run.task.complaint(trainer.state.variables)
      yield trainer.state, rows[-1]
      if complaint:
        raise Diverged(f"stopped at step {trainer.step}: {complaint}")


def ended(run: Experiment, step: int, rows: Sequence[Row]) -> bool:
  """Whether a run ends after a step: it is the last one, or see `_ended_early`."""
  return step >= run.clock.num_steps or bool(_ended_early(run, step, rows))


def _ended_early(run: Experiment, step: int, rows: Sequence[Row]) -> str:
  """Why a run ends before its last step: its patience, or its time; "" if it does not."""
  best = f"{run.selection}/best_step"
  rows, patience = [row for row in rows if row["step"] <= step], run.config.patience
  if patience and rows and sum(row["step"] > rows[-1][best] for row in rows) >= patience:
    better = f"no better {run.selection} {run.task.metrics[0].name}"
    return f"ended by patience: {better} in {patience} evaluations"
  if (most := run.config.max_seconds) and (spent := sum(row["seconds"] for row in rows)) >= most:
    return f"ended by max_seconds: {spent:.1f} s of training"
  return ""


def _row(trainer: Trainer, scorers: dict[str, Evaluator], rows: Sequence[Row]) -> Row:
  """The row of an evaluation; raises `Nonfinite` if a metric of a test set is not finite."""
  variables, tested = evaluation_variables(trainer.state.variables), {}
  for split, scorer in scorers.items():
    tested |= {f"{split}/{name}": value for name, value in scorer(variables).items()}
  for name, value in tested.items():
    if not math.isfinite(value):
      raise nonfinite.Nonfinite(name.replace("/", " "), trainer.step)
  primary, selection = trainer.run.task.metrics[0], trainer.run.selection
  best, best_step = f"{selection}/best_{primary.name}", f"{selection}/best_step"
  value, step = tested[f"{selection}/{primary.name}"], trainer.step
  if rows and not primary.better(value, rows[-1][best]):
    value, step = rows[-1][best], rows[-1][best_step]
  return trainer.report() | tested | {best: value, best_step: step}


def _hold(directory: pathlib.Path) -> int:
  if (descriptor := lock.hold(directory)) is None:
    raise UserError(f"workdir {directory} is in use: another process trains in it")
  return descriptor


def _start(run: Experiment, saved: Checkpoints, variables: Any) -> tuple[TrainState, float]:
  """Returns the state of the newest checkpoint, or of step 0, and its seconds since an evaluation."""
  step = saved.latest()
  if step is None:
    return init_state(run, variables), 0.0
  state, seconds = saved.restore(step, state_shapes(run))
  print(f"resumed from step {step}, epoch {run.clock.epoch(step):g}", flush=True)
  return state, seconds
