"""What a study found: tables beside the published ones, figures, and where all is from."""

import pathlib
from typing import Any, Sequence

from flax import traverse_util

from mixer_jax import workdir
from mixer_jax.report import study_figures, study_tables
from mixer_jax.report.results import CellResult, gather
from mixer_jax.study import record
from mixer_jax.study.record import Record


def write(directory: pathlib.Path) -> list[pathlib.Path]:
  """Writes `report/study.md` and its figures into a study's directory.

  Runs that are not finished are named with their state and count in no table.

  Returns:
    The files written.

  Raises:
    UserError: the directory holds no study.
  """
  opened = record.load(directory)
  cells = gather(opened)
  out = directory / "report"
  out.mkdir(exist_ok=True)
  figures = study_figures.draw(cells, out)
  path = out / "study.md"
  path.write_text(text(opened, cells, figures))
  return [path, *figures]


def text(opened: Record, cells: Sequence[CellResult], figures: Sequence[pathlib.Path]) -> str:
  """The report in Markdown."""
  plan = opened.plan
  panels = [axis for axis in plan["axes"] if axis not in plan["lines"]]
  parts = [f"# {plan['title']}", *plan["notes"], _missing(opened)]
  parts += [
    study_tables.results(cells, (", ".join(panels), ", ".join(plan["lines"])), plan["source"]),
    study_tables.grid(cells),
    study_tables.grafting(cells),
    study_tables.tuning(opened),
  ]
  parts += [f"![{figure.stem}]({figure.name})" for figure in figures]
  parts += [_settings(cells), _provenance(opened, cells)]
  return "\n\n".join(part for part in parts if part) + "\n"


def _missing(opened: Record) -> str:
  """The runs that are in no table, and why."""
  states = {run.name: opened.state(run) for run in opened.runs}
  waiting = [name for name, state in states.items() if state.kind == "waiting"]
  lines = [f"- `{n}`: {s}" for n, s in states.items() if s.kind not in ("done", "waiting")]
  if waiting:
    lines.append(f"- not run ({len(waiting)}): {', '.join(f'`{name}`' for name in waiting)}")
  if not lines:
    return ""
  return "\n".join((f"{len(states)} runs are planned; not in the tables below:", "", *lines))


def _settings(cells: Sequence[CellResult]) -> str:
  """What all cells have in common, then what each has of its own; None is a default."""
  flat = [
    {
      key: value
      for key, value in traverse_util.flatten_dict(c.config, sep=".").items()
      if value is not None and key not in ("seed", *workdir.OF_THE_MACHINE)
    }
    for c in cells
  ]
  common = {k: v for k, v in flat[0].items() if all(f.get(k, f) == v for f in flat)}
  say = lambda fields: ", ".join(f"{k}={v}" for k, v in sorted(fields.items()))
  rows = [
    (" ".join(c.cell), say({k: v for k, v in f.items() if k not in common}) or "-")
    for c, f in zip(cells, flat)
  ]
  return "\n\n".join(
    (
      "## Settings",
      f"All: {say(common)}.",
      study_tables.table(("runs", "of their own"), rows, words=2),
    )
  )


def _provenance(opened: Record, cells: Sequence[CellResult]) -> str:
  """Code, versions, device, data and times of the runs in the tables."""
  sessions = [s for c in cells for r in c.results for s in r.sessions]
  if not sessions:
    return f"## Where this is from\n\nStudy file `{opened.plan['file']}`; nothing was run yet."
  versions = _distinct(
    ", ".join(f"{k} {v}" for k, v in s["versions"].items() if v) for s in sessions
  )
  devices = _distinct("{count} x {platform} ({kind})".format(**s["device"]) for s in sessions)
  data = _distinct(
    "{name}: {train_images} training images ({train_split}), {test_images} test images"
    " ({test_split}), {classes} classes".format(**s["data"])
    for s in sessions
  )
  ended = [s["ended"] for s in sessions if s["ended"]]
  rows = [
    (r.run.name, r.state.kind, r.state.epoch, s["started"], s["ended"] or "-", s["commit"] or "-")
    for c in cells
    for r in c.results
    for s in r.sessions
  ]
  return "\n\n".join(
    (
      "## Where this is from",
      f"Study file `{opened.plan['file']}`; each run's directory holds its config.json, metrics.jsonl,"
      " run.json and log.txt.",
      "\n".join(
        (
          f"- code: commit {_distinct(s['commit'] or 'unknown' for s in sessions)}; {versions}",
          f"- device: {devices}",
          f"- data: {data}",
          f"- time: {min(s['started'] for s in sessions)} to {max(ended, default='now')}",
        )
      ),
      study_tables.table(("run", "state", "epochs", "started", "ended", "commit"), rows, words=2),
    )
  )


def _distinct(values: Any) -> str:
  return "; ".join(dict.fromkeys(values))
