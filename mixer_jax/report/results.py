"""The runs of a study as they are found in its directory."""

import collections
import dataclasses
import statistics
from typing import Any

from mixer_jax import provenance, workdir
from mixer_jax.study.plan import Cell, Published, Run
from mixer_jax.study.record import Record, State

_NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "kfac": "K-FAC", "lamb": "LAMB"}


@dataclasses.dataclass(frozen=True)
class Result:
  """What one run wrote.

  Attributes:
    run: which.
    state: how far it is.
    rows: of its metrics.jsonl.
    sessions: of its run.json.
  """

  run: Run
  state: State
  rows: list[dict[str, Any]]
  sessions: list[dict[str, Any]]

  @property
  def seconds(self) -> list[float]:
    """Training time until the end of each epoch."""
    total, ends = 0.0, []
    for row in self.rows:
      total += row["seconds_per_epoch"]
      ends.append(total)
    return ends


@dataclasses.dataclass(frozen=True)
class CellResult:
  """The runs of a cell, one a seed.

  Attributes:
    cell: a value of each axis.
    panel: the part of it that is told apart by panels and rows.
    line: a name for the rest.
    config: of its runs.
    published: somebody's figures, or None.
    results: of its runs.
  """

  cell: Cell
  panel: str
  line: str
  config: dict[str, Any]
  published: Published | None
  results: list[Result]

  @property
  def done(self) -> list[Result]:
    return [r for r in self.results if r.state.kind == "done"]

  @property
  def best(self) -> list[float]:
    """Highest test accuracy of each finished run, in percent."""
    return [100 * r.rows[-1]["test/best_top1"] for r in self.done]

  @property
  def last(self) -> list[float]:
    """Test accuracy after the last epoch of each finished run, in percent."""
    return [100 * r.rows[-1]["test/top1"] for r in self.done]

  @property
  def reached(self) -> list[tuple[int, float]]:
    """Epoch and training seconds at which finished runs reached the target."""
    epochs = [(r, r.rows[-1]["test/target_epoch"]) for r in self.done]
    return [(epoch, r.seconds[epoch - 1]) for r, epoch in epochs if epoch]

  @property
  def seconds_per_epoch(self) -> list[float]:
    """Median over the epochs of each finished run."""
    return [statistics.median(row["seconds_per_epoch"] for row in r.rows) for r in self.done]


def gather(opened: Record) -> list[CellResult]:
  """Reads the runs of a study, those of tuning apart (`study_tables.tuning`)."""
  by_cell = collections.defaultdict(list)
  for run in opened.runs:
    if run.candidate is None:
      by_cell[run.cell].append(run)
  axes, lines = list(opened.plan["axes"]), opened.plan["lines"]
  results = []
  for cell, runs in by_cell.items():
    config = opened.config(runs[0])
    values = dict(zip(axes, cell))
    line = (
      optimizer_name(config["optimizer"])
      if lines == ["optimizer"]
      else ", ".join(values[axis] for axis in lines)
    )
    panel = ", ".join(values[axis] for axis in axes if axis not in lines)
    read = [_read(opened, run) for run in runs]
    results.append(CellResult(cell, panel, line, config, opened.published.get(cell), read))
  return results


def _read(opened: Record, run: Run) -> Result:
  path = opened.path(run)
  return Result(run, opened.state(run), workdir.read_metrics(path), provenance.read(path))


def optimizer_name(config: dict[str, Any]) -> str:
  """As people write it; of a grafted pair (magnitude, direction)."""
  if config["name"] == "graft":
    return f"({optimizer_name(config['magnitude'])}, {optimizer_name(config['direction'])})"
  return _NAMES.get(config["name"], config["name"])
