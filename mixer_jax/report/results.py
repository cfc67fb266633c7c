"""The runs of a study as they are found in its directory."""

import math
import statistics
from typing import Any, NamedTuple, Sequence

from ml_collections import ConfigDict

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


class Result(NamedTuple):
  """One run; a row of metrics.jsonl has "minutes", the training time until then, and "s/epoch"."""

  run: Run
  state: State
  rows: list[dict[str, Any]]
  sessions: list[dict[str, Any]]


class CellResult(NamedTuple):
  """The runs of a cell, one a seed.

  `panel` has its values on the axes that figures show as panels, `line` its values on the others.

  `target` is a value of the metric, 0 if there is none.
  """

  cell: Cell
  panel: str
  line: str
  config: ConfigDict
  metric: Metric
  published: Published | None
  target: float
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
    row = next((r.rows[-1] for r in self.results if r.rows), {})
    return record.selection(row, self.metric.name)

  def values(self, at: str, split: str = "test") -> list[float]:
    """The metric as it is shown, maybe in percent, of each finished run that has the split.

    It is of the "last" evaluation, or the "best" `at` the split that picks it.
    """
    return [self.metric.scale * value for value in self.recorded(at, split)]

  def recorded(self, at: str, split: str = "test") -> list[float]:
    """The numbers of `values` as metrics.jsonl has them."""
    key, found = f"{split}/{self.metric.name}", []
    for r in self.done:
      step = r.rows[-1]["step" if at == "last" else f"{self.selection}/best_step"]
      found += [row[key] for row in r.rows if row["step"] == step and key in row]
    return found

  def reached(self) -> list[dict[str, Any]]:
    """The row at which a finished run reached the target, for each run that did."""
    key, target = f"{self.selection}/{self.metric.name}", self.target
    hits = ([x for x in r.rows if not self.metric.better(target, x[key])] for r in self.done)
    return [rows[0] for rows in hits if rows]


def gather(opened: Record) -> list[CellResult]:
  """Reads the runs of a study, without the runs of its tuning."""
  results = []
  for cell in dict.fromkeys(run.cell for run in opened.runs if not run.tunes):
    runs = [run for run in opened.runs if run.cell == cell and not run.tunes]
    done = [run for run in runs if opened.state(run).kind == "done"]
    config, values = opened.config((done or runs)[0]), dict(zip(opened.axes, cell))
    panel = ", ".join(values[axis] for axis in opened.panels)
    line = ", ".join(values[axis] for axis in opened.lines)
    published, found = opened.published.get("-".join(cell)), [_read(opened, run) for run in runs]
    about = cell, panel, line, config, opened.primary, published, config.target
    results.append(CellResult(*about, found))
  if opened.lines == ("optimizer",):
    results = _with_names(results)
  return [c._replace(target=_target(opened, c, results)) for c in results]


def _with_names(cells: list[CellResult]) -> list[CellResult]:
  """Cells whose lines have the optimizer's name, and their own value too if others share it."""
  names = {c.line: optimizer_name(c.config.optimizer) for c in cells}
  alone = lambda line: list(names.values()).count(names[line]) == 1
  said = {line: name if alone(line) else f"{name} ({line})" for line, name in names.items()}
  return [c._replace(line=said[c.line]) for c in cells]


def _target(opened: Record, c: CellResult, results: Sequence[CellResult]) -> float:
  """The config's target, or the mean last value of the cell of `target_of` in the same panel."""
  if not opened.target_of:
    return c.target
  place = opened.axes.index("optimizer")
  peer = (*c.cell[:place], opened.target_of, *c.cell[place + 1 :])
  [values] = [other.recorded("last", c.selection) for other in results if other.cell == peer]
  return statistics.fmean(values) if values else 0.0


def _read(opened: Record, run: Run) -> Result:
  rows, seconds, step = metrics_file.read(opened.path(run)), 0.0, 0
  # Of the last row, for the rows' epochs are rounded.
  per_epoch = rows[-1]["step"] / (rows[-1]["epoch"] or math.nan) if rows else math.nan
  for i, row in enumerate(rows):
    seconds += row["seconds"]
    of_epoch = row["seconds"] / (row["step"] - step) * per_epoch
    rows[i], step = row | {"minutes": seconds / 60, "s/epoch": of_epoch}, row["step"]
  return Result(run, opened.state(run), rows, provenance.read(opened.path(run)))


def unit_of(cells: Sequence[CellResult]) -> str:
  """The unit that a study is counted in: "step", unless all its runs are counted in epochs."""
  return "step" if any(c.config.num_steps for c in cells) else "epoch"


def optimizer_name(config: ConfigDict) -> str:
  """An optimizer's name as people write it; of a grafted pair (magnitude, direction)."""
  if config.name == "graft":
    return f"({optimizer_name(config.magnitude)}, {optimizer_name(config.direction)})"
  if config.name == "kfac" and config.get("eigenvalues") in ("batch", "examples"):
    return "EK-FAC"
  corrected = config.name == "shampoo" and config.get("corrected")
  return _NAMES.get(config.name, config.name) + (", corrected" if corrected else "")
