"""Several runs in one picture: a metric over training time, steps, epochs or another metric."""

import glob
import hashlib
import itertools
import json
import logging
import math
import os
import pathlib
from typing import Any, NamedTuple, Sequence

from flax import traverse_util
import numpy as np

from mixer_jax import config as config_lib
from mixer_jax import tasks
from mixer_jax.errors import UserError
from mixer_jax.paths import user_path
from mixer_jax.report import figures
from mixer_jax.report.results import optimizer_name
from mixer_jax.report.study_figures import band
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.rundir import metrics_file
from mixer_jax.study import record
from mixer_jax.tasks import Metric

_LOG = logging.getLogger(__name__)

# Free fields, or groups, that decide on metrics.
_MEASURING = ("data.dir", "data.vocabulary", "knn.", "beams", "length_penalty")
# Fields that decide on the examples a metric is of.
_EXAMPLES = ("task", "data.name", "data.train_split", "data.test_split")

OVER = {
  "seconds": "seconds of training steps (without compilation, testing and checkpoints)",
  "step": "step",
  "epoch": "epoch",
}


class Line(NamedTuple):
  """The mean of runs that differ in their seeds, with the range of their values: [rows] each."""

  label: str
  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray


def compare(
  runs: Sequence[str], key: str, over: str, path: pathlib.Path, log: bool = False
) -> list[str]:
  """Draws a metric of some runs and returns a line about each: its last value, its time to others'.

  Args:
    runs: directories or patterns of them, "[LABEL=]DIR". Runs of one label, or of one config but
      for the seed, are a line, which is named after its optimizer unless there is a label.
    key: the metric, as "train/loss".
    over: one of `OVER`; or another metric, as "test/top1": each line is then a point, the last
      values of both with the range of its runs, as in Figure 4 of the ResMLP paper.
    path: the file of the picture.
    log: whether both axes are logarithmic.

  Raises:
    UserError: there is no such run, a run lacks the metric, or the file cannot be written.
  """
  groups = _groups(runs)
  config = next(iter(groups.values()))[0][1]
  metric = _metric(config, key)
  _tell_differences([config for found in groups.values() for _, config in found])
  if "/" in over:
    return _against(groups, key, over, path, log)
  if over not in OVER:
    raise UserError(f"--over is {over!r}; allowed: {', '.join(OVER)} or a metric as test/loss")
  lines = [_line(label, [d for d, _ in found], key, over) for label, found in groups.items()]
  figure, ((axis,),) = figures.panels(1, 1, (7, 4))
  styles = figures.styles(groups)
  for line in lines:
    mean, low, high = (metric.scale * y for y in line[2:])
    axis.plot(line.x, mean, marker=figures.marker(line.x), label=line.label, **styles[line.label])
    axis.fill_between(line.x, low, high, color=styles[line.label]["color"], alpha=0.2, linewidth=0)
  split, _, _ = key.rpartition("/")
  axis.set(xlabel=OVER[over], ylabel=f"{split} {metric.label}".strip())
  _finish(figure, axis, path, log)
  return [_said(line, lines, metric, over) for line in lines]


def _against(
  groups: dict[str, list], key: str, over: str, path: pathlib.Path, log: bool
) -> list[str]:
  """Draws the last value of a metric against that of another one, a point for each label."""
  config = next(iter(groups.values()))[0][1]
  figure, ((axis,),) = figures.panels(1, 1, (6, 5))
  said, marks = [], figures.marks(groups)
  for label, found in groups.items():
    flags, runs = {"--over": over, "--metric": key}, [d for d, _ in found]
    lines = [_line(label, runs, name, "step", flag) for flag, name in flags.items()]
    (x, *_), (y, *_) = points = [[line.mean[-1], line.low[-1], line.high[-1]] for line in lines]
    scales = [_metric(config, name).scale for name in (over, key)]
    errors = [[[s * (m - low)], [s * (high - m)]] for s, (m, low, high) in zip(scales, points)]
    axis.errorbar(scales[0] * x, scales[1] * y, errors[1], errors[0], label=label, **marks[label])
    shown = (f"{name} {_metric(config, name).shown(v)}" for name, v in ((over, x), (key, y)))
    said.append(f"{label}: {', '.join(shown)}")
  named = (f"{n.rpartition('/')[0]} {_metric(config, n).label}".strip() for n in (over, key))
  axis.set(**dict(zip(("xlabel", "ylabel"), named)))
  _finish(figure, axis, path, log)
  return said


def _finish(figure: Any, axis: Any, path: pathlib.Path, log: bool) -> None:
  if log:
    _make_logarithmic(axis)
  axis.grid(alpha=0.3, which="both")
  figures.legend(figure, axis)
  figures.save(figure, path)


def _make_logarithmic(axis: Any) -> None:
  """Logarithmic axes with ticks at 1, 2 and 5, in plain numbers."""
  from matplotlib.ticker import LogLocator  # late, as in `figures`

  axis.set(xscale="log", yscale="log")
  for side in (axis.xaxis, axis.yaxis):
    side.set_major_locator(LogLocator(subs=(1, 2, 5)))
    side.set_major_formatter("{x:g}")
    side.set_minor_formatter("")


def _groups(runs: Sequence[str]) -> dict[str, list[tuple[pathlib.Path, Any]]]:
  """The directories and configs of runs, by the labels of their lines."""
  groups: dict[tuple[str, str], list[tuple[pathlib.Path, Any]]] = {}
  for given in runs:
    label, pattern = ("", given) if _globbed(given) else given.partition("=")[::2]
    found = sorted(p for p in map(pathlib.Path, _globbed(pattern)) if metrics_file.read(p))
    failed = [p for p in found if _failed(p)]
    if len(failed) < len(found):  # one alone, or all, are meant
      found = [p for p in found if p not in failed]
      for path in failed:
        _LOG.warning("%s failed, and is left out", path)
    if not found:
      raise UserError(f"--runs has {given!r}; no run with metrics is there")
    for directory in found:
      config = config_lib.of_run(directory)
      group = groups.setdefault((label, "" if label else _same(directory, config)), [])
      if not any(directory.samefile(other) for other, _ in group):  # two patterns may find it
        group.append((directory, config))
  names = [label or optimizer_name(found[0][1].optimizer) for (label, _), found in groups.items()]
  folders = [found[0][0] for found in groups.values()]
  longer = [f"{name}, {folder.name}" for name, folder in zip(names, folders)]
  longest = [f"{name}, {folder}" for name, folder in zip(names, folders)]
  of_all = zip(names, longer, longest)
  labels = [a if names.count(a) == 1 else b if longer.count(b) == 1 else c for a, b, c in of_all]
  return dict(zip(labels, groups.values()))


def _tell_differences(configs: Sequence[Any]) -> None:
  """Warns of runs whose metrics are of different tasks or examples."""
  for field in _EXAMPLES:
    group, _, name = field.rpartition(".")
    found = {
      str((config.get(group) or {}).get(name) if group else config[name]) for config in configs
    }
    if len(found) > 1:
      _LOG.warning("The runs differ in %s: %s", field, ", ".join(sorted(found)))


def _globbed(pattern: str) -> list[str]:
  """The directory of this very name, or all that fit a pattern; directories may have brackets."""
  path = user_path(pattern)
  if not pattern or os.path.exists(path):
    return [str(path)] if pattern else []
  root = next(filter(os.path.exists, path.parents))
  return glob.glob(os.path.join(glob.escape(str(root)), path.relative_to(root)))


def _failed(run: pathlib.Path) -> bool:
  """Whether a study has recorded that a run failed."""
  path = run / record.OUTCOME
  return path.exists() and bool(record.outcome(path)["reason"])


def _same(directory: pathlib.Path, config: Any) -> str:
  """All of a run's config that decides on results, but for the seed; of its files the content."""
  free = {name for name in config_lib.free_fields(config) if not name.startswith(_MEASURING)}
  flat = traverse_util.flatten_dict(json.loads(config.to_json()), sep=".")
  for field, copy in directory_lib.kept_files(directory).items():
    flat[field] = hashlib.sha256(copy.read_bytes()).hexdigest()
  return repr({name: value for name, value in flat.items() if name not in free | {"seed"}})


def _metric(config: Any, key: str) -> Metric:
  name = key.rpartition("/")[2].removeprefix("best_")
  known = {metric.name: metric for metric in tasks.find(config.task).metrics}
  return known.get(name, Metric(name, higher_is_better=False))


def _line(
  label: str, directories: Sequence[pathlib.Path], key: str, over: str, flag: str = "--metric"
) -> Line:
  curves = []
  for directory in directories:
    rows = metrics_file.read(directory)
    seconds = itertools.accumulate(row["seconds"] for row in rows)
    points = [(t, row) for t, row in zip(seconds, rows) if math.isfinite(row.get(key, math.nan))]
    if not points:
      there = ", ".join(name for name in rows[-1] if "/" in name)
      raise UserError(f"{flag} is {key!r}; {directory} has {there}")
    place = lambda t, row: t if over == "seconds" else row[over]
    curves.append({row["step"]: (place(t, row), row[key]) for t, row in points})
  shared = [step for step in curves[0] if all(step in curve for curve in curves)]
  if not shared:
    raise UserError(f"the runs of {label} were evaluated at no step that all of them share")
  if (most := max(map(len, curves))) > len(shared):
    _LOG.warning("%s: of up to %d rows, the %d at steps of all runs", label, most, len(shared))
  xs, ys = ([[curve[step][i] for step in shared] for curve in curves] for i in (0, 1))
  return Line(label, band(xs)[0], *band(ys))


def _said(line: Line, lines: Sequence[Line], metric: Metric, over: str) -> str:
  """The last value of a line, and the first time that it is as good as the last of another.

  The other's own time is the first at which it was as good.
  """
  unit = "s" if over == "seconds" else f"{over}s"
  parts = [f"{line.label}: {metric.shown(line.mean[-1])} after {line.x[-1]:.4g} {unit}"]
  for other in lines:
    goal = other.mean[-1]
    reached = [x for x, y in zip(line.x, line.mean) if not metric.better(goal, y)]
    if other is not line and reached:
      its_own = next(x for x, y in zip(other.x, other.mean) if not metric.better(goal, y))
      times, word = its_own / reached[0], "sooner"
      if times < 1:
        times, word = 1 / times, "later"
      text = f"{times:.1f} times {word} than {other.label}"
      parts.append(f"{metric.shown(goal)} after {reached[0]:.3g} {unit}, {text}")
  return "; ".join(parts)
