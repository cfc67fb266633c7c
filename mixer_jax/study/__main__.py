"""Runs a study, resumes it, or lists the state of its runs.

  python -m mixer_jax.study --study=configs/studies/cifar10_optimizers.py --workdir=DIR
      [--set=[VALUE:]FIELD=VALUE ...] [--parallel=N] [--max_minutes=M]
      [--run=NAME,PATTERN,...] [--retry_failed] [--list]

The same command resumes a study: runs that are done are skipped, interrupted runs go on
from their last checkpoint, failed runs are left alone unless `--retry_failed` is given.
`python -m mixer_jax.report study --workdir=DIR` reports the results, also while it runs.
"""

import collections
import pathlib
import signal
import sys
import time
from typing import Sequence

from absl import flags

from mixer_jax.errors import UserError
from mixer_jax.paths import user_path
from mixer_jax.rundir import directory
from mixer_jax.runtime import cli, processes
from mixer_jax.study import plan, record, runner


def main(_: list[str]) -> None:
  options = flags.FLAGS
  for name, example in {"study": "configs/studies/small.py", "workdir": "runs/small"}.items():
    if not options[name].value:
      raise UserError(f"--{name} is missing; for example --{name}={example}")
  # This process only plans and waits: accelerators belong to the runs.
  cli.without_devices()
  file = str(user_path(options.study))
  study = plan.load(file)
  if options.list:
    _list(study, user_path(options.workdir))
    return
  where = directory.create(options.workdir, record.PLAN)
  with directory.writing(where):
    opened = record.open_study(where, study, file, options.set)
    sys.exit(_go_on(opened, study.select(options.run)))


def _list(study: plan.Study, where: pathlib.Path) -> None:
  """Prints the states of the chosen runs; writes nothing."""
  begun = record.load(where) if (where / record.PLAN).exists() else None
  planned = {run.name: run for run in begun.runs} if begun else {}
  for run in study.select(flags.FLAGS.run):
    state = "waiting, nothing was begun"
    if own := planned.get(run.name):
      tries = _awaited(begun, own)
      state = f"{begun.state(own)}{tries and f' for {tries}'}"
    print(f"{run.name}  {state}")


def _go_on(opened: record.Record, chosen: Sequence[plan.Run]) -> int:
  """Runs what is left of the chosen runs, and returns the exit code; exits itself at Ctrl-C."""
  options = flags.FLAGS
  planned = {run.name: run for run in opened.runs}
  chosen = [planned[run.name] for run in chosen]
  for run in chosen if options.retry_failed else ():
    if opened.state(run).kind == "failed" and not opened.forget(run):
      print(f"{run.name}  stays failed: runs have begun with the settings that its cell chose")
  for number in processes.SIGNALS:  # a scheduler's, as Ctrl-C
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, signal.default_int_handler)
  minutes = float("inf") if options.max_minutes is None else options.max_minutes
  runs = runner.Runner(opened, options.parallel, time.monotonic() + 60 * minutes)
  # Tuning ends first: the other runs may depend on all of it.
  try:
    for tunes in (True, False):
      runs.run([run for run in chosen if run.tunes == tunes])
  except KeyboardInterrupt:
    print("\ninterrupted; the same command goes on from the last checkpoints")
    return 130
  return _summarize(opened, chosen, runs)


def _summarize(opened: record.Record, chosen: Sequence[plan.Run], runs: runner.Runner) -> int:
  """Prints the states of the chosen runs.

  Returns the exit code: 1 if a run failed or, before the time is up, is not done.
  """
  states = {run.name: opened.state(run) for run in chosen}
  counts = collections.Counter(state.kind for state in states.values())
  unfinished = counts.total() > counts["done"]
  if runs.out_of_time and unfinished:
    print("time is up, the same command goes on: ", end="")
  print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
  for name, state in states.items():
    if state.kind == "failed":
      print(f"{name}  {state}")
  if runs.gave_up:
    print("no more runs were started: the last ones ended by a mistake, which others may share")
  if runs.out_of_time:
    return 1 if counts["failed"] else 0
  awaited = collections.Counter(filter(None, (_awaited(opened, run) for run in chosen)))
  for tries, n in awaited.items():
    print(f"{n} of them wait for {tries}, which --run leaves out, another process runs or failed")
  return 1 if unfinished else 0


def _awaited(opened: record.Record, run: plan.Run) -> str:
  """The pattern of the runs of tuning that a waiting run waits for; "" if it waits for none."""
  waits = opened.state(run).kind == "waiting" and not run.tunes
  return f"tune-{'-'.join(run.tuned)}-*" if waits and opened.trials(run.tuned) is None else ""


if __name__ == "__main__":
  flags.DEFINE_string("study", None, "Study file.")
  flags.DEFINE_string("workdir", None, "Directory of the study.")
  flags.DEFINE_multi_string(
    "set", [], "[VALUE:]FIELD=VALUE for every run, or the runs with VALUE on an axis."
  )
  flags.DEFINE_string("run", "*", "Runs by name or pattern, with commas.")
  flags.DEFINE_integer("parallel", 1, "Runs at a time.", lower_bound=1)
  flags.DEFINE_float(
    "max_minutes", None, "Then no run starts, and runs under way save and end.", lower_bound=0.0
  )
  flags.DEFINE_bool("retry_failed", False, "Also run the runs that failed.")
  flags.DEFINE_bool("list", False, "List the runs and their states.")
  cli.run(main)
