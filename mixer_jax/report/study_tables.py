"""The tables of a study in Markdown, the published figures beside ours."""

import collections
import statistics
from typing import Any, Sequence

from mixer_jax.report.results import CellResult, optimizer_name
from mixer_jax.study.plan import Published
from mixer_jax.study.record import Record


def spread(values: Sequence[float], digits: int = 2) -> str:
  """Mean and sample standard deviation; "-" for none, the value alone for one."""
  if not values:
    return "-"
  mean = f"{statistics.fmean(values):.{digits}f}"
  return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], words: int = 1) -> str:
  """A Markdown table; the first `words` columns are text, the others numbers."""
  rule = [":--"] * words + ["--:"] * (len(header) - words)
  lines = (header, rule, *([str(value) for value in row] for row in rows))
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results(cells: Sequence[CellResult], names: tuple[str, str], source: str) -> str:
  """A row for each cell: ours, the published figure and the difference.

  Args:
    cells: of the study.
    names: headings for what panels and what lines tell apart.
    source: of the published figures.
  """
  rows = []
  for c in cells:
    published = c.published
    gap = f"{statistics.fmean(c.best) - published.top1:+.2f}" if published and c.best else "-"
    rows.append(
      (
        *(c.panel or "-", c.line, f"{len(c.done)} of {len(c.results)}", c.config["num_epochs"]),
        *(spread(c.best), spread(c.last), *_target(c), spread(c.seconds_per_epoch, 1)),
        *(f"{published.top1:.2f}" if published else "-", gap, _published_epochs(published)),
      )
    )
  header = (
    *(*names, "seeds", "epochs", "best top-1 (%)", "last top-1 (%)"),
    *("target (%)", "epochs to it", "minutes to it", "s/epoch"),
    *("published (%)", "difference", "published epochs to target"),
  )
  return "\n\n".join(
    (
      "## Results",
      table(header, rows, words=2),
      "Test accuracy, mean ± standard deviation over the seeds that finished. *Best* is that of the"
      " best epoch, picked by the test set itself, as the study reports it; *last* is that of the last"
      " epoch. Epochs count from 1; epochs and minutes to the target are means over the seeds that"
      " reached it. Times are of training steps alone, without compilation, testing and checkpoints;"
      " s/epoch is the median of a run's epochs." + (f" Published: {source}." if source else ""),
    )
  )


def _target(c: CellResult) -> tuple[str, str, str]:
  target = c.config["target_accuracy"]
  if not target or not c.done:
    return (f"{100 * target:.0f}" if target else "-", "-", "-")
  if not c.reached:
    return f"{100 * target:.0f}", "not reached", "-"
  epochs, seconds = zip(*c.reached)
  some = f" ({len(epochs)} of {len(c.done)})" if len(epochs) < len(c.done) else ""
  return (
    f"{100 * target:.0f}",
    f"{statistics.fmean(epochs):.1f}{some}",
    f"{statistics.fmean(seconds) / 60:.1f}",
  )


def _published_epochs(published: Published | None) -> str:
  epochs = published.epochs_to_target if published else None
  return "-" if epochs is None else str(epochs)


def grid(cells: Sequence[CellResult]) -> str:
  """Best accuracy in the form of the study's Tables 2 and 3: models by optimizers."""
  chosen = [c for c in cells if c.config["optimizer"]["name"] != "graft"]
  lines = list(dict.fromkeys(c.line for c in chosen))
  if len(lines) < 2:
    return ""
  at = {(c.panel, c.line): c for c in chosen}
  panels = list(dict.fromkeys(c.panel for c in chosen))
  rows = [(panel or "-", *(_ours(at.get((panel, line))) for line in lines)) for panel in panels]
  return "\n\n".join(("## Best top-1 (%), ours / published", table(("model", *lines), rows)))


def grafting(cells: Sequence[CellResult]) -> str:
  """Best accuracy in the form of the study's Table 4: magnitude by direction."""
  panels = collections.defaultdict(dict)
  for c in cells:
    if c.config["optimizer"]["name"] == "graft":
      sides = (optimizer_name(c.config["optimizer"][s]) for s in ("magnitude", "direction"))
      panels[c.panel][tuple(sides)] = c
  parts = ["## Grafting: best top-1 (%), ours / published"] if panels else []
  for panel, pairs in panels.items():
    directions = list(dict.fromkeys(d for _, d in pairs))
    rows = [
      (m, *(_ours(pairs.get((m, d))) for d in directions))
      for m in dict.fromkeys(m for m, _ in pairs)
    ]
    parts.append(table((f"{panel}: norm of \\ direction of", *directions), rows))
  return "\n\n".join(parts)


def _ours(c: CellResult | None) -> str:
  published = c.published if c else None
  return f"{spread(c.best) if c else '-'} / {f'{published.top1:.2f}' if published else '-'}"


def tuning(opened: Record) -> str:
  """Every setting that was tried, with what it gave on the validation split."""
  rows = []
  for cell in dict.fromkeys(run.cell for run in opened.runs if run.candidate is not None):
    choice = opened.choice(cell) or {"chosen": None, "trials": []}
    for trial in choice["trials"]:
      said = ", ".join(f"{field}={value}" for field, value in trial["settings"].items())
      figures = (
        ("failed", trial["failed"])
        if "failed" in trial
        else (f"{100 * trial['last_top1']:.2f}", f"{100 * trial['best_top1']:.2f}")
      )
      mark = "chosen" if trial["run"] == choice["chosen"] else ""
      rows.append((" ".join(cell), said, mark, *figures))
    if not choice["trials"]:
      rows.append((" ".join(cell), "not decided", "", "-", "-"))
  if not rows:
    return ""
  header = ("cell", "settings", "", "last top-1 (%)", "best top-1 (%)")
  return "\n\n".join(
    (
      "## Tuning",
      "Accuracy on a part of the training set that was not trained on; the highest after the last"
      " epoch was chosen, then trained on the whole training set with every seed.",
      table(header, rows, words=3),
    )
  )
