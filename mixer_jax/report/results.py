"""The runs of a study as they are found in its directory."""

import dataclasses
import itertools
from typing import Any, Sequence

import ml_collections

from mixer_jax.report.curves import scale
from mixer_jax.rundir import metrics_file, provenance
from mixer_jax.study import record
from mixer_jax.study.plan import Cell, Published, Run
from mixer_jax.study.record import Record, State
from mixer_jax.tasks import Metric

_NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "kfac": "K-FAC", "lamb": "LAMB"}


@dataclasses.dataclass(frozen=True)
class Result:
  """One run with its state, its rows and the sessions of its run.json.

  A row is one of metrics.jsonl with "minutes", the training time until then, and "s/epoch".
  """

  run: Run
  state: State
  rows: list[dict[str, Any]]
  sessions: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class CellResult:
  """The runs of a cell, one a seed.

  Attributes:
    opened: the study.
    cell: a value of each axis.
    panel: the part of it that is told apart by panels and rows.
    line: a name for the rest.
    config: of its runs.
    results: of its runs.
  """

  opened: Record
  cell: Cell
  panel: str
  line: str
  config: ml_collections.ConfigDict
  results: list[Result]

  @property
  def metric(self) -> Metric:
    return self.opened.primary

  @property
  def done(self) -> list[Result]:
    return [r for r in self.results if r.state.kind == "done"]

  @property
  def shown(self) -> list[Result]:
    """The finished runs; as long as there is none, the runs under way."""
    return self.done or [r for r in self.results if r.rows and r.state.kind != "failed"]

  @property
  def published(self) -> Published | None:
    return self.opened.published.get("-".join(self.cell))

  @property
  def selection(self) -> str:
    """The split that picks the best step."""
    rows = [r.rows[-1] for r in self.results if r.rows]
    return record.selection(rows[0], self.metric.name) if rows else "test"

  @property
  def splits(self) -> list[str]:
    """The splits that were evaluated, "test" first."""
    keys, end = [key for r in self.done for key in r.rows[-1]], f"/{self.metric.name}"
    found = dict.fromkeys(["test", *(k.removesuffix(end) for k in keys if k.endswith(end))])
    return [split for split in found if split != "train"]

  def values(self, at: str, split: str = "test") -> list[float]:
    """The metric as it is shown, maybe in percent, of each finished run that has the split.

    Args:
      at: "last" evaluation, or "best" by the split that picks it.
      split: that is measured.
    """
    key, found = f"{split}/{self.metric.name}", []
    for r in self.done:
      step = r.rows[-1]["step" if at == "last" else f"{self.selection}/best_step"]
      found += [row[key] for row in r.rows if row["step"] == step and key in row]
    return [scale(self.metric) * value for value in found]

  def reached(self) -> list[dict[str, Any]]:
    """The row at which each finished run reached the target, of those that did."""
    key, better, found = f"{self.selection}/{self.metric.name}", self.metric.better, []
    for r in self.done:
      hits = (row for row in r.rows if not better(self.config.target, row[key]))
      found += itertools.islice(hits, 1)
    return found


def gather(opened: Record) -> list[CellResult]:
  """Reads the runs of a study, without the runs of its tuning."""
  results = []
  for cell in dict.fromkeys(run.cell for run in opened.runs if not run.tunes):
    runs = [run for run in opened.runs if run.cell == cell and not run.tunes]
    config, values = opened.config(runs[0]), dict(zip(opened.axes, cell))
    panel = ", ".join(values[axis] for axis in opened.panels)
    line = ", ".join(values[axis] for axis in opened.lines)
    if opened.lines == ("optimizer",):
      line = optimizer_name(config.optimizer)
    results.append(CellResult(opened, cell, panel, line, config, [_read(opened, r) for r in runs]))
  return results


def _read(opened: Record, run: Run) -> Result:
  path = opened.path(run)
  rows, seconds, epoch = [], 0.0, 0.0
  for row in metrics_file.read(path):
    seconds += row["seconds"]
    pace = row["seconds"] / (row["epoch"] - epoch)
    epoch = row["epoch"]
    rows.append(row | {"minutes": seconds / 60, "s/epoch": pace})
  return Result(run, opened.state(run), rows, provenance.read(path))


def unit_of(cells: Sequence[CellResult]) -> str:
  """The unit that a study is counted in: "step", unless all its runs are counted in epochs."""
  return max(record.length(c.config)[0] for c in cells)


def optimizer_name(config: ml_collections.ConfigDict) -> str:
  """An optimizer's name as people write it; of a grafted pair (magnitude, direction)."""
  if config.name == "graft":
    return f"({optimizer_name(config.magnitude)}, {optimizer_name(config.direction)})"
  return _NAMES.get(config.name, config.name)
