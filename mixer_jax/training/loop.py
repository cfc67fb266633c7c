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

from mixer_jax import config as config_lib
from mixer_jax import experiment, tasks
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.rundir import lock, metrics_file, provenance
from mixer_jax.rundir.metrics_file import Row
from mixer_jax.runtime import devices, processes, signals
from mixer_jax.runtime.processes import Agreement
from mixer_jax.training import console, nonfinite
from mixer_jax.training.checkpoint import Checkpoints
from mixer_jax.training.evaluator import Scorers, evaluate_all, evaluators
from mixer_jax.training.state import TrainState, init_state, state_shapes
from mixer_jax.training.trainer import Trainer


def train(config: ConfigDict, path: str | None, verbose_model: bool = False) -> pathlib.Path:
  """Trains, or resumes, the run that a config describes.

  Args:
    config: see `mixer_jax.config`.
    path: the run's directory; None makes a fresh one under `runs/`.
    verbose_model: print the tables of parameters and curvature blocks, too.

  Returns:
    The run's directory: config.json, metrics.jsonl, parameters.txt, checkpoints/ and tensorboard/.

  Raises:
    UserError: something that the user can mend.
    Diverged: loss, update or test metrics were not finite, and `config.on_nonfinite` does not
      help it. Nothing of it was saved.
    SystemExit: SIGINT or SIGTERM came. The steps under way were finished and a checkpoint was
      written; the code is 130 or 143. A second signal of a kind ends the process at once.
  """
  devices.print_line()
  config_lib.check(config)
  stored = directory_lib.stored_config(path)
  config = _resumed(config, stored) if stored else tasks.find(config.task).complete(config)
  run = experiment.build(config)
  variables = None if stored else run.task.initial(run.variable_shapes)
  run.optimizer()  # an unusable one is refused before the directory exists
  directory = processes.lead(lambda: directory_lib.create(path)) or directory_lib.existing(path)
  with contextlib.ExitStack() as stack:
    stack.enter_context(directory_lib.writing(directory))
    stack.enter_context(_alone(directory))
    saved = stack.enter_context(contextlib.closing(Checkpoints(directory)))
    started = saved.latest() is not None
    processes.lead(lambda: directory_lib.store_config(directory, config, started))
    print(f"workdir {directory}: the same --config with --workdir={directory} resumes", flush=True)
    state, seconds = _start(run, saved, variables)
    if int(state.step) < run.clock.num_steps:
      processes.lead(lambda: saved.check_room(state_shapes(run)))
      line, tables = console.model_summary(run)
      print(f"{line}; tables in {directory / 'parameters.txt'}", flush=True)
      processes.lead(lambda: (directory / "parameters.txt").write_text(tables))
      if verbose_model:
        print(tables, flush=True)
      sizes = {name: len(dataset) for name, dataset in run.datasets.items()}
      named = {"name": (config.get("data") or {}).get("name", config.task)}
      record = provenance.describe(run.mesh.size, named | sizes)
      with provenance.session(directory, record, int(state.step)), signals.heeded() as asked:
        trainer = Trainer(run, state, seconds)
        del state  # the trainer's first step donates it
        _run(directory, saved, trainer, variables, Agreement(asked, run.mesh))
        saved.wait()
      if trainer.step < run.clock.num_steps:
        again = f"the same --config with --workdir={directory} goes on from it"
        written = f"the checkpoint of step {saved.latest()} is written"
        print(f"stopped by {asked.name}; {written}, {again}", flush=True)
        sys.exit(asked.exit_code)
    rows = metrics_file.read(directory)
    primary = run.task.metrics[0]
    print(f"done: {console.summary(rows, primary, run.selection, config.target)}")
  return directory


def _run(
  directory: pathlib.Path, saved: Checkpoints, trainer: Trainer, variables: Any, agreed: Agreement
) -> None:
  """Runs the rest; once a step was not finite, from the last checkpoint if so configured."""
  run, most = trainer.run, nonfinite.MOST_TRIES
  back_to, tries, scorers = None, 0, evaluators(run)
  while True:
    try:
      return _loop(directory, saved, trainer, scorers, agreed)
    except nonfinite.Nonfinite as bad:
      saved.wait()
      step = saved.latest() or 0
      back_to, tries = step, tries + 1 if step == back_to else 1
      if tries > most:
        bad.why += f", after {most} other orders of examples from step {step}"
      if run.config.on_nonfinite != "restore" or tries > most:
        raise nonfinite.error(
          bad, run.config, metrics_file.read(directory), saved.latest()
        ) from None
      again = f"to go on in another order of examples (try {tries} of {most})"
      print(f"{bad}: back to step {step}, {again}", flush=True)
    trainer.state = None  # its memory is needed
    state, seconds = _start(run, saved, variables)
    trainer.reset(_otherwise(state, tries), seconds)


def _loop(
  directory: pathlib.Path, saved: Checkpoints, trainer: Trainer, scorers: Scorers, agreed: Agreement
) -> None:
  """Runs the rest, or until a signal: train, evaluate, report, save."""
  run, clock = trainer.run, trainer.run.clock
  rows = [row for row in metrics_file.read(directory) if row["step"] <= trainer.step]
  with contextlib.ExitStack() as stack:
    if writer := processes.lead(lambda: metrics_file.Writer(directory, trainer.step)):
      stack.enter_context(contextlib.closing(writer))
    while trainer.step < clock.num_steps:
      trainer.advance(agreed.soon)
      stop, score, improved = agreed.now(), None, False
      if clock.evaluates(trainer.step):
        rows.append(row := _row(trainer, scorers, rows))
        if writer:
          writer.write(row)
        print(console.row_line(row, clock.num_steps, run.task.metrics, list(scorers)), flush=True)
        score, improved = _score(run, row)
      saved.check()
      if stop or improved or clock.saves(trainer.step):
        saved.save(trainer.step, trainer.state, trainer.seconds, score)
      if stop:
        return


def evaluations(run: Experiment, variables: Any = None) -> Iterator[tuple[TrainState, Row]]:
  """Trains a run without a directory: for notebooks and loops of one's own.

  The steps are those of `train`; without variables to start from, fresh ones are drawn.

  Yields:
    After each evaluation the state, which the next steps overwrite, and its row of metrics.
  """
  trainer, scorers, rows = Trainer(run, init_state(run, variables)), evaluators(run), []
  while trainer.step < run.clock.num_steps:
    trainer.advance()
    if run.clock.evaluates(trainer.step):
      rows.append(_row(trainer, scorers, rows))
      yield trainer.state, rows[-1]


def _row(trainer: Trainer, scorers: Scorers, rows: Sequence[Row]) -> Row:
  """The row of an evaluation; raises `Nonfinite` if a metric of a test set is not finite."""
  tested = evaluate_all(scorers, trainer.state.evaluated)
  for name, value in tested.items():
    if not math.isfinite(value):
      raise nonfinite.Nonfinite(name.replace("/", " "), trainer.step)
  primary, selection = trainer.run.task.metrics[0], trainer.run.selection
  best, best_step = f"{selection}/best_{primary.name}", f"{selection}/best_step"
  value, step = tested[f"{selection}/{primary.name}"], trainer.step
  if rows and not primary.better(value, rows[-1][best]):
    value, step = rows[-1][best], rows[-1][best_step]
  return trainer.report() | tested | {best: value, best_step: step}


def _score(run: Experiment, row: Row) -> tuple[float, bool]:
  """The primary metric of an evaluation, higher is better, and whether it is the best so far."""
  primary, selection = run.task.metrics[0], run.selection
  value = row[f"{selection}/{primary.name}"]
  improved = row[f"{selection}/best_step"] == row["step"]
  return value if primary.higher_is_better else -value, improved


@contextlib.contextmanager
def _alone(directory: pathlib.Path) -> Iterator[None]:
  """Keeps other runs from training in a run's directory."""

  def hold():
    if (descriptor := lock.hold(directory)) is None:
      raise UserError(f"workdir {directory} is in use: another process trains in it")
    return descriptor

  descriptor = processes.lead(hold)
  try:
    yield
  finally:
    if descriptor is not None:
      os.close(descriptor)


def _resumed(config: ConfigDict, stored: ConfigDict) -> ConfigDict:
  """The config with the fields that it leaves open and that the run's files have fixed."""
  if "model" not in config:
    return config
  config = config.copy_and_resolve_references()
  for name, value in stored.model.items():
    if config.model.get(name) is None and value is not None and name in config.model:
      config.model[name] = value
  return config


def _start(run: Experiment, saved: Checkpoints, variables: Any) -> tuple[TrainState, float]:
  """The newest checkpoint's state, or that before step 0, and the seconds since an evaluation."""
  step = saved.latest()
  if step is None:
    return init_state(run, variables), 0.0
  state, seconds = saved.restore(step, state_shapes(run))
  print(f"resumed from step {step}, epoch {run.clock.epoch(step):g}", flush=True)
  return state, seconds


def _otherwise(state: TrainState, tries: int) -> TrainState:
  """The state with another random key and order: an exact repetition would diverge again."""
  key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), tries)
  key_data = jax.device_put(jax.random.key_data(key), state.key_data.sharding)
  return state.replace(key_data=key_data, restores=state.restores + jnp.int32(tries))
