"""The directory of a study: its plan and the state of each run.

study.json   the plan: all runs with their configs, published values
RUN/         a run of `mixer_jax.main`, with its log.txt and outcome.json
"""

import collections
import dataclasses
import filecmp
import functools
import json
import math
import pathlib
from typing import Any, Mapping, NamedTuple, Sequence

from flax import traverse_util
import ml_collections

from mixer_jax import config as config_lib
from mixer_jax import tasks
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.rundir import lock, metrics_file
from mixer_jax.study.plan import Cell, Published, Run, Study

PLAN = directory_lib.STUDY
OUTCOME = "outcome.json"


class State(NamedTuple):
  """The progress of a run, and the reason of a failed one, a line."""

  kind: str  # "waiting", "running", "interrupted", "done" or "failed"
  progress: str = ""  # its last evaluation, as "epoch 3 of 15"
  reason: str = ""

  def __str__(self) -> str:
    return ", ".join(filter(None, self[:2])) + (f": {self.reason}" if self.reason else "")


def length(config: ml_collections.ConfigDict) -> tuple[str, int]:
  """The unit that a run is counted in, "step" or "epoch" as in its rows, and their number."""
  return ("step", config.num_steps) if config.num_steps else ("epoch", config.num_epochs)


def selection(row: Mapping[str, float]) -> str:
  """Returns the split that picks the best checkpoint of a run with such rows."""
  return "validation" if "validation/best_step" in row else "test"


@dataclasses.dataclass(frozen=True)
class Record:
  """A study's absolute directory with the contents of its study.json, see `Study`."""

  directory: pathlib.Path
  file: str  # of the study
  title: str
  axes: tuple[str, ...]  # their names
  lines: tuple[str, ...]
  published: dict[str, Published]  # by cell, as "m1-sgd"
  published_at: str
  source: str
  notes: tuple[str, ...]
  target_of: str
  tuned_by: str  # see `Tuning.metric`
  runs: tuple[Run, ...]

  @property
  def panels(self) -> list[str]:
    """The axes that are not told apart by lines."""
    return [axis for axis in self.axes if axis not in self.lines]

  @property
  def shared(self) -> list[str]:
    """The axes whose values share the settings that were chosen for the first of them."""
    pairs = [(run.cell, run.tuned) for run in self.runs if run.tuned]
    return [name for i, name in enumerate(self.axes) if any(a[i] != b[i] for a, b in pairs)]

  @functools.cached_property
  def primary(self) -> tasks.Metric:
    """The primary metric of the study's tasks."""
    return tasks.find(self.runs[0].config["task"]).metrics[0]

  def path(self, run: Run) -> pathlib.Path:
    return self.directory / run.name

  def config(self, run: Run) -> ml_collections.ConfigDict:
    """Returns the run's config: its own record of it once it was started, else the planned one."""
    if (self.path(run) / directory_lib.CONFIG).exists():
      return config_lib.of_run(self.path(run))
    return config_lib.restored(run.config)

  def unplanned(self, run: Run) -> list[str]:
    """The fields in which a begun run differs from its plan, as after a change of the study's file.

    Fields that the plan leaves to defaults, or that a task fills in at the start, do not count.
    """
    path = self.path(run) / directory_lib.CONFIG
    if not path.exists():
      return []
    trials = [] if run.tunes else self.trials(run.tuned)
    planned = config_lib.restored(run.config)
    flatten = functools.partial(traverse_util.flatten_dict, sep=".")
    expected = flatten(json.loads(planned.to_json())) | (trials[0]["settings"] if trials else {})
    made = {k: v for k, v in flatten(directory_lib.read_json(path)).items() if k in expected}
    free = config_lib.free_fields(planned) | {k for k, v in expected.items() if v is None}
    return directory_lib.differences(made, expected, free)

  def progress(self, run: Run, row: Mapping[str, float]) -> str:
    """Returns the place of a row in its run, as "epoch 3 of 15"."""
    unit, number = length(self.config(run))
    return f"{unit} {row[unit]:g} of {number}"

  def state(self, run: Run) -> State:
    """Returns the state that the run's directory shows; a UserError if a file of it is spoiled."""
    path = self.path(run)
    rows = metrics_file.read(path)
    progress = self.progress(run, rows[-1]) if rows else ""
    if not (path / OUTCOME).exists():
      kind = "running" if lock.held(path) else "interrupted" if path.exists() else "waiting"
      return State(kind, progress)
    ending = outcome(path)
    step, ended = rows[-1]["step"] if rows else 0, ending["step"]
    if not ending["reason"] and step != ended:
      raise UserError(
        f"{path / metrics_file.FILE} ends at step {step}; the run was done at step {ended}"
      )
    return State("failed" if ending["reason"] else "done", progress, ending["reason"])

  def finish(self, run: Run, reason: str = "", diverged: bool = True) -> None:
    """Records that a run is done or, with a reason, that it failed.

    A run of tuning that `diverged` is the worst of its cell. One that failed otherwise, as for lack
    of memory or data, has to be run again before its cell is decided.
    """
    rows = metrics_file.read(self.path(run))
    ending = {"reason": reason, "step": rows[-1]["step"] if rows else 0, "diverged": diverged}
    directory_lib.write_json(self.path(run) / OUTCOME, ending)

  def forget(self, run: Run) -> bool:
    """Forgets that a run failed, so that it is tried again; False if runs depend on its tuning."""
    cell = [r for r in self.runs if r.tuned == run.cell and not r.tunes] if run.tunes else ()
    begun = lambda path: (path / directory_lib.CONFIG).exists() or lock.held(path)
    if any(begun(self.path(r)) for r in cell):
      return False
    (self.path(run) / OUTCOME).unlink(missing_ok=True)
    return True

  def trials(self, cell: Cell) -> list[dict[str, Any]] | None:
    """The candidates of a cell with their numbers on the part held out; None: not all ended yet.

    The first one is chosen: it has the best last evaluation and, of equals, the lowest loss. At
    the end are those with a reason under "failed".
    """
    tried = [(run, self.state(run)) for run in self.runs if run.cell == cell and run.tunes]
    if not all(self._has_result(*one) for one in tried):
      return None
    trials, name = [], self.primary.name
    for run, state in tried:
      trial = {"run": run.name, "settings": run.settings}
      if state.kind == "failed":
        trial["failed"] = state.reason
      else:
        row = metrics_file.read(self.path(run))[-1]
        split = selection(row)
        for key, column in {"last": name, "best": f"best_{name}", "loss": "loss"}.items():
          trial[key] = row.get(f"{split}/{column}")
        if self.tuned_by:
          trial |= {"last": row[self.tuned_by], "best": None}
      trials.append(trial)
    sign = -1 if self.primary.higher_is_better and not self.tuned_by else 1
    order = lambda t: (math.inf,) if "failed" in t else (sign * t["last"], t["loss"] or 0)
    return sorted(trials, key=order)

  def _has_result(self, run: Run, state: State) -> bool:
    """Whether a run of tuning is done or diverged; an older version wrote no "diverged"."""
    failed = state.kind == "failed"
    return state.kind == "done" or (failed and outcome(self.path(run)).get("diverged", True))


def open_study(
  directory: pathlib.Path, study: Study, file: str, assignments: Sequence[str]
) -> Record:
  """Writes the plan of a study into its directory, or compares it with the one there.

  The study is from `file`; assignments are overrides, "[VALUE:]field=value". A UserError if the
  study cannot be planned, or if runs of another one were begun here.
  """
  runs = study.planned(assignments)
  if (directory / PLAN).exists():
    old = load(directory).runs
    differing = _differences(old, runs)
    if differing and any((directory / run.name).exists() for run in old):
      raise UserError(
        f"workdir {directory} holds another study: {'; '.join(differing[:3])}"
        f"{'; ...' if differing[3:] else ''}. Take another --workdir, or the same --study and --set"
      )
  names = ("title", "lines", "published_at", "source", "notes", "target_of")
  plan = {"file": file, "axes": list(study.axes)} | {name: getattr(study, name) for name in names}
  plan["tuned_by"] = study.tuning.metric if study.tuning else ""
  plan["published"] = {"-".join(c): dataclasses.asdict(p) for c, p in study.published.items()}
  plan["runs"] = [dataclasses.asdict(run) for run in runs]
  directory_lib.write_json(directory / PLAN, plan)
  return load(directory)


def load(directory: pathlib.Path) -> Record:
  """Returns the record of a study; a UserError if there is none, or its plan cannot be read."""
  path = directory / PLAN
  if not path.exists():
    raise UserError(f"{directory} holds no study (no {PLAN} in it)")
  plan = directory_lib.read_json(path)
  with as_user_error(f"{path} is not the plan of a study", TypeError, KeyError, AttributeError):
    tuples = {name: tuple(plan[name]) for name in ("axes", "lines", "notes")}
    published = {cell: Published(**row) for cell, row in plan["published"].items()}
    runs = tuple(
      Run(**run | {name: tuple(run[name]) for name in ("cell", "tuned", "overrides")})
      for run in plan["runs"]
    )
    return Record(**plan | tuples | dict(directory=directory, published=published, runs=runs))


def outcome(run: pathlib.Path) -> dict[str, Any]:
  """How the run in a directory ended: its last step and the reason of a failure, "" if it is done.

  Raises a UserError if the file is not whole.
  """
  path = run / OUTCOME
  match directory_lib.read_json(path):
    case {"reason": str(), "step": int()} as found:
      return found
  raise UserError(f"{path} is not the outcome of a run; delete it to run it again")


def _differences(old: Sequence[Run], new: Sequence[Run]) -> list[str]:
  """Returns the differences between two plans, a phrase each.

  Further cells and seeds do not count. Further tries of a cell do: its choice may have been made.
  """
  before, after = ({run.name: run.config for run in runs} for runs in (old, new))
  tried = {run.cell for run in old if run.tunes}
  more = [run.name for run in new if run.tunes and run.cell in tried and run.name not in before]
  moved = [f"run {name} is new" for name in more]
  tuned_by = {run.name: run.tuned for run in old if not run.tunes}
  late = {run.cell for run in new if run.tunes} - tried
  for run in new:
    was = tuned_by.get(run.name, run.tuned)
    if run.name in tuned_by and (run.tuned != was or run.tuned in late):
      moved.append(f"run {run.name} is tuned by other runs")
  moved += [f"run {name} is gone" for name in before if name not in after]
  changes = collections.Counter()
  # An older version may not have had all options of today.
  whole = lambda config: json.loads(config_lib.restored(config).to_json()) if config else {}
  for name in before.keys() & after.keys():
    free = config_lib.free_fields(config_lib.restored(after[name]))
    free -= _changed_files(before[name], after[name])
    changes.update(directory_lib.differences(whole(before[name]), after[name], free))
  return moved + [f"{what} in {n} of {len(after)} runs" for what, n in sorted(changes.items())]


def _changed_files(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
  """Fields of two configs that name different files, of which a run keeps copies."""
  old, new = (tasks.find(c["task"]).files(config_lib.restored(c)) for c in (before, after))
  pairs = {k: (user_path(old[k]), user_path(new[k])) for k in old.keys() & new.keys()}
  both = {k: (a, b) for k, (a, b) in pairs.items() if a.is_file() and b.is_file()}
  return {k for k, (a, b) in both.items() if not filecmp.cmp(a, b, shallow=False)}
