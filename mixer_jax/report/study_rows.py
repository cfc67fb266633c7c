"""The runs of a study as rows of a CSV file, one number each: those of `results/`."""

import csv
import pathlib
import re
from typing import Any, Iterator

from mixer_jax.errors import as_user_error
from mixer_jax.report import results
from mixer_jax.rundir import provenance
from mixer_jax.study import plan, record

COLUMNS = (
  *("study", "model", "data", "optimizer", "settings", "budget", "seed"),
  *("metric", "value", "device", "versions", "commit", "command"),
)
# Axes with a column of their own; values of the others are settings.
_NAMED = ("model", "data", "optimizer", "budget")


def write(directory: pathlib.Path, path: pathlib.Path) -> int:
  """Writes the last evaluations of a study's finished runs, and returns the number of rows.

  A UserError if the directory holds no study, or the file cannot be written.
  """
  opened = record.load(directory)
  done = (run for run in opened.runs if opened.state(run).kind == "done")
  found = [row for run in done for row in _rows(opened, run)]
  with as_user_error(f"{path}: cannot be written", OSError), path.open("w", newline="") as file:
    writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
  return len(found)


def _rows(opened: record.Record, run: plan.Run) -> Iterator[dict[str, Any]]:
  """Returns the rows of a run, one for each number of its last evaluation and one for its time."""
  config, written = opened.config(run), results.rows_of(opened.path(run))
  own, trials = dict(zip(opened.axes, run.cell)), [] if run.tunes else opened.trials(run.tuned)
  tuned = run.settings or (trials[0]["settings"] if trials else {})
  settings = {axis: value for axis, value in own.items() if axis not in _NAMED}
  settings |= {field.removeprefix("optimizer."): value for field, value in tuned.items()}
  sessions = provenance.read(opened.path(run))
  joined = lambda texts: "; ".join(dict.fromkeys(texts))
  overrides = [f"--config.{override}" for override in (*run.overrides, *plan.settings(tuned))]
  unit, length = record.length(config)
  common = {
    "study": pathlib.Path(opened.file).stem,
    "model": own.get("model") or config.get("model", {}).get("name"),
    "data": own.get("data") or config.get("data", {}).get("name"),
    "optimizer": results.optimizer_name(config.optimizer),
    "settings": "; ".join(plan.settings(settings)),
    "budget": own.get("budget") or f"{length} {unit}s",
    "seed": run.seed,
    "device": joined(map(results.device, sessions)),
    "versions": joined(results.pairs(s["versions"]) for s in sessions),
    "commit": joined(s["commit"] or "unknown" for s in sessions),
    "command": " ".join(
      [f"python -m mixer_jax.main --config={opened.file}:{run.name}", *overrides]
    ),
  }
  for key, value in written[-1].items():
    if "/" in key:
      metric = results.metric_of(config.task, key)
      name, unit = _measure(key, run.tunes), "%" if metric.percent else metric.unit
      value = f"{metric.scale * value:.6g}"
      yield common | {"metric": f"{name}{unit and f' [{unit}]'}", "value": value}
  yield common | {"metric": "training time [min]", "value": f"{written[-1]['minutes']:.4g}"}


def _measure(key: str, tunes: bool) -> str:
  """What a column of metrics.jsonl measures, as "test best top-1"."""
  split, _, name = key.rpartition("/")
  split = "validation" if tunes and split == "test" else split  # a try sees no test image
  name = re.sub(r"^(best_)?top(\d)$", r"\1top-\2", name)
  return f"{split} {re.sub('^best_', 'best ', name)}"
