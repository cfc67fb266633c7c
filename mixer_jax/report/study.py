"""The page about a study: tables beside the published values, figures, settings and origins."""

import pathlib
import statistics
from typing import Any, Iterable, Sequence

from flax import traverse_util

from mixer_jax import config as config_lib
from mixer_jax.errors import as_user_error
from mixer_jax.optim.graft import SIDES
from mixer_jax.report import markdown, results, study_figures
from mixer_jax.report.results import CellResult
from mixer_jax.study import plan, record
from mixer_jax.study.record import Record
from mixer_jax.tasks import Metric


def write(directory: pathlib.Path, metric: str = "") -> list[pathlib.Path]:
  """Writes `report/study.md` and its figures into a study's directory, and returns the paths.

  With a metric, such as "loss", its tables and figures go to `report/METRIC/` instead; a column,
  such as "train/loss", stands for its metric. Runs that are not finished are named with their state
  and count in no table.

  Raises:
    UserError: the directory holds no study or cannot be written, or its runs lack the metric.
  """
  metric = metric.rpartition("/")[2]
  opened = record.load(directory)
  cells, out = results.gather(opened, metric), directory / "report" / metric
  with as_user_error(f"{out}: cannot be written", OSError):
    out.mkdir(parents=True, exist_ok=True)
    figures = study_figures.draw(opened, cells, out)
    parts = (
      *(f"# {opened.title}", *opened.notes, _missing(opened), _results(opened, cells, metric)),
      *(_compared(opened, cells), _tuning(opened)),
      *(f"![{figure.stem}]({figure.name})" for figure in figures),
      *(_settings(cells), _origin(opened, cells)),
    )
    path = out / "study.md"
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
  return [path, *figures]


def _section(title: str, *parts: str) -> str:
  return "\n\n".join((f"## {title}", *parts))


def _table(header: Sequence[str], rows: Iterable[Iterable[Any]], words: int = 1) -> str:
  return "\n".join(markdown.table(header, rows, words))


def _spread(values: Sequence[float], mean: str = ".1f", deviation: str = ".1f") -> str:
  """Mean and sample standard deviation; "-" for no value, and one value alone."""
  if not values:
    return "-"
  text = f"{statistics.fmean(values):{mean}}"
  return f"{text} ± {statistics.stdev(values):{deviation}}" if len(values) > 1 else text


def _shown(metric: Metric, values: Sequence[float], sign: str = "") -> str:
  """Mean and deviation of a metric: two decimals of percent, else four digits."""
  mean, deviation = (".2f", ".2f") if metric.percent else (".4g", ".2g")
  return _spread(values, f"{sign}{mean}", deviation)


def _missing(opened: Record) -> str:
  """The runs that are in no table, with their states, and those whose settings are not planned."""
  states = {run.name: opened.state(run) for run in opened.runs}
  waiting = [f"`{name}`" for name, state in states.items() if state.kind == "waiting"]
  lines = [f"- `{n}`: {s}" for n, s in states.items() if s.kind not in ("done", "waiting")]
  lines += [f"- not run ({len(waiting)}): {', '.join(waiting)}"] if waiting else []
  others = {run.name: found for run in opened.runs if (found := opened.unplanned(run))}
  parts = []
  if lines:
    parts += [f"{len(states)} runs are planned; not in the tables below:", "\n".join(lines)]
  if others:
    parts += ["Runs with other settings than planned, as after a change of the study's file:"]
    parts += ["\n".join(f"- `{name}`: {'; '.join(found)}" for name, found in others.items())]
  return "\n\n".join(parts)


def _results(opened: Record, cells: Sequence[CellResult], asked: str) -> str:
  """A row for each cell: our values, the published one and the difference; no empty columns."""
  metric, unit = cells[0].metric, results.unit_of(cells)
  keys = [key.rpartition("/") for c in cells for r in c.done for key in r.rows[-1]]
  splits = dict.fromkeys(
    s for s, _, name in keys if name == metric.name and (asked or s != "train")
  )
  rows = [_row(opened, c, ["test", *splits], unit) for c in cells]
  header = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
  table = _table(header, ([row[name] for name in header] for row in rows), 1 + bool(opened.panels))
  selection = next((c.selection for c in cells if c.done), "test")
  picked = "test set itself picked, which flatters it"
  picked = picked if selection == "test" else f"{selection} set picked"
  picked += f" by {opened.primary.name}" if asked else ""
  better = "higher" if metric.higher_is_better else "lower"
  text = (
    "Values after the last evaluation, mean ± standard deviation over the seeds that finished;"
    f" {better} is better. *Best* is the value at the step that the {picked}. {unit.title()}s and"
    f" minutes to the target, on the {selection} set, are means over the seeds that reached it."
    " Times are of training steps alone, without compilation, testing and checkpoints; s/epoch is"
    " the median of a run."
  )
  if opened.source and not asked:
    text += f" Published: {opened.source}; the difference is of our {opened.published_at} value."
  return _section("Results", table, text)


def _row(opened: Record, c: CellResult, splits: Sequence[str], unit: str) -> dict[str, Any]:
  """Returns the columns of a cell in the table of results; "-" is an empty one."""
  metric, published, ours = c.metric, c.published, c.values(opened.published_at)
  gap = [statistics.fmean(ours) - published.value] if published and ours else []
  epochs = published.epochs_to_target if published else None
  to_target = ("target", f"{unit}s to it", "minutes to it", "share of the run")
  return {
    **({", ".join(opened.panels): c.panel} if opened.panels else {}),
    ", ".join(opened.lines): c.line,
    "seeds": f"{len(c.done)} of {len(c.results)}",
    "length": "{1} {0}s".format(*record.length(c.config)),
    **{f"{split} {metric.label}": _shown(metric, c.values("last", split)) for split in splits},
    f"best test {metric.label}": _shown(metric, c.values("best")),
    **dict(zip(to_target[: 3 + bool(opened.target_of)], _target(c, unit))),
    "s/epoch": _spread([statistics.median(row["epoch_seconds"] for row in r.rows) for r in c.done]),
    "published": _shown(metric, [published.value] if published else []),
    "difference": _shown(metric, gap, "+"),
    "published epochs to target": "-" if epochs is None else epochs,
  }


def _target(c: CellResult, unit: str) -> tuple[str, str, str, str]:
  """Returns the target, the steps or epochs to it, the minutes to it and their share of the run."""
  if not c.target:
    return "-", "-", "-", "-"
  shown, reached = _shown(c.metric, [c.metric.scale * c.target]), c.reached()
  if not reached:
    return shown, "not reached" if c.done else "-", "-", "-"
  mean = lambda column: statistics.fmean(row[column] for row in reached)
  some = f" ({len(reached)} of {len(c.done)})" if len(reached) < len(c.done) else ""
  return shown, f"{mean(unit):.1f}{some}", f"{mean('minutes'):.1f}", f"{mean('share'):.2f}"


def _compared(opened: Record, cells: Sequence[CellResult]) -> str:
  """The metric as in the K-FAC study: models by optimizers, of pairs magnitude by direction."""
  tables, published = {}, any(c.published for c in cells)
  for c in cells:
    corner, row, column = ", ".join(opened.panels), c.panel or c.metric.label, c.line
    if c.config.optimizer.name == "graft":
      values = dict(zip(opened.axes, c.cell))
      place = ", ".join(value for axis, value in values.items() if axis != "optimizer")
      corner = f"{place}: ".removeprefix(": ") + "norm of \\ direction of"
      row, column = (results.optimizer_name(c.config.optimizer[side]) for side in SIDES)
    text = _shown(c.metric, c.values(opened.published_at))
    if published:
      text += f" / {_shown(c.metric, [c.published.value] if c.published else [])}"
    columns = tables.setdefault(corner, {}).setdefault(row, {})
    columns[f"{column} ({c.line})" if column in columns else column] = text
  texts, nothing = [], "- / -" if published else "-"
  for corner, rows in tables.items():
    header = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [(name, *(row.get(column, nothing) for column in header)) for name, row in rows.items()]
    if len(header) > 1 or "direction of" in corner:
      texts.append(_table((corner, *header), lines))
  title = f"{opened.published_at} test {cells[0].metric.label}"
  return _section(title + (", ours / published" if published else ""), *texts) if texts else ""


def _tuning(opened: Record) -> str:
  """Every setting that was tried, with its values on the part held out."""
  metric, rows = opened.primary, []
  if opened.tuned_by:
    metric = Metric(opened.tuned_by, higher_is_better=False)
  value = lambda trial, at: _shown(metric, [] if trial[at] is None else [metric.scale * trial[at]])
  for cell in dict.fromkeys(run.cell for run in opened.runs if run.tunes):
    trials, name = opened.trials(cell), " ".join(cell)
    if trials is None:
      rows.append((name, "not decided", "", "-", "-"))
    for i, trial in enumerate(trials or ()):
      said = (
        ("", "failed", trial["failed"])
        if "failed" in trial
        else ("" if i else "chosen", value(trial, "last"), value(trial, "best"))
      )
      rows.append((name, ", ".join(plan.settings(trial["settings"])), *said))
  if not rows:
    return ""
  header = ("cell", "settings", "", f"last {metric.label}", f"best {metric.label}")
  best = "highest" if metric.higher_is_better else "lowest"
  held_out = ", ".join(f"`{setting}`" for setting in sorted(_held_out(opened)))
  text = (
    f"Values{held_out and ' with '}{held_out}. The {best} after the last evaluation was chosen, then"
    " trained with every seed."
  )
  return _section("Tuning", text, _table(header, rows, words=3))


def _held_out(opened: Record) -> set[str]:
  """Returns the settings of tuning runs, without the ones that differ between tries."""
  tuning, last = (next(r for r in opened.runs if r.tunes == tunes) for tunes in (True, False))
  flat = [traverse_util.flatten_dict(run.config, sep=".") for run in (tuning, last)]
  own = {k: v for k, v in flat[0].items() if flat[1].get(k) != v and k not in tuning.settings}
  return set(plan.settings(own)) - {f"seed={tuning.seed}"}


def _settings(cells: Sequence[CellResult]) -> str:
  """The settings that all cells share, and the others of each; defaults of None are left out."""
  free = config_lib.free_fields(cells[0].config) | {"seed"}
  configs = [traverse_util.flatten_dict(c.config.to_dict(), sep=".") for c in cells]
  sets = [{f"{k}={v}" for k, v in x.items() if v is not None and k not in free} for x in configs]
  common = set.intersection(*sets)
  say = lambda settings: ", ".join(sorted(settings)) or "-"
  rows = [(" ".join(c.cell), say(own - common)) for c, own in zip(cells, sets)]
  table = _table(("runs", "of their own"), rows, words=2)
  return _section("Settings", f"All: {say(common)}.", table)


def _origin(opened: Record, cells: Sequence[CellResult]) -> str:
  """Code, versions, device, data and times of the runs in the tables."""
  runs = [(r, session) for c in cells for r in c.results for session in r.sessions]
  if not runs:
    return _section("Origin", f"Study file `{opened.file}`; nothing was run yet.")
  said = {
    "commit": [s["commit"] or "unknown" for _, s in runs],
    "versions": [results.pairs(s["versions"]) for _, s in runs],
    "device": [results.device(s) for _, s in runs],
    "data": [results.pairs(s["data"]) for _, s in runs],
  }
  rows = [
    (r.run.name, r.state.kind, s["started"], s["ended"] or "-", s["commit"] or "-") for r, s in runs
  ]
  return _section(
    "Origin",
    f"Study file `{opened.file}`; each run's directory holds its config.json, metrics.jsonl,"
    " run.json and log.txt.",
    "\n".join(f"- {what}: {'; '.join(dict.fromkeys(of))}" for what, of in said.items()),
    _table(("run", "state", "started", "ended", "commit"), rows, words=2),
  )
