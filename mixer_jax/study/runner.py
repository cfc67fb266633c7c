"""Runs of a study as processes of `mixer_jax.main`, some at a time."""

import asyncio
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any, Mapping, Sequence

from mixer_jax.errors import Diverged, Unwritten, UserError
from mixer_jax.rundir import lock, metrics_file
from mixer_jax.runtime import processes
from mixer_jax.study import plan
from mixer_jax.study.plan import Run
from mixer_jax.study.record import Record, selection

LOG = "log.txt"
_POLL_SECONDS = 0.2
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception): ")
# Exit codes of a run that was asked to stop: with a checkpoint, or before it heeds signals.
_INTERRUPTED = {code for s in processes.SIGNALS for code in (128 + s, -s)}
_ENOUGH = 3  # runs in a row that a mistake ends before they have a result


class Runner:
  """Runs the waiting and the interrupted runs of a study; skips runs that are done or failed.

  Each of `parallel` processes has its share of the processors. At the deadline, a time of
  `time.monotonic()`, no run starts any more, and runs under way end with a checkpoint.
  """

  def __init__(self, record: Record, parallel: int = 1, deadline: float = float("inf")):
    self._record = record
    self._deadline = deadline
    self._processes: list[subprocess.Popen] = []  # under way and ended
    self._asked: set[subprocess.Popen] = set()  # to stop
    self._mistakes = 0  # in a row
    # XLA uses all processors that it sees; without affinity the shares are empty.
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    size = len(cpus) // parallel
    self._shares = [cpus[i * size : (i + 1) * size] for i in range(parallel)]  # not taken by a run

  @property
  def out_of_time(self) -> bool:
    return time.monotonic() >= self._deadline

  @property
  def gave_up(self) -> bool:
    """Whether several runs in a row ended by a mistake, which the others would share."""
    return self._mistakes >= _ENOUGH

  def run(self, runs: Sequence[Run]) -> None:
    """Runs some runs until none is under way; any exception, such as Ctrl-C, ends the processes.

    Each process saves a checkpoint first, perhaps after an evaluation; a second Ctrl-C ends it at
    once. A run of a tuned cell stays waiting as long as nothing is chosen for the cell.
    """

    async def run_all() -> None:
      slots = asyncio.Semaphore(len(self._shares))
      await asyncio.gather(*(self._run_one(run, slots) for run in runs))

    try:
      asyncio.run(run_all())
    finally:  # none is under way but after an interruption or an error
      for process in self._processes:
        self._ask_to_stop(process)
      try:
        for process in self._processes:
          process.wait()
      finally:
        for process in self._processes:
          process.kill()
          process.wait()

  def _ask_to_stop(self, process: subprocess.Popen) -> None:
    """Once: a second SIGTERM would end a run without its checkpoint."""
    if process not in self._asked:
      self._asked.add(process)
      process.terminate()

  def command(self, run: Run, settings: Mapping[str, Any]) -> list[str]:
    """The command of a run, a call of `mixer_jax.main`, with the settings chosen for its cell."""
    return [
      *(sys.executable, "-m", "mixer_jax.main"),
      f"--config={self._record.file}:{run.name}",
      f"--workdir={self._record.path(run)}",
      *(f"--config.{field}" for field in (*plan.settings(settings), *run.overrides)),
    ]

  async def _run_one(self, run: Run, slots: asyncio.Semaphore) -> None:
    async with slots:
      trials = [] if run.tunes else self._record.trials(run.tuned)
      ended = lambda: self._record.state(run).kind in ("done", "failed")
      if self.out_of_time or self.gave_up or trials is None or ended():
        return
      path = self._record.path(run)
      path.mkdir(exist_ok=True)
      if trials and "failed" in trials[0]:
        self._finish(run, "no candidate of its tuning was finished")
      elif (held := lock.hold(path)) is None:
        print(f"{run.name}: another process runs it", flush=True)
      else:
        share = self._shares.pop()
        try:
          if not ended():  # by another process, before the lock was held
            settings = trials[0]["settings"] if trials else {}
            await self._train(run, self.command(run, settings), held, share)
        finally:
          os.close(held)
          self._shares.append(share)

  async def _train(self, run: Run, command: Sequence[str], held: int, share: Sequence[int]) -> None:
    """Starts a process that shares the lock `held`, waits for it and records its outcome."""
    path = self._record.path(run)
    seen = len(metrics_file.read(path))
    print(f"{run.name}: {'goes on' if seen else 'starts'}", flush=True)
    with (path / LOG).open("ab") as log:
      start = log.tell()
      process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(held,),
        env=os.environ | {lock.INHERITED: str(held)},
      )
    self._processes.append(process)
    if share:
      os.sched_setaffinity(process.pid, share)
    code = None
    while code is None:
      await asyncio.sleep(_POLL_SECONDS)
      code, rows = process.poll(), metrics_file.read(path)
      for row in rows[seen:]:
        self._print(run, row)
      seen = len(rows)
      if self.out_of_time:
        self._ask_to_stop(process)
    if code in _INTERRUPTED:
      after = f" after {self._record.progress(run, rows[-1])}" if rows else ""
      print(f"{run.name}: stopped{after}", flush=True)
      return
    reason = "" if code == 0 and rows else _reason(code, path, start)
    unwritten = code == Unwritten.exit_code  # the run goes on from its last checkpoint
    mistake = code == UserError.exit_code and not rows
    self._mistakes = self._mistakes + 1 if mistake or unwritten else 0
    if unwritten:
      print(f"{run.name}: stopped: {reason}", flush=True)
    else:
      self._finish(run, reason, diverged=code == Diverged.exit_code)

  def _print(self, run: Run, row: Mapping[str, float]) -> None:
    """Prints an evaluation."""
    metric = self._record.primary
    split, on = (selection(row), "held-out") if run.tunes else ("test", "test")
    value = metric.shown(row[f"{split}/{metric.name}"])
    place = self._record.progress(run, row)
    print(f"{run.name}: {place}  {on} {metric.name} {value}  {row['seconds']:.1f} s", flush=True)

  def _finish(self, run: Run, reason: str = "", diverged: bool = True) -> None:
    self._record.finish(run, reason, diverged)
    print(f"{run.name}: {'failed: ' + reason if reason else 'done'}", flush=True)


def _reason(code: int, path: pathlib.Path, log_start: int) -> str:
  """Returns the reason for which a process ended with an exit code, in one line."""
  if code < 0:
    return f"ended by {signal.Signals(-code).name}; see {path / LOG}"
  log = (path / LOG).read_bytes()[log_start:].decode(errors="replace")
  lines = [line.strip() for line in log.splitlines() if line.strip()]
  if errors := [line for line in lines if line.startswith("error: ")]:
    return errors[-1].removeprefix("error: ")
  raised = [line for line in lines if _EXCEPTION.match(line)]  # JAX prints lines after it
  return f"exit code {code}: {(raised or lines or ['no output'])[-1]}"
