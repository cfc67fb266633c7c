"""Several runs in one picture: a metric over training time, steps, epochs or another metric."""

import glob
import hashlib
import logging
import os
import pathlib
from typing import Any, Sequence

from flax import traverse_util

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.paths import user_path
from mixer_jax.report import figures, results
from mixer_jax.report.results import Band
from mixer_jax.rundir import directory, metrics_file
from mixer_jax.study import record
from mixer_jax.tasks import Metric

_LOG = logging.getLogger(__name__)

# Fields that decide on the examples a metric is of.
_EXAMPLES = ("task", "data.name", "data.train_split", "data.test_split")

OVER = {
  "seconds": "seconds of training steps (without compilation, testing and checkpoints)",
  "step": "step",
  "epoch": "epoch",
}
# The runs of each line, by its label: their directories and configs.
Groups = dict[str, list[tuple[pathlib.Path, Any]]]


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
  if over not in OVER and "/" not in over:
    raise UserError(f"--over is {over!r}; allowed: {', '.join(OVER)} or a metric as test/loss")
  groups = _groups(runs)
  task = next(iter(groups.values()))[0][1].task
  figure, ((axis,),) = figures.panels(1, 1, (6, 5) if "/" in over else (7, 4))
  draw = _draw_points if "/" in over else _draw_lines
  said = draw(axis, groups, task, key, over)
  if log:
    _make_logarithmic(axis)
  axis.grid(alpha=0.3, which="both")
  figures.legend(figure, axis)
  figures.save(figure, path)
  return said


def _draw_lines(axis: Any, groups: Groups, task: str, key: str, over: str) -> list[str]:
  """Draws a metric over time, steps or epochs, a line for each label."""
  metric, styles = results.metric_of(task, key), figures.styles(groups)
  bands = {label: _band(label, found, key, over) for label, found in groups.items()}
  for label, band in bands.items():
    figures.draw_band(axis, band, metric.scale, label=label, **styles[label])
  axis.set(xlabel=OVER[over], ylabel=_axis_label(task, key))
  return [_summary(label, bands, metric, over) for label in bands]


def _draw_points(axis: Any, groups: Groups, task: str, key: str, over: str) -> list[str]:
  """Draws the last value of a metric against that of another one, a point for each label."""
  said, marks = [], figures.styles(groups, "fmt")
  for label, found in groups.items():
    texts, means, errors = [], [], []
    for name, flag in ((over, "--over"), (key, "--metric")):
      band, metric = _band(label, found, name, "step", flag), results.metric_of(task, name)
      mean, low, high = (metric.scale * values[-1] for values in band[1:])
      means.append(mean)
      errors.append([[mean - low], [high - mean]])
      texts.append(f"{name} {metric.shown(band.mean[-1])}")
    axis.errorbar(*means, errors[1], errors[0], label=label, **marks[label])
    said.append(f"{label}: {', '.join(texts)}")
  axis.set(xlabel=_axis_label(task, over), ylabel=_axis_label(task, key))
  return said


def _axis_label(task: str, key: str) -> str:
  return f"{key.rpartition('/')[0]} {results.metric_of(task, key).label}".strip()


def _make_logarithmic(axis: Any) -> None:
  """Makes both axes logarithmic, with ticks at 1, 2 and 5 in plain numbers."""
  from matplotlib.ticker import LogLocator  # late, as in `figures`

  axis.set(xscale="log", yscale="log")
  for side in (axis.xaxis, axis.yaxis):
    side.set_major_locator(LogLocator(subs=(1, 2, 5)))
    side.set_major_formatter("{x:g}")
    side.set_minor_formatter("")


def _groups(runs: Sequence[str]) -> Groups:
  """Returns the directories and configs of runs, by the labels of their lines."""
  groups: dict[tuple[str, str], dict[pathlib.Path, Any]] = {}
  for given in runs:
    label, pattern = ("", given) if _found(given) else given.partition("=")[::2]
    if not (found := _found(pattern)):
      raise UserError(f"--runs has {given!r}; no run with metrics is there")
    failed = [run for run in found if _failed(run)]
    for run in found:
      if run in failed and len(failed) < len(found):  # one alone, or all, are meant
        _LOG.warning("%s failed, and is left out", run)
        continue
      config = config_lib.of_run(run)
      group = groups.setdefault((label, "" if label else _identity(run, config)), {})
      group[run] = config  # two patterns may find it
  _warn_of_differences([config for group in groups.values() for config in group.values()])
  firsts = [next(iter(group.items())) for group in groups.values()]
  names = [
    label or results.optimizer_name(config.optimizer)
    for (label, _), (_, config) in zip(groups, firsts)
  ]
  longer = [f"{name}, {run}" for name, (run, _) in zip(names, firsts)]
  labels = [name if names.count(name) == 1 else long for name, long in zip(names, longer)]
  return {label: list(group.items()) for label, group in zip(labels, groups.values())}


def _found(pattern: str) -> list[pathlib.Path]:
  """Returns the directories with metrics that a pattern describes."""
  paths = map(os.path.realpath, glob.glob(str(user_path(pattern))) if pattern else ())
  return [path for path in map(pathlib.Path, sorted(paths)) if metrics_file.read(path)]


def _failed(run: pathlib.Path) -> bool:
  """Whether a study has recorded that a run failed."""
  return (run / record.OUTCOME).exists() and bool(record.outcome(run)["reason"])


def _warn_of_differences(configs: Sequence[Any]) -> None:
  """Warns of runs whose metrics are of different tasks or examples."""
  flat = [traverse_util.flatten_dict(config.to_dict(), sep=".") for config in configs]
  for field in _EXAMPLES:
    found = {str(fields.get(field)) for fields in flat}
    if len(found) > 1:
      _LOG.warning("The runs differ in %s: %s", field, ", ".join(sorted(found)))


def _identity(run: pathlib.Path, config: Any) -> str:
  """A run's config but for the seed, with the contents of the files that it names."""
  copies = directory.kept_files(run).items()
  contents = {field: hashlib.sha256(copy.read_bytes()).hexdigest() for field, copy in copies}
  fields = traverse_util.flatten_dict(config.to_dict(), sep=".") | {"seed": 0} | contents
  return repr(sorted(fields.items()))


def _band(
  label: str, runs: Sequence[tuple[pathlib.Path, Any]], key: str, over: str, flag: str = "--metric"
) -> Band:
  """Returns the mean and the range of a column of some runs; a UserError if one lacks it."""
  rows = {run: results.rows_of(run) for run, _ in runs}
  for run, own in rows.items():
    if not any(key in row for row in own):
      there = ", ".join(name for name in own[-1] if "/" in name)
      raise UserError(f"{flag} is {key!r}; {run} has {there}")
  band = results.band(list(rows.values()), "elapsed" if over == "seconds" else over, key)
  if band is None:
    raise UserError(f"the runs of {label} were evaluated at no step that all of them share")
  most = max(sum(key in row for row in own) for own in rows.values())
  if most > len(band.x):
    _LOG.warning("%s: of up to %d rows, the %d at steps of all runs", label, most, len(band.x))
  return band


def _summary(label: str, bands: dict[str, Band], metric: Metric, over: str) -> str:
  """Returns the last value of a line, and the first time that it is as good as the last of another.

  The other's own time is the first at which it was as good.
  """
  own, unit = bands[label], "s" if over == "seconds" else f"{over}s"
  parts = [f"{label}: {metric.shown(own.mean[-1])} after {own.x[-1]:.4g} {unit}"]
  for name, other in bands.items():
    goal = other.mean[-1]
    first = lambda band, goal=goal: next(
      (x for x, y in zip(band.x, band.mean) if not metric.better(goal, y)), None
    )
    if name != label and (reached := first(own)) is not None:
      times, word = first(other) / reached, "sooner"
      if times < 1:
        times, word = 1 / times, "later"
      parts.append(
        f"{metric.shown(goal)} after {reached:.3g} {unit}, {times:.1f} times {word} than {name}"
      )
  return "; ".join(parts)
