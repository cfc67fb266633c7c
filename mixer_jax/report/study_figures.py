"""The figures of a study: curves of its cells, and lengths of grafted steps."""

import pathlib
from typing import Sequence

import numpy as np

from mixer_jax import step_norms
from mixer_jax.report import figures
from mixer_jax.report.results import CellResult, Result, optimizer_name

_MEASURES = (("test/top1", "test top-1"), ("test/loss", "test loss (nats)"))


def draw(cells: Sequence[CellResult], directory: pathlib.Path) -> list[pathlib.Path]:
  """Draws all figures for which there is something to draw.

  Args:
    cells: of the study.
    directory: where the files go; it exists.

  Returns:
    The files written: epochs.png, time.png and step_norms_PANEL.png.
  """
  begun = [c for c in cells if _shown(c)]
  if not begun:
    return []
  paths = [_draw_curves(begun, over, directory / f"{over}.png") for over in ("epochs", "time")]
  panels = dict.fromkeys(c.panel for c in begun)
  for panel in panels:
    grafted = [c for c in begun if c.panel == panel and _has_norms(c)]
    if grafted:
      name = f"step_norms_{panel.replace(', ', '_')}.png" if panel else "step_norms.png"
      paths.append(_draw_norms(grafted, directory / name))
  return paths


def _shown(c: CellResult) -> list[Result]:
  """The finished runs; as long as there is none, those under way."""
  return c.done or [r for r in c.results if r.rows and r.state.kind != "failed"]


def band(runs: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean, lowest and highest of some curves, as far as the shortest goes."""
  shortest = min(map(len, runs))
  values = np.array([run[:shortest] for run in runs])
  return values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def _draw_curves(cells: Sequence[CellResult], over: str, path: pathlib.Path) -> pathlib.Path:
  """A column a panel: accuracy above, loss below; the mean of the seeds and their range."""
  panels = list(dict.fromkeys(c.panel for c in cells))
  colors = {line: f"C{i}" for i, line in enumerate(dict.fromkeys(c.line for c in cells))}
  figure, axes = figures.panels(2, len(panels), (1 + 4 * len(panels), 7))
  for c in cells:
    column, color = axes[:, panels.index(c.panel)], colors[c.line]
    x = _x(c, over)
    for axis, (name, label) in zip(column, _MEASURES):
      mean, low, high = band([[row[name] for row in r.rows] for r in _shown(c)])
      axis.plot(x, mean, color=color, label=c.line, marker="." if len(mean) < 30 else "")
      axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
      axis.set(xlabel=_LABELS[over], ylabel=label)
      axis.xaxis.get_major_locator().set_params(integer=over == "epochs")
    if c.published:
      column[0].axhline(c.published.top1 / 100, color=color, linestyle=":", linewidth=1)
  for panel, column in zip(panels, axes.T):
    column[0].set_title(panel)
    for axis in column:
      axis.grid(alpha=0.3)
      axis.legend(fontsize=8)
  published = "; dotted: best accuracy as published" if any(c.published for c in cells) else ""
  figure.suptitle(
    f"mean of the seeds, shaded from the lowest to the highest{published}", fontsize=10
  )
  return figures.save(figure, path)


_LABELS = {
  "epochs": "epoch",
  "time": "minutes of training steps\n(without compilation, testing and checkpoints)",
}


def _x(c: CellResult, over: str) -> np.ndarray:
  """Epochs, or the minutes at which they end, the mean of the seeds."""
  minutes = band([r.seconds for r in _shown(c)])[0] / 60
  return minutes if over == "time" else np.arange(1, len(minutes) + 1)


def _has_norms(c: CellResult) -> bool:
  return any(key.startswith("train/norm/") for key in _shown(c)[0].rows[0])


def _draw_norms(cells: Sequence[CellResult], path: pathlib.Path) -> pathlib.Path:
  """A row a grafted pair, a column a kind of layer: both sides over the epochs."""
  groups, colors = step_norms.GROUPS, {}
  size = 3 * len(groups), 0.6 + 2.4 * len(cells)
  figure, axes = figures.panels(len(cells), len(groups), size, sharex=True)
  for row, c in zip(axes, cells):
    for side, style in zip(step_norms.SIDES, ("-", "--")):
      name = optimizer_name(c.config["optimizer"][side])
      color = colors.setdefault(name, f"C{len(colors)}")
      for axis, group in zip(row, groups):
        key = f"train/norm/{side}/{group}"
        curves = [[r[key] for r in result.rows if key in r] for result in _shown(c)]
        if not all(curves):
          continue
        mean, low, high = band(curves)
        x = np.arange(1, len(mean) + 1)
        axis.plot(x, mean, style, color=color, label=f"{side}: {name}")
        axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        axis.set_yscale("log")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    row[0].set_ylabel(c.line)
    row[0].legend(fontsize=8)
  for axis, group in zip(axes[0], groups):
    axis.set_title(group.replace("_", " "))
  figure.supxlabel("epoch")
  figure.suptitle(
    "length of the step of both sides before grafting, root mean square over an epoch", fontsize=10
  )
  return figures.save(figure, path)
