"""Runs a study, goes on with it, or shows how far it is.

  python -m mixer_jax.study --study=configs/studies/cifar10_optimizers.py --workdir=DIR
      [--set=[VALUE:]FIELD=VALUE ...] [--parallel=N] [--max_minutes=M]
      [--run=NAME,PATTERN,...] [--retry_failed] [--list]

The same command goes on where it was stopped: what is done is skipped, what was
interrupted resumes from its last checkpoint. What failed is left alone unless
`--retry_failed` is given. `python -m mixer_jax.report study --workdir=DIR` says
what came out, also while it runs.
"""

import collections
import signal
import sys
import time

from absl import flags
import jax

from mixer_jax import cli, workdir
from mixer_jax.errors import UserError
from mixer_jax.study import plan, record, runner


def main(argv: list[str]) -> None:
  del argv
  options = flags.FLAGS
  for name in ("study", "workdir"):
    if not options[name].value:
      raise UserError(
        f"--{name} is missing; for example --study=configs/studies/small.py --workdir=runs/small"
      )
  # This process only plans and waits: accelerators belong to the runs.
  jax.config.update("jax_platforms", "cpu")
  study = plan.load(options.study)
  opened = record.open_study(workdir.create(options.workdir), study, options.study, options.set)
  chosen = study.select(options.run) if options.run else study.runs()
  if options.list:
    for run in chosen:
      print(f"{run.name}  {opened.state(run)}")
    return
  if options.retry_failed:
    for run in chosen:
      if opened.state(run).kind == "failed":
        opened.forget(run)
  signal.signal(signal.SIGTERM, _interrupt)
  deadline = time.monotonic() + 60 * options.max_minutes if options.max_minutes else float("inf")
  runs = runner.Runner(opened, options.parallel, deadline)
  # Tuning comes to its end first: what follows may depend on all of it.
  try:
    runs.run([run for run in chosen if run.candidate is not None])
    runs.run([run for run in chosen if run.candidate is None])
  except KeyboardInterrupt:
    print("\ninterrupted; the same command goes on from the last checkpoints")
    sys.exit(130)
  _summarize(opened, chosen, runs.out_of_time)


def _interrupt(number, frame) -> None:
  """A scheduler's SIGTERM is a person's Ctrl-C."""
  raise KeyboardInterrupt


def _summarize(opened: record.Record, chosen: list[plan.Run], out_of_time: bool) -> None:
  states = {run.name: opened.state(run) for run in chosen}
  counts = collections.Counter(state.kind for state in states.values())
  time_is_up = (
    "time is up, the same command goes on: "
    if out_of_time and counts.total() > counts["done"]
    else ""
  )
  print(time_is_up + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
  for name, state in states.items():
    if state.kind == "failed":
      print(f"{name}  {state}")
  if counts["failed"]:
    sys.exit(1)


if __name__ == "__main__":
  flags.DEFINE_string("study", None, "Study file.")
  flags.DEFINE_string("workdir", None, "Directory of the study.")
  flags.DEFINE_multi_string(
    "set", [], "[VALUE:]FIELD=VALUE for every run, or those with VALUE on an axis."
  )
  flags.DEFINE_string("run", None, "Runs by name or pattern, with commas; default: all.")
  flags.DEFINE_integer("parallel", 1, "Runs at a time.", lower_bound=1)
  flags.DEFINE_float(
    "max_minutes",
    None,
    "Then no run starts, and those under way end after their epoch.",
    lower_bound=0.0,
  )
  flags.DEFINE_bool("retry_failed", False, "Also run what has failed.")
  flags.DEFINE_bool("list", False, "Show the runs and how far they are.")
  cli.run(main)
