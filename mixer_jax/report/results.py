"""The runs of a study as they are found in its directory."""

import math
import pathlib
import statistics
from typing import Any, Mapping, NamedTuple, Sequence

from ml_collections import ConfigDict
import numpy as np

from mixer_jax import tasks
from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file, provenance
from mixer_jax.study import record
from mixer_jax.study.plan import Cell, Published, Run
from mixer_jax.study.record import Record, State
from mixer_jax.tasks import Metric

_NAMES = {
  "sgd": "SGD",
  "adam": "Adam",
  "adamw": "AdamW",
  "adagrad": "Adagrad",
  "lamb": "LAMB",
  "muon": "Muon",
  "shampoo": "Shampoo",
  "soap": "SOAP",
  "kfac": "K-FAC",
  "kfac_adam": "Adam in K-FAC's basis",
  "kfac_muon": "Muon in K-FAC's metric",
}


class Band(NamedTuple):
  """The mean of some runs with the range of their values: [rows] each."""

  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray


class Result(NamedTuple):
  """One run; its rows are those of `rows_of` with the "share" of the run's length."""

  run: Run
  state: State
  rows: list[dict[str, Any]]
  sessions: list[dict[str, Any]]


class CellResult(NamedTuple):
  """The runs of a cell, one a seed."""

  cell: Cell
  panel: str  # its values on the axes that figures show as panels
  line: str  # its values on the other axes, or its optimizer's name
  config: ConfigDict
  metric: Metric  # that is reported
  published: Published | None
  target: float  # a value of the metric; 0: there is none
  results: list[Result]

  @property
  def done(self) -> list[Result]:
    return [r for r in self.results if r.state.kind == "done"]

  @property
  def shown(self) -> list[Result]:
    """The finished runs; as long as there is none, the runs under way."""
    return self.done or [r for r in self.results if r.rows and r.state.kind != "failed"]

  @property
  def selection(self) -> str:
    """The split that picks the best step."""
    return record.selection(next((r.rows[-1] for r in self.results if r.rows), {}))

  def values(self, at: str, split: str = "test") -> list[float]:
    """Returns the metric of each finished run that has the split, as it is shown, maybe in percent.

    `at` is "last", the last evaluation, or "best", the step that the selecting split picked.
    """
    return [self.metric.scale * value for value in self.recorded(at, split)]

  def recorded(self, at: str, split: str = "test") -> list[float]:
    """Returns the numbers of `values` as metrics.jsonl has them."""
    key, found = f"{split}/{self.metric.name}", []
    for r in self.done:
      step = r.rows[-1]["step" if at == "last" else f"{self.selection}/best_step"]
      found += [row[key] for row in r.rows if row["step"] == step and key in row]
    return found

  def reached(self) -> list[dict[str, Any]]:
    """Returns the row at which a finished run reached the target, for each run that did."""
    key, target = f"{self.selection}/{self.metric.name}", self.target
    hits = ([x for x in r.rows if not self.metric.better(target, x[key])] for r in self.done)
    return [rows[0] for rows in hits if rows]


def gather(opened: Record, metric: str = "") -> list[CellResult]:
  """Reads the runs of a study, without those of its tuning, for a metric; "": the primary one.

  The published values and the target of the config belong to the primary metric. Raises a UserError
  if the metric is none of the task's, or is in no row.
  """
  cells = []
  for cell in dict.fromkeys(run.cell for run in opened.runs if not run.tunes):
    runs = [run for run in opened.runs if run.cell == cell and not run.tunes]
    done = (run for run in runs if opened.state(run).kind == "done")
    config = opened.config(next(done, runs[0]))
    unit, length = record.length(config)
    found = []
    for run in runs:
      rows = [row | {"share": row[unit] / length} for row in rows_of(opened.path(run))]
      found.append(Result(run, opened.state(run), rows, provenance.read(opened.path(run))))
    values = dict(zip(opened.axes, cell))
    panel = ", ".join(values[axis] for axis in opened.panels)
    line = ", ".join(values[axis] for axis in opened.lines)
    published = opened.published.get("-".join(cell))
    cells.append(
      CellResult(cell, panel, line, config, opened.primary, published, config.target, found)
    )
  if metric and metric != opened.primary.name:
    chosen = _metric(cells, metric)
    cells = [c._replace(metric=chosen, published=None, target=0.0) for c in cells]
  if opened.lines == ("optimizer",):
    cells = _with_names(cells)
  return [c._replace(target=_target(opened, c, cells)) for c in cells]


def _metric(cells: Sequence[CellResult], name: str) -> Metric:
  """Returns the metric of a name that the user gave."""
  rows = [row for c in cells for r in c.results for row in r.rows]
  there = {key.rpartition("/")[2] for row in rows for key in row if "/" in key}
  task = cells[0].config.task
  allowed = [n for n in (*(m.name for m in tasks.find(task).metrics), "loss") if n in there]
  if name not in allowed:
    raise UserError(f"--metric is {name!r}; allowed: {', '.join(dict.fromkeys(allowed))}")
  return metric_of(task, name)


def metric_of(task: str, column: str) -> Metric:
  """Returns the metric in a column such as "test/best_top1".

  The lower of two values is the better one if the task does not know the metric.
  """
  name = column.rpartition("/")[2].removeprefix("best_")
  known = {metric.name: metric for metric in tasks.find(task).metrics}
  return known.get(name, Metric(name, higher_is_better=False))


def _with_names(cells: list[CellResult]) -> list[CellResult]:
  """Cells whose lines have the optimizer's name, and their own value too if others share it."""
  names = {c.line: optimizer_name(c.config.optimizer) for c in cells}
  alone = lambda line: list(names.values()).count(names[line]) == 1
  said = {line: name if alone(line) else f"{name} ({line})" for line, name in names.items()}
  return [c._replace(line=said[c.line]) for c in cells]


def _target(opened: Record, c: CellResult, cells: Sequence[CellResult]) -> float:
  """The config's target, or the mean last value of the cell of `target_of` in the same panel."""
  if not opened.target_of:
    return c.target
  place = opened.axes.index("optimizer")
  peer = (*c.cell[:place], opened.target_of, *c.cell[place + 1 :])
  [values] = [other.recorded("last", c.selection) for other in cells if other.cell == peer]
  return statistics.fmean(values) if values else 0.0


def rows_of(directory: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows of a run with more columns.

  They are "elapsed" and "minutes", the training time until then, and "epoch_seconds".
  """
  rows, elapsed, step = metrics_file.read(directory), 0.0, 0
  # Use the last row: the epochs in each row are rounded.
  per_epoch = rows[-1]["step"] / (rows[-1]["epoch"] or math.nan) if rows else math.nan
  for row in rows:
    elapsed += row["seconds"]
    of_epoch = row["seconds"] / (row["step"] - step) * per_epoch
    row |= {"elapsed": elapsed, "minutes": elapsed / 60, "epoch_seconds": of_epoch}
    step = row["step"]
  return rows


def band(runs: Sequence[Sequence[Mapping[str, float]]], over: str, key: str) -> Band | None:
  """A column of the rows of some runs over another one, at the steps where all have a finite value.

  It is None if there is no such step.
  """
  finite = lambda row: math.isfinite(row.get(key, math.nan))
  found = [{row["step"]: row for row in rows if finite(row)} for rows in runs]
  steps = [step for step in found[0] if all(step in own for own in found)]
  x, y = (np.array([[own[step][name] for step in steps] for own in found]) for name in (over, key))
  return Band(x.mean(0), y.mean(0), y.min(0), y.max(0)) if steps else None


def unit_of(cells: Sequence[CellResult]) -> str:
  """The unit that a study is counted in: "step", unless all its runs are counted in epochs."""
  return "step" if any(c.config.num_steps for c in cells) else "epoch"


def device(session: Mapping[str, Any]) -> str:
  """Returns the devices of a session of a run, as "1 x gpu (H200)"."""
  return "{count} x {platform} ({kind})".format(**session["device"])


def pairs(fields: Mapping[str, Any]) -> str:
  """Names with their values, as "jax 0.9.1, flax 0.12.6"."""
  return ", ".join(f"{name} {value}" for name, value in fields.items() if value)


def optimizer_name(config: ConfigDict) -> str:
  """An optimizer's name as people write it; of a grafted pair (magnitude, direction)."""
  if config.name == "graft":
    return f"({optimizer_name(config.magnitude)}, {optimizer_name(config.direction)})"
  if config.name == "kfac" and config.get("eigenvalues") in ("batch", "examples"):
    return "EK-FAC"
  corrected = config.name == "shampoo" and config.get("corrected")
  name = _NAMES.get(config.name, config.name) + (", corrected" if corrected else "")
  return f"Nor{name}" if config.get("normuon") else name
