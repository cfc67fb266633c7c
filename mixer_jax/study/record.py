"""The directory of a study: its plan, what tuning chose, what became of each run.

study.json         the plan: all runs with their configs, published figures
choices/CELL.json  what tuning chose for a cell, and on which numbers
RUN/               a run of `mixer_jax.main`, with its log.txt and outcome.json
"""

import collections
import dataclasses
import datetime
import json
import os
import pathlib
from typing import Any, NamedTuple, Sequence

from flax import traverse_util

from mixer_jax import check, lock, workdir
from mixer_jax.errors import UserError
from mixer_jax.study import plan
from mixer_jax.study.plan import Published, Run, Study

PLAN = "study.json"
OUTCOME = "outcome.json"


class State(NamedTuple):
  """How far a run is.

  Attributes:
    kind: "waiting", "running", "interrupted", "done" or "failed".
    epoch: epochs finished.
    num_epochs: those of its config.
    reason: one line, of a failed run.
  """

  kind: str
  epoch: int
  num_epochs: int
  reason: str = ""

  def __str__(self) -> str:
    progress = f", epoch {self.epoch} of {self.num_epochs}" if self.epoch else ""
    return f"{self.kind}{progress}" + (f": {self.reason}" if self.reason else "")


@dataclasses.dataclass(frozen=True)
class Record:
  """A study's directory.

  Attributes:
    directory: absolute.
    plan: the contents of study.json.
  """

  directory: pathlib.Path
  plan: dict[str, Any]

  @property
  def runs(self) -> list[Run]:
    """All planned runs."""
    return [
      Run(name, tuple(r["cell"]), r["seed"], r["candidate"])
      for name, r in self.plan["runs"].items()
    ]

  @property
  def published(self) -> dict[plan.Cell, Published]:
    """Published figures by cell."""
    return {
      tuple(row["cell"]): Published(row["top1"], row["epochs_to_target"])
      for row in self.plan["published"]
    }

  def path(self, run: Run) -> pathlib.Path:
    """The run's directory."""
    return self.directory / run.name

  def config(self, run: Run) -> dict[str, Any]:
    """The run's config: its own record of it once it was started, else the planned one."""
    if (self.path(run) / workdir.CONFIG).exists():
      return workdir.load_config(self.path(run)).to_dict()
    return self.plan["runs"][run.name]["config"]

  def state(self, run: Run) -> State:
    """What the run's directory says of it."""
    path = self.path(run)
    rows = workdir.read_metrics(path)
    epoch = rows[-1]["epoch"] if rows else 0
    num_epochs = self.config(run)["num_epochs"]
    if (path / OUTCOME).exists():
      match workdir.read_json(path / OUTCOME):
        case {"state": "done" | "failed" as kind, "reason": str(reason)}:
          if kind == "done" and epoch < num_epochs:
            raise UserError(
              f"{path / workdir.METRICS} has {epoch} of {num_epochs} epochs of a run that is done"
            )
          return State(kind, epoch, num_epochs, reason)
      raise UserError(f"{path / OUTCOME} is not the outcome of a run; delete it to run it again")
    kind = "running" if lock.held(path) else "interrupted" if path.exists() else "waiting"
    return State(kind, epoch, num_epochs)

  def finish(self, run: Run, reason: str = "") -> None:
    """Records that a run is done or, with a reason, that it failed."""
    outcome = {"state": "failed" if reason else "done", "reason": reason, "ended": now()}
    _write(self.path(run) / OUTCOME, outcome)

  def forget(self, run: Run) -> None:
    """Forgets that a run failed, so that it is tried again, and a choice that found none."""
    (self.path(run) / OUTCOME).unlink(missing_ok=True)
    if run.candidate is not None and (choice := self.choice(run.cell)) and not choice["chosen"]:
      self._choice_file(run.cell).unlink()

  def tuned(self, run: Run) -> bool:
    """Whether the run takes the settings that tuning chooses for its cell."""
    others = self.plan["runs"].values()
    return run.candidate is None and any(r["candidate"] is not None for r in others)

  def choice(self, cell: plan.Cell) -> dict[str, Any] | None:
    """What tuning chose for a cell; None as long as it is not decided."""
    path = self._choice_file(cell)
    if path.exists():
      match choice := workdir.read_json(path):
        case {"chosen": None | str(), "settings": None | dict(), "trials": list()}:
          return choice
      raise UserError(f"{path} is no choice of tuning; delete it to choose again")
    tried = [run for run in self.runs if run.cell == cell and run.candidate is not None]
    states = [self.state(run) for run in tried]
    if not all(state.kind in ("done", "failed") for state in states):
      return None
    path.parent.mkdir(exist_ok=True)
    _write(path, _choose([self._trial(run, state) for run, state in zip(tried, states)]))
    return workdir.read_json(path)

  def _choice_file(self, cell: plan.Cell) -> pathlib.Path:
    return self.directory / "choices" / f"{'-'.join(cell)}.json"

  def _trial(self, run: Run, state: State) -> dict[str, Any]:
    """A candidate's settings and what they gave on the validation split."""
    trial = {"run": run.name, "settings": self.plan["runs"][run.name]["settings"]}
    if state.kind == "failed":
      return trial | {"failed": state.reason}
    rows = workdir.read_metrics(self.path(run))
    return trial | {
      "last_top1": rows[-1]["test/top1"],
      "last_loss": rows[-1]["test/loss"],
      "best_top1": rows[-1]["test/best_top1"],
    }


def _choose(trials: list[dict[str, Any]]) -> dict[str, Any]:
  """The trial of the highest accuracy in the last epoch; of equals the lowest loss."""
  finished = [trial for trial in trials if "failed" not in trial]
  best = max(finished, key=lambda t: (t["last_top1"], -t["last_loss"]), default=None)
  return {
    "rule": "highest top-1 on the validation split in the last epoch",
    "chosen": best and best["run"],
    "settings": best and best["settings"],
    "trials": trials,
  }


def open_study(
  directory: pathlib.Path, study: Study, file: str, assignments: Sequence[str]
) -> Record:
  """Writes the plan of a study into its directory, or compares it with the one there.

  Args:
    directory: exists.
    study: what is run.
    file: where the study is from.
    assignments: overrides, "[VALUE:]field=value".

  Raises:
    UserError: a run has an unusable config, an override concerns no run or a
      field that tuning decides on, or runs of another study were begun here.
  """
  new = _plan(study, file, assignments)
  path = directory / PLAN
  old = _read_plan(path) if path.exists() else new
  differing = _differences(old["runs"], new["runs"])
  if differing and any((directory / name).exists() for name in old["runs"]):
    raise UserError(
      f"workdir {directory} holds another study: {'; '.join(differing[:3])}"
      f"{'; ...' if differing[3:] else ''}. Take another --workdir, or the same --study and --set"
    )
  new["created"] = old["created"]
  _write(path, new)
  return Record(directory, new)


def load(directory: pathlib.Path) -> Record:
  """The record of a study that was started in a directory.

  Raises:
    UserError: there is none.
  """
  if not (directory / PLAN).exists():
    raise UserError(f"{directory} holds no study (no {PLAN} in it)")
  return Record(directory, _read_plan(directory / PLAN))


def _read_plan(path: pathlib.Path) -> dict[str, Any]:
  """The plan in a file, with the form that `_plan` gives it."""
  plan = workdir.read_json(path)
  match plan:
    case {
      "title": str(), "file": str(), "source": str(), "notes": list(), "axes": dict(),
      "lines": list(), "published": list(), "created": str(), "runs": dict(runs),
    } if all(map(_is_planned, runs.values())) and all(map(_is_published, plan["published"])):  # fmt: skip
      for name, run in runs.items():
        try:
          workdir.restored_config(run["config"])
        except UserError as e:
          raise UserError(f"{path} is not the plan of a study: run {name}: {e}") from e
      return plan
  raise UserError(f"{path} is not the plan of a study")


def _is_planned(run: Any) -> bool:
  match run:
    case {
      "cell": list(cell), "seed": int(), "candidate": None | int(), "settings": dict(),
      "overrides": list(), "config": dict(),
    }:  # fmt: skip
      return all(isinstance(value, str) for value in cell)
  return False


def _is_published(row: Any) -> bool:
  match row:
    case {"cell": list(), "top1": int() | float(), "epochs_to_target": None | int()}:
      return True
  return False


def _plan(study: Study, file: str, assignments: Sequence[str]) -> dict[str, Any]:
  runs, used = {}, set()
  for run in study.runs():
    own = plan.overrides_of(run, assignments)
    _refuse_tuned(study, own)
    used |= {a for a in assignments if plan.overrides_of(run, [a])}
    config = plan.override(study.run_config(run.name), own)
    try:
      check.check(config)
    except UserError as e:
      raise UserError(f"run {run.name}: {e}") from e
    tried = {} if run.candidate is None else dict(study.candidates(run.cell)[run.candidate])
    runs[run.name] = {
      "cell": run.cell,
      "seed": run.seed,
      "candidate": run.candidate,
      "settings": tried,
      "overrides": own,
      "config": json.loads(config.to_json()),
    }
  if unused := [a for a in assignments if a not in used]:
    raise UserError(f"--set={unused[0]} concerns no run of the study")
  return {
    "title": study.title,
    "file": file,
    "source": study.source,
    "notes": list(study.notes),
    "axes": {name: list(values) for name, values in study.axes.items()},
    "lines": list(study.lines),
    "published": [{"cell": c} | dataclasses.asdict(p) for c, p in study.published.items()],
    "created": now(),
    "runs": runs,
  }


def _refuse_tuned(study: Study, assignments: Sequence[str]) -> None:
  fields = {assignment.partition("=")[0] for assignment in assignments}
  if study.tuning and (decided := fields & study.tuning.fields()):
    raise UserError(f"--set gives {sorted(decided)[0]}, which the study's tuning decides on")


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
  """In what two plans differ, a phrase each."""
  changes = collections.Counter()
  for name in old.keys() & new.keys():
    a, b = (traverse_util.flatten_dict(p[name]["config"], True, sep=".") for p in (old, new))
    changes.update(
      f"{key} was {a.get(key)!r}, is {b.get(key)!r}"
      for key in a.keys() | b.keys()
      if a.get(key) != b.get(key) and key not in workdir.OF_THE_MACHINE
    )
  return [
    *(f"run {name} is new" for name in new if name not in old),
    *(f"run {name} is gone" for name in old if name not in new),
    *(f"{change} in {count} of {len(new)} runs" for change, count in sorted(changes.items())),
  ]


def now() -> str:
  """The time in UTC."""
  return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _write(path: pathlib.Path, value: Any) -> None:
  temporary = path.with_suffix(f".tmp{os.getpid()}")
  temporary.write_text(json.dumps(value, indent=1) + "\n")
  temporary.replace(path)
