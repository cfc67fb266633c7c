"""The picture of a run's curves."""

import math
import pathlib
from typing import Sequence

from mixer_jax import config as config_lib
from mixer_jax import tasks
from mixer_jax.errors import UserError
from mixer_jax.report import figures, results
from mixer_jax.rundir import metrics_file


def draw(directory: pathlib.Path) -> pathlib.Path:
  """Draws metrics and learning rate of a run to `curves.png`; a UserError if there are none."""
  rows = metrics_file.read(directory)
  if not rows:
    raise UserError(f"{directory} holds no metrics (no lines in {metrics_file.FILE})")
  config = config_lib.of_run(directory)
  metrics = [metric.name for metric in tasks.find(config.task).metrics]
  curves = panels(list(dict.fromkeys(key for row in rows for key in row)), metrics)
  columns = min(4, len(curves))
  lines = math.ceil(len(curves) / columns)
  figure, axes = figures.panels(lines, columns, (4.3 * columns, 3.8 * lines))
  unit = "step" if config.num_steps else "epoch"
  x = [row[unit] for row in rows]
  for axis, (name, keys) in zip(axes.flat, curves.items()):
    metric = results.metric_of(config.task, name)
    for key in keys:
      y = [metric.scale * row.get(key, math.nan) for row in rows]
      axis.plot(x, y, marker=figures.marker(x), label=key)
    axis.set(title=name, xlabel=unit, ylabel=metric.label)
    if name in metrics and not metric.higher_is_better:
      figures.fit_scale(axis)
    axis.grid(alpha=0.3)
    axis.legend()
  for axis in axes.flat[len(curves) :]:
    axis.remove()
  named = (config.get(group, {}).get("name") for group in ("model", "data", "optimizer"))
  figure.suptitle(", ".join(filter(None, named)))
  return figures.save(figure, directory / "curves.png")


def panels(keys: Sequence[str], metrics: Sequence[str]) -> dict[str, list[str]]:
  """The columns of each panel, by the names of metrics, the task's first; then the learning rate.

  Best values and norms of steps are left out.
  """
  found: dict[str, list[str]] = {name: [] for name in metrics}
  for key in keys:
    split, _, name = key.rpartition("/")
    if split and not name.startswith(("best_", "norm.")):
      found.setdefault(name, []).append(key)
  found["learning rate"] = ["learning_rate"]
  return {name: shown for name, shown in found.items() if shown}
