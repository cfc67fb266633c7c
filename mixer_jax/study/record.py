"""The directory of a study: its plan, the choices of tuning, the state of each run.

study.json         the plan: all runs with their configs, published values
choices/CELL.json  the settings that tuning chose for a cell, and the numbers behind the choice
RUN/               a run of `mixer_jax.main`, with its log.txt and outcome.json
"""

import collections
import dataclasses
import functools
import json
import pathlib
import typing
from typing import Any, Mapping, NamedTuple, Sequence

import ml_collections

from mixer_jax import config as config_lib
from mixer_jax import tasks
from mixer_jax.errors import UserError
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.rundir import lock, metrics_file
from mixer_jax.study import plan as plan_lib
from mixer_jax.study.plan import Cell, Published, Run, Study

PLAN = "study.json"
OUTCOME = "outcome.json"
_OUTCOME = dict(state=str, reason=str, step=int)
_CHOICE = dict(chosen=str | None, settings=dict | None, trials=list)
UNTUNED = dict(chosen="", settings={}, trials=[])


class State(NamedTuple):
  """The progress of a run.

  Attributes:
    kind: "waiting", "running", "interrupted", "done" or "failed".
    progress: its last evaluation, as "epoch 3 of 15"; "" before the first.
    reason: one line, of a failed run.
  """

  kind: str
  progress: str = ""
  reason: str = ""

  def __str__(self) -> str:
    return ", ".join(filter(None, self[:2])) + (f": {self.reason}" if self.reason else "")


def length(config: ml_collections.ConfigDict) -> tuple[str, int]:
  """The unit that a run is counted in, "step" or "epoch" as in its rows, and their number."""
  return ("step", config.num_steps) if config.num_steps else ("epoch", config.num_epochs)


def selection(row: Mapping[str, float], name: str) -> str:
  """The split that picks the best checkpoint of a run with such rows; `name` of the metric."""
  return "validation" if f"validation/best_{name}" in row else "test"


@dataclasses.dataclass(frozen=True)
class Record:
  """A study's directory with the contents of its study.json, see `Study`.

  Attributes:
    directory: absolute.
    file: of the study.
    axes: their names.
    published: by the name of the cell.
  """

  directory: pathlib.Path
  file: str
  title: str
  axes: tuple[str, ...]
  lines: tuple[str, ...]
  published: dict[str, Published]
  published_at: str
  source: str
  notes: tuple[str, ...]
  runs: tuple[Run, ...]

  @property
  def panels(self) -> list[str]:
    """The axes that are not told apart by lines."""
    return [axis for axis in self.axes if axis not in self.lines]

  @functools.cached_property
  def primary(self) -> tasks.Metric:
    """The primary metric of the study's task."""
    return tasks.find(self.runs[0].config["task"]).metrics[0]

  def path(self, run: Run) -> pathlib.Path:
    return self.directory / run.name

  def config(self, run: Run) -> ml_collections.ConfigDict:
    """The run's config: its own record of it once it was started, else the planned one."""
    if (self.path(run) / directory_lib.CONFIG).exists():
      return directory_lib.load_config(self.path(run))
    return config_lib.restored(run.config)

  def progress(self, run: Run, row: Mapping[str, float]) -> str:
    """The place of a row in its run, as "epoch 3 of 15"."""
    unit, number = length(self.config(run))
    return f"{unit} {row[unit]:g} of {number}"

  def state(self, run: Run) -> State:
    """The state that the run's directory shows.

    Raises:
      UserError: a file of it is spoiled.
    """
    path = self.path(run)
    rows = metrics_file.read(path)
    progress = self.progress(run, rows[-1]) if rows else ""
    if not (path / OUTCOME).exists():
      kind = "running" if lock.held(path) else "interrupted" if path.exists() else "waiting"
      return State(kind, progress)
    outcome = _read(path / OUTCOME, _OUTCOME, "the outcome of a run; delete it to run it again")
    step = rows[-1]["step"] if rows else 0
    if outcome["state"] == "done" and step != outcome["step"]:
      raise UserError(
        f"{path / metrics_file.FILE} ends at step {step}; the run was done at step {outcome['step']}"
      )
    return State(outcome["state"], progress, outcome["reason"])

  def finish(self, run: Run, reason: str = "") -> None:
    """Records that a run is done or, with a reason, that it failed."""
    rows = metrics_file.read(self.path(run))
    step, state = rows[-1]["step"] if rows else 0, "failed" if reason else "done"
    outcome = {"state": state, "reason": reason, "step": step}
    directory_lib.write_json(self.path(run) / OUTCOME, outcome)

  def forget(self, run: Run) -> None:
    """Forgets that a run failed: it is tried again."""
    (self.path(run) / OUTCOME).unlink(missing_ok=True)

  def choice(self, cell: Cell) -> dict[str, Any] | None:
    """The settings that tuning chose for a cell, or `UNTUNED`; None: they are not decided yet.

    Raises:
      UserError: a file of it is spoiled.
    """
    path = self.directory / "choices" / f"{'-'.join(cell)}.json"
    if path.exists():
      return _read(path, _CHOICE, "a choice of tuning; delete it to choose again")
    tried = [(run, self.state(run)) for run in self.runs if run.cell == cell and run.tunes]
    if not all(state.kind in ("done", "failed") for _, state in tried):
      return None
    choice = self._choose([self._trial(run, state) for run, state in tried]) if tried else UNTUNED
    if choice["chosen"]:  # without, failed candidates may be tried again
      path.parent.mkdir(exist_ok=True)
      directory_lib.write_json(path, choice)
    return choice

  def _trial(self, run: Run, state: State) -> dict[str, Any]:
    """A candidate's settings and its numbers on the part held out."""
    trial = {"run": run.name, "settings": run.settings}
    if state.kind == "failed":
      return trial | {"failed": state.reason}
    row, name = metrics_file.read(self.path(run))[-1], self.primary.name
    keys = {"last": name, "best": f"best_{name}", "loss": "loss"}
    return trial | {k: row.get(f"{selection(row, name)}/{key}") for k, key in keys.items()}

  def _choose(self, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The trial of the best value at the last evaluation; of equals the one of the lowest loss."""
    sign = 1 if self.primary.higher_is_better else -1
    finished = [trial for trial in trials if "failed" not in trial]
    best = max(finished, key=lambda t: (sign * t["last"], -(t["loss"] or 0)), default={})
    return {"chosen": best.get("run"), "settings": best.get("settings"), "trials": trials}


def open_study(
  directory: pathlib.Path, study: Study, file: str, assignments: Sequence[str]
) -> Record:
  """Writes the plan of a study into its directory, or compares it with the one there.

  Args:
    directory: exists.
    study: the grid of runs.
    file: where the study is from.
    assignments: overrides, "[VALUE:]field=value".

  Raises:
    UserError: a run has an unusable config, an override concerns no run or a
      field that tuning decides on, or runs of another study were begun here.
  """
  runs = _plan(study, assignments)
  if (directory / PLAN).exists():
    old = load(directory).runs
    differing = _differences(old, runs)
    if differing and any((directory / run.name).exists() for run in old):
      raise UserError(
        f"workdir {directory} holds another study: {'; '.join(differing[:3])}"
        f"{'; ...' if differing[3:] else ''}. Take another --workdir, or the same --study and --set"
      )
  names = ("title", "lines", "published_at", "source", "notes")
  plan = {"file": file, "axes": list(study.axes)} | {name: getattr(study, name) for name in names}
  plan["published"] = {"-".join(c): dataclasses.asdict(p) for c, p in study.published.items()}
  plan["runs"] = [dataclasses.asdict(run) for run in runs]
  directory_lib.write_json(directory / PLAN, plan)
  return load(directory)


def load(directory: pathlib.Path) -> Record:
  """The record of a study that was started in a directory.

  Raises:
    UserError: there is none, or its plan is spoiled.
  """
  if not (directory / PLAN).exists():
    raise UserError(f"{directory} holds no study (no {PLAN} in it)")
  return _read(directory / PLAN, Record, "the plan of a study", directory=directory)


def _read(path: pathlib.Path, kind: Any, what: str, **given: Any) -> Any:
  """The value of a type in a JSON file, with fields that it does not hold."""
  value = directory_lib.read_json(path)
  try:
    return _typed({**value, **given}, kind)
  except (TypeError, KeyError, AttributeError):
    raise UserError(f"{path} is not {what}") from None
  except UserError as e:
    raise UserError(f"{path} is not {what}: {e}") from e


def _typed(value: Any, kind: Any) -> Any:
  """A value from JSON as a dataclass, as a dict of given fields, or as it is if the type fits."""
  of = typing.get_args(kind)
  if dataclasses.is_dataclass(kind):
    return kind(**_typed(value, typing.get_type_hints(kind)))
  if isinstance(kind, dict):
    return {name: _typed(value[name], its_kind) for name, its_kind in kind.items()}
  if typing.get_origin(kind) is dict:
    return {name: _typed(item, of[1]) for name, item in value.items()}
  if typing.get_origin(kind) is tuple and isinstance(value, list):
    return tuple(_typed(item, of[0]) for item in value)
  if not isinstance(value, kind):
    raise TypeError
  return value


def _plan(study: Study, assignments: Sequence[str]) -> list[Run]:
  """The runs of a study with the overrides of a user."""
  decided, runs = study.tuning.fields() if study.tuning else (), []
  for assignment in assignments:
    if not any(plan_lib.overrides_of(run, [assignment]) for run in study.runs()):
      raise UserError(f"--set={assignment} concerns no run of the study")
    if (field := assignment.partition("=")[0].rpartition(":")[2]) in decided:
      raise UserError(f"--set gives {field}, which the study's tuning decides on")
  for run in study.runs():
    own = plan_lib.overrides_of(run, assignments)
    config = json.loads(plan_lib.override(study.run_config(run.name), own).to_json())
    runs.append(dataclasses.replace(run, overrides=tuple(own), config=config))
  if len(names := {run.config["task"] for run in runs}) > 1:
    raise UserError(f"the study has runs of {' and '.join(sorted(names))}; allowed: one task")
  return runs


def _differences(old: Sequence[Run], new: Sequence[Run]) -> list[str]:
  """The differences between two plans, a phrase each."""
  before, after = ({run.name: run.config for run in runs} for runs in (old, new))
  changes = collections.Counter()
  for name in before.keys() & after.keys():
    free = config_lib.free_fields(config_lib.restored(after[name]))
    changes.update(directory_lib.differences(before[name], after[name], free))
  return [
    *(f"run {name} is new" for name in after if name not in before),
    *(f"run {name} is gone" for name in before if name not in after),
    *(f"{change} in {count} of {len(after)} runs" for change, count in sorted(changes.items())),
  ]
