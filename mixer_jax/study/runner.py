"""Runs of a study as processes of `mixer_jax.main`, some at a time."""

import collections
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import IO, Sequence

from mixer_jax import lock, train, workdir
from mixer_jax.study import plan
from mixer_jax.study.plan import Run
from mixer_jax.study.record import Record

LOG = "log.txt"
_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 10.0  # between asking a process to end and ending it


@dataclasses.dataclass
class _Child:
  """A run under way.

  Attributes:
    run: which.
    process: the one that trains.
    lock: held by this process and that one.
    log: its output, which starts at byte `log_start`.
    rows: epochs printed so far.
    processors: those it has for itself.
  """

  run: Run
  process: subprocess.Popen
  lock: int
  log: IO[bytes]
  log_start: int
  rows: int
  processors: tuple[int, ...]


class Runner:
  """Runs what is waiting or was interrupted; skips what is done or failed.

  Args:
    record: the study's directory.
    parallel: processes at a time, each with its share of the processors.
    deadline: of `time.monotonic()`; then no run starts, and those under way end
      with a checkpoint after their epoch.
  """

  def __init__(self, record: Record, parallel: int = 1, deadline: float = float("inf")):
    self._record = record
    self._parallel = parallel
    self._deadline = deadline
    self._children: list[_Child] = []
    self._shares = _shares(parallel)

  @property
  def out_of_time(self) -> bool:
    return time.monotonic() >= self._deadline

  def run(self, runs: Sequence[Run]) -> None:
    """Runs all of these that need it, and returns when none is under way.

    A run of a tuned cell for which nothing was chosen yet is left waiting. On
    any exception, Ctrl-C among them, the processes are ended.
    """
    waiting = collections.deque(runs)
    asked_to_stop = False
    try:
      while self._children or (waiting and not self.out_of_time):
        while waiting and len(self._children) < self._parallel and not self.out_of_time:
          self._start(waiting.popleft())
        if self.out_of_time and not asked_to_stop:
          asked_to_stop = True
          for child in self._children:
            (self._record.path(child.run) / train.STOP).touch()
        time.sleep(_POLL_SECONDS if self._children else 0)
        for child in list(self._children):
          self._watch(child)
    finally:
      self._end_all()

  def command(self, run: Run) -> list[str]:
    """The command of a run, which is one of `mixer_jax.main` like any other."""
    planned = self._record.plan["runs"][run.name]
    choice = self._record.choice(run.cell) if self._record.tuned(run) else None
    chosen = plan.settings(choice["settings"] or {}) if choice else ()
    return [
      *(sys.executable, "-m", "mixer_jax.main"),
      f"--config={self._record.plan['file']}:{run.name}",
      f"--workdir={self._record.path(run)}",
      *(f"--config.{a}" for a in (*chosen, *planned["overrides"])),
    ]

  def _start(self, run: Run) -> None:
    record, path = self._record, self._record.path(run)
    if record.state(run).kind in ("done", "failed"):
      return
    if record.tuned(run) and (choice := record.choice(run.cell)) is None:
      return
    path.mkdir(exist_ok=True)
    if record.tuned(run) and choice["chosen"] is None:
      self._finish(run, "no candidate of its tuning was finished")
      return
    if (held := lock.hold(path)) is None:
      print(f"{run.name}: another process runs it", flush=True)
      return
    (path / train.STOP).unlink(missing_ok=True)
    log = (path / LOG).open("ab")
    rows = len(workdir.read_metrics(path))
    print(f"{run.name}: {'goes on' if rows else 'starts'}", flush=True)
    process = subprocess.Popen(
      self.command(run),
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      pass_fds=(held,),
      env=os.environ | {"TQDM_DISABLE": "1", lock.INHERITED: str(held)},  # no bars in logs
    )
    taken = {child.processors for child in self._children}
    processors = next((share for share in self._shares if share not in taken), ())
    if processors:
      os.sched_setaffinity(process.pid, processors)
    self._children.append(_Child(run, process, held, log, log.tell(), rows, processors))

  def _watch(self, child: _Child) -> None:
    """Prints new epochs, and what became of the run once its process has ended."""
    code = child.process.poll()
    rows = workdir.read_metrics(self._record.path(child.run))
    for row in rows[child.rows :]:
      print(
        f"{child.run.name}: epoch {row['epoch']}  test top-1 {row['test/top1']:.2%}"
        f"  {row['seconds_per_epoch']:.1f} s",
        flush=True,
      )
    child.rows = len(rows)
    if code is None:
      return
    self._children.remove(child)
    state = self._record.state(child.run)
    if code:
      self._finish(child.run, _reason(code, self._record.path(child.run), child.log_start))
    elif state.epoch >= state.num_epochs:
      self._finish(child.run)
    else:
      print(
        f"{child.run.name}: stopped after epoch {state.epoch} of {state.num_epochs}", flush=True
      )
    child.log.close()
    os.close(child.lock)

  def _finish(self, run: Run, reason: str = "") -> None:
    self._record.finish(run, reason)
    print(f"{run.name}: {'failed: ' + reason if reason else 'done'}", flush=True)

  def _end_all(self) -> None:
    """Ends what still runs: nobody would watch it."""
    for child in self._children:
      child.process.terminate()
    for child in self._children:
      try:
        child.process.wait(_PATIENCE_SECONDS)
      except subprocess.TimeoutExpired:
        child.process.kill()
        child.process.wait()
      child.log.close()
      os.close(child.lock)
    self._children.clear()


def _shares(parallel: int) -> list[tuple[int, ...]]:
  """Equal parts of this process's processors; () where they cannot be shared out.

  Programs of XLA use every processor that they see: several at a time would wait
  for each other.
  """
  if not hasattr(os, "sched_setaffinity"):
    return []
  cpus = sorted(os.sched_getaffinity(0))
  size = len(cpus) // parallel
  return [tuple(cpus[i * size : (i + 1) * size]) for i in range(parallel)] if size else []


def _reason(code: int, path: pathlib.Path, log_start: int) -> str:
  """Why a process ended with an exit code, in one line."""
  if code < 0:
    return f"ended by {signal.Signals(-code).name}; see {path / LOG}"
  with (path / LOG).open("rb") as log:
    log.seek(log_start)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
  errors = [line for line in lines if line.startswith("error: ")]
  last = next((line for line in reversed(lines) if line), "no output")
  return errors[-1].removeprefix("error: ") if errors else f"exit code {code}: {last}"
