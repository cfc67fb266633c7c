"""The figures of a study: curves of its cells, and lengths of grafted steps."""

import pathlib
from typing import Any, Sequence

import numpy as np

from mixer_jax.optim.graft import SIDES
from mixer_jax.report import figures, results
from mixer_jax.report.results import CellResult, Result
from mixer_jax.study import record
from mixer_jax.tasks import Metric

_NORM = "train/norm."
_BAND = "mean of the seeds, shaded from the lowest to the highest"
_LABELS = {
  "minutes": "minutes of training steps\n(without compilation, testing and checkpoints)",
  "share": "share of the run's steps\n(of its time, where runs have equal times)",
}


def draw(
  opened: record.Record, cells: Sequence[CellResult], directory: pathlib.Path
) -> list[pathlib.Path]:
  """Writes epochs.png or steps.png, time.png and step_norms_PANEL.png as far as runs have rows.

  If runs of a panel have different lengths, as for equal times, share.png has them over the share
  of their own length. Last values along an axis that shares its tuning, such as budgets of time,
  are in over_AXIS.png.
  """
  if not (begun := [c for c in cells if c.shown]):
    return []
  unit = results.unit_of(cells)
  places = {unit: f"{unit}s.png", "minutes": "time.png"}
  if len({c.panel for c in begun}) < len({(c.panel, record.length(c.config)) for c in begun}):
    places["share"] = "share.png"
  paths = [_draw_curves(begun, over, directory / name) for over, name in places.items()]
  for axis in opened.shared:
    if axis in opened.panels and (done := [c for c in begun if c.values("last")]):
      paths.append(_draw_last(opened, done, axis, directory / f"over_{axis}.png"))
  for panel in dict.fromkeys(c.panel for c in begun):
    if grafted := [c for c in begun if c.panel == panel and _kinds([c])]:
      name = "_".join(("step_norms", *filter(None, panel.split(", "))))
      paths.append(_draw_norms(grafted, unit, directory / f"{name}.png"))
  return paths


def _draw(axis: Any, found: Sequence[Result], over: str, key: str, scale: float = 1, **style):
  """Draws a column of the rows of some runs, if all have it."""
  if band := results.band([r.rows for r in found], over, key):
    figures.draw_band(axis, band, scale, **style)
    axis.xaxis.get_major_locator().set_params(integer=over not in _LABELS)


def _draw_curves(cells: Sequence[CellResult], over: str, path: pathlib.Path) -> pathlib.Path:
  """Draws a column of panels for each panel of the cells: the metric above, the loss below."""
  panels = list(dict.fromkeys(c.panel for c in cells))
  styles = figures.styles(c.line for c in cells)
  metric = cells[0].metric
  measures = {f"test/{metric.name}": metric}
  if all("test/loss" in r.rows[-1] for c in cells for r in c.shown):
    measures.setdefault("test/loss", Metric("loss", higher_is_better=False))
  size = 1 + 4 * len(panels), 3.5 * len(measures)
  figure, axes = figures.panels(len(measures), len(panels), size)
  for c in cells:
    column, style = axes[:, panels.index(c.panel)], styles[c.line]
    for axis, (key, measure) in zip(column, measures.items()):
      _draw(axis, c.shown, over, key, measure.scale, label=c.line, **style)
      axis.set(xlabel=_LABELS.get(over, over), ylabel=f"test {measure.label}")
    column[0].set_title(c.panel)
    if c.published:
      column[0].axhline(c.published.value, color=style["color"], linestyle=":", linewidth=1)
  for row, measure in zip(axes, measures.values()):
    for axis in () if measure.higher_is_better else row:
      figures.fit_scale(axis)
  figures.legend(figure, axes)
  dotted = "; dotted: value as published" if any(c.published for c in cells) else ""
  figures.head(figure, f"{_BAND}{dotted}")
  return figures.save(figure, path)


def _draw_last(
  opened: record.Record, cells: Sequence[CellResult], over: str, path: pathlib.Path
) -> pathlib.Path:
  """Draws the last values along an axis of the study, a panel for each cell of the other axes."""
  at = opened.axes.index(over)
  ticks = list(dict.fromkeys(run.cell[at] for run in opened.runs if not run.tunes))
  styles, panels = figures.styles(c.line for c in cells), {}
  for c in cells:
    named = zip(opened.axes, c.cell)
    panel = ", ".join(value for axis, value in named if axis in opened.panels and axis != over)
    values = panels.setdefault(panel, {}).setdefault(c.line, {})
    values[ticks.index(c.cell[at])] = c.values("last")
  figure, axes = figures.panels(1, len(panels), (1 + 4 * len(panels), 4))
  for axis, (panel, lines) in zip(axes[0], panels.items()):
    for line, values in lines.items():
      x = sorted(values)
      of = (np.array([f(values[i]) for i in x]) for f in (np.mean, np.min, np.max))
      figures.draw_band(axis, results.Band(x, *of), label=line, **styles[line])
    axis.set(title=panel, xlabel=over, ylabel=f"last test {cells[0].metric.label}")
    axis.set_xticks(range(len(ticks)), ticks)
    if not cells[0].metric.higher_is_better:
      figures.fit_scale(axis)
  figures.legend(figure, axes)
  figures.head(figure, _BAND)
  return figures.save(figure, path)


def _kinds(cells: Sequence[CellResult]) -> list[str]:
  """Returns the kinds of layers whose steps are measured, in the order of the rows."""
  prefix = f"{_NORM}{SIDES[0]}."
  keys = (key for c in cells for r in c.shown for row in r.rows for key in row)
  return list(dict.fromkeys(k.removeprefix(prefix) for k in keys if k.startswith(prefix)))


def _draw_norms(cells: Sequence[CellResult], unit: str, path: pathlib.Path) -> pathlib.Path:
  """Draws both sides' steps: a row for each grafted pair, a column for each kind of layer."""
  kinds, colors = _kinds(cells), {}
  size = 3 * len(kinds), 0.6 + 2.4 * len(cells)
  figure, axes = figures.panels(len(cells), len(kinds), size, sharex=True)
  for row, c in zip(axes, cells):
    for side, line in zip(SIDES, ("-", "--")):
      name = results.optimizer_name(c.config.optimizer[side])
      style = dict(color=colors.setdefault(name, f"C{len(colors)}"), linestyle=line)
      for axis, kind in zip(row, kinds):
        key = f"{_NORM}{side}.{kind}"
        _draw(axis, c.shown, unit, key, label=f"{side}: {name}", **style)
        axis.set_yscale("log")
    row[0].set_ylabel(c.line)
    row[0].legend(fontsize=8)
  for axis, kind in zip(axes[0], kinds):
    axis.set_title(kind.replace("_", " "))
  figure.supxlabel(unit)
  title = "length of the step of both sides before grafting, root mean square between evaluations"
  figures.head(figure, title)
  return figures.save(figure, path)
