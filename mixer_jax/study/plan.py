"""The contents of a study, and the named runs that it expands to."""

import collections
import copy
import dataclasses
import fnmatch
import itertools
import json
import math
import pathlib
import re
import runpy
from typing import Any, Callable, Iterator, Mapping, Sequence

from ml_collections import ConfigDict
from scipy.stats import qmc

from mixer_jax import config as config_lib
from mixer_jax import options, tasks
from mixer_jax.data import splits
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path

_WORD = re.compile(r"[A-Za-z0-9_.+]+")  # names become directories and parts of commands
_LAST_TENTH = {"data.train_split": "train[:90%]", "data.test_split": "train[90%:]"}
Cell = tuple[str, ...]  # a value of each axis, in the order of the axes


@dataclasses.dataclass(frozen=True)
class Published:
  """A row of a published table, as printed.

  Attributes:
    value: the task's primary metric, in percent where the metric is shown so.
    epochs_to_target: epochs after which a target was reached; None: not reached, or not given.
  """

  value: int | float
  epochs_to_target: int | None = None


@dataclasses.dataclass(frozen=True)
class Tuning:
  """A choice of settings for each cell, before the cell is run with all seeds.

  Candidates train on a part of the training set and are compared on the rest of it (or, where
  optimizers minimise a training loss, on that set itself), never on the test set.

  Attributes:
    candidates: the settings (config field to value) that are tried for each value of the axis
      "optimizer", equally many for each; `halton` draws them.
    hold_out: settings of all candidates, which split the training set; by default nine tenths
      train.
    seed: seed of all candidates.
    shared: axes whose values share the settings that are chosen for the first of them.
    metric: a column of the metrics, such as "train/loss": the candidate whose last value is the
      lowest is chosen. "": the best value of the primary metric is chosen.
  """

  candidates: Mapping[str, Sequence[Mapping[str, Any]]]
  hold_out: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _LAST_TENTH)
  seed: int = 0
  shared: Sequence[str] = ()
  metric: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a study, named as its directory.

  Attributes:
    name: values of the axes and the seed, joined by "-".
    cell: a value of each axis.
    seed: seed of the run.
    settings: the candidate that a run of tuning tries; None for other runs.
    tuned: the cell whose tuning decides on its settings.
    overrides: "field=value" of the user.
    config: the config as JSON takes it, with the overrides, without the choice of tuning; empty
      until it is planned.
  """

  name: str
  cell: Cell
  seed: int
  settings: dict | None = None
  tuned: Cell = ()
  overrides: tuple[str, ...] = ()
  config: dict = dataclasses.field(default_factory=dict)

  @property
  def tunes(self) -> bool:
    return self.settings is not None


@dataclasses.dataclass(frozen=True)
class Study:
  """A grid of runs: every value of each axis with every other and every seed.

  All its tasks have the same primary metric.

  Attributes:
    title: heading of the report.
    config: function from a value of each axis, by keyword, to a run's config.
    axes: names of axes to their values; a run is named by its values, in this order.
    seeds: seeds of the runs of a cell.
    lines: axes told apart by lines in figures; others are told apart by panels.
    published: the published values, by cell.
    published_at: the evaluation that they report, "last" or "best".
    source: where they are printed.
    notes: paragraphs for the report.
    tuning: a choice of settings that comes first, or None.
    target_of: an optimizer whose last value, in the same panel, is every other's target; "": the
      config's target.

  Raises:
    UserError: the fields contradict each other.

  Example:
    ```python
    from mixer_jax import config as config_lib
    from mixer_jax import study

    def config(width, optimizer):
      config = config_lib.default(model="mixer_small")
      config.model.hidden_dim = {"narrow": 64, "wide": 256}[width]
      config.optimizer = config_lib.optimizer(optimizer, learning_rate=0.01)
      return config

    axes = {"width": ("narrow", "wide"), "optimizer": ("adam", "kfac_muon")}
    mine = study.Study("Two widths", config, axes, seeds=(0, 1))
    assert len(mine.runs()) == 8
    ```
  """

  title: str
  config: Callable[..., ConfigDict]
  axes: Mapping[str, Sequence[str]]
  seeds: Sequence[int] = (0, 1, 2)
  lines: Sequence[str] = ("optimizer",)
  published: Mapping[Cell, Published] = dataclasses.field(default_factory=dict)
  published_at: str = "last"
  source: str = ""
  notes: Sequence[str] = ()
  tuning: Tuning | None = None
  target_of: str = ""

  def __post_init__(self):
    if mistake := next(self._mistakes(), None):
      raise UserError(f"the study has {mistake}")

  def _mistakes(self) -> Iterator[str]:
    optimizers = self.axes.get("optimizer", ())
    if self.tuning:
      counts = {name: len(tried) for name, tried in self.tuning.candidates.items()}
      if counts.keys() != set(optimizers) or len(set(counts.values())) > 1:
        yield f"{counts} candidates of tuning; allowed: equally many for each value of 'optimizer'"
    names = [run.name for run in self.runs()]
    for name in names:
      if not all(map(_WORD.fullmatch, name.split("-"))) or names.count(name) > 1:
        yield f"the run {name!r}; allowed are distinct names of {_WORD.pattern}"
    for cell in self.published.keys() - set(self._cells()):
      yield f"published values of {cell}, which is no cell of it"
    if isinstance(self.notes, str):  # each letter would be a paragraph
      yield f"the notes {self.notes!r}; allowed: a list of texts"
    if self.published_at not in ("last", "best"):
      yield f"published_at {self.published_at!r}; allowed: last, best"
    shared = self.tuning.shared if self.tuning else ()
    for axis in {*self.lines, *shared} - self.axes.keys():
      yield f"lines or shared tuning by {axis!r}; its axes: {', '.join(self.axes)}"
    if self.target_of and self.target_of not in optimizers:
      yield f"target_of {self.target_of!r}; its optimizers: {', '.join(optimizers)}"

  def _cells(self) -> list[Cell]:
    """All combinations of the axes, the last axis fastest."""
    return list(itertools.product(*self.axes.values()))

  def runs(self) -> list[Run]:
    """Lists all runs, tuning first.

    Returns:
      The runs, without their configs.

    Example:
      After the example of `Study`:

      ```python
      assert mine.runs()[0].name == "narrow-adam-seed0"
      ```
    """
    runs = []
    for cell in dict.fromkeys(map(self._tuned, self._cells())) if self.tuning else ():
      candidates = self.tuning.candidates[dict(zip(self.axes, cell))["optimizer"]]
      for i, tried in enumerate(candidates):
        own = {field: options.python_number(value) for field, value in tried.items()}
        seed = options.python_number(self.tuning.seed)
        runs.append(Run("-".join(("tune", *cell, str(i))), cell, seed, own))
    for cell, seed in itertools.product(self._cells(), map(options.python_number, self.seeds)):
      runs.append(Run("-".join((*cell, f"seed{seed}")), cell, seed, tuned=self._tuned(cell)))
    return runs

  def _tuned(self, cell: Cell) -> Cell:
    """Returns the cell whose tuning decides on the settings of a cell."""
    shared = self.tuning.shared if self.tuning else ()
    return tuple(self.axes[a][0] if a in shared else value for a, value in zip(self.axes, cell))

  def select(self, patterns: str) -> list[Run]:
    """The runs that match patterns, as "s4-*-seed0,b4-sgd-seed1"; a UserError if one has none."""
    chosen = {}
    for pattern in patterns.split(","):
      found = {run.name: run for run in self.runs() if fnmatch.fnmatchcase(run.name, pattern)}
      if not found:
        raise UserError(f"no run of the study is named {pattern!r}; --list shows them")
      chosen |= found
    return list(chosen.values())

  def run_config(self, name: str) -> ConfigDict:
    """Returns the config of a run, before the user's overrides and the choice of tuning.

    A study file's `get_config(run)` calls it.

    Args:
      name: name of the run.

    Returns:
      The config.

    Raises:
      UserError: there is no such run, or the study's `config` fails.

    Example:
      After the example of `Study`:

      ```python
      assert mine.run_config("wide-adam-seed1").model.hidden_dim == 256
      ```
    """
    for run in self.runs():
      if run.name == name:
        return self._config(run)
    raise UserError(f"no run of the study is named {name!r}; --list shows them")

  def _config(self, run: Run) -> ConfigDict:
    with as_user_error(f"the study's config of the run {run.name} fails"):  # any program's error
      config = copy.deepcopy(self.config(**dict(zip(self.axes, run.cell))))
      config.seed = run.seed
    return config_lib.override(
      config, settings({**self.tuning.hold_out, **run.settings} if run.tunes else {})
    )

  def planned(self, assignments: Sequence[str]) -> list[Run]:
    """All runs with their configs and a user's overrides, "[VALUE:]field=value".

    Raises a UserError if no run can have a config, if the tasks have several primary metrics, if
    tuning sees the test set, or if an override concerns no run or a field that tuning decides on.
    """
    overrides, runs = self._overrides(assignments), []
    for run in self.runs():
      config = config_lib.override(self._config(run), overrides[run.name])
      try:
        config_lib.check(config)
      except UserError as e:
        raise UserError(f"run {run.name}: {e}") from e
      stored = json.loads(config.to_json())
      runs.append(dataclasses.replace(run, overrides=tuple(overrides[run.name]), config=stored))
    names = sorted({run.config["task"] for run in runs})
    if len({tasks.find(name).metrics[0] for name in names}) > 1:
      raise UserError(
        f"the study has runs of {' and '.join(names)}; allowed: tasks with one primary metric"
      )
    _check_held_out(runs)
    return runs

  def _overrides(self, assignments: Sequence[str]) -> dict[str, list[str]]:
    """Returns the "field=value" of each run, by its name."""
    runs, decided = self.runs(), set()
    if self.tuning:
      decided.update(self.tuning.hold_out, *itertools.chain(*self.tuning.candidates.values()))
    found = {run.name: [] for run in runs}
    for assignment in assignments:
      left, equals, value = assignment.partition("=")
      scope, colon, field = left.rpartition(":")
      concerned = [run for run in runs if not colon or scope in run.cell]
      if not equals or not field:
        raise UserError(f"--set is {assignment!r}; allowed: field=value or VALUE:field=value")
      if field == "seed":
        raise UserError(f"--set gives the seed; each run has its own, of {self.seeds}")
      if field in decided:
        raise UserError(f"--set gives {field}, which the study's tuning decides on")
      if not concerned:
        raise UserError(f"--set={assignment} concerns no run of the study")
      for run in concerned:
        found[run.name].append(f"{field}={value}")
    return found


def _check_held_out(runs: Sequence[Run]) -> None:
  """Raises a UserError if runs of tuning are compared on the test set of the others."""
  place = lambda data: (data.get("name"), data.get("dir"))
  kept = collections.defaultdict(set)  # the test sets of each tuned cell and data set
  for run in (r for r in runs if not r.tunes):
    data = run.config.get("data", {})
    kept[run.tuned, place(data)].add(data.get("test_split"))
  for run in (r for r in runs if r.tunes):
    own = run.config.get("data", {})
    field = "validation_split" if own.get("validation_split") else "test_split"
    for split in sorted(filter(None, kept[run.cell, place(own)])):
      if own.get(field) is not None and splits.surely_share(own[field], split):
        raise UserError(
          f"run {run.name} would be compared on data.{field}={own[field]!r}, which shares examples"
          f" with the test set {split!r}; allowed: a part of the training set"
        )


def between(low: float, high: float, part: float) -> float:
  """Returns the number that lies a part of the way from low to high in logarithms, within both.

  It has two digits, and one more for each power of ten by which the range is narrower than a tenth.

  Args:
    low: the number at part 0.
    high: the number at part 1.
    part: from 0 to 1.

  Returns:
    The rounded number.

  Example:
    ```python
    from mixer_jax import study

    assert study.between(1e-4, 1e-2, 0.5) == 1e-3
    ```
  """
  # 0.9 to 0.99 is a tenth, but for rounding, and has two digits.
  narrow = math.floor(math.log10(high / low - 1) + 1e-9) if high > low else 0
  digits = max(2, 1 - narrow)
  return min(max(float(f"{low * (high / low) ** part:.{digits}g}"), low), high)


def halton(
  search: Mapping[str, Mapping[str, tuple[float, float]]], number: int
) -> dict[str, list[dict[str, float]]]:
  """Draws settings for each optimizer from a Halton sequence, uniform in logarithms.

  Every call gives the same settings, in the form that `Tuning` takes.

  Args:
    search: the lowest and the highest value of config fields, by optimizer.
    number: number of settings for each optimizer.

  Returns:
    Settings, config field to value, by optimizer.

  Example:
    ```python
    from mixer_jax import study

    search = {"adam": {"learning_rate": (1e-4, 1e-2)}}
    tuning = study.Tuning(study.halton(search, number=8))
    print(tuning.candidates["adam"][0])
    ```
  """
  tries = {}
  for optimizer, ranges in search.items():
    points = qmc.Halton(len(ranges), seed=0).random(number)
    fields = {f"optimizer.{field}": ends for field, ends in ranges.items()}
    tries[optimizer] = [
      {field: between(*ends, part) for (field, ends), part in zip(fields.items(), point)}
      for point in points
    ]
  return tries


def settings(fields: Mapping[str, Any]) -> list[str]:
  """Fields and values as "field=value", the form of `config.override` and of the command line."""
  return [f"{field}={value}" for field, value in fields.items()]


def load(path: str) -> Study:
  """Returns the study of a study file.

  Args:
    path: a Python file with a function `get_study`.

  Returns:
    The study.

  Raises:
    UserError: the file cannot be read, or holds no study.

  Example:
    From a clone of the repository:

    ```python
    from mixer_jax import study

    print(study.load("docs/own_study.py").title)
    ```
  """
  if ":" in str(path):  # --config of the runs is FILE:RUN
    raise UserError(f"--study={path} has a ':'; allowed: a path without one")
  study = _call(path, "get_study")
  if not isinstance(study, Study):
    raise UserError(f"--study={path}: get_study() gives a {type(study).__name__}, not a Study")
  return study


def read_config(path: str | pathlib.Path, *args: str) -> ConfigDict:
  """Returns the config of a config file, as `--config=path:args` gives it.

  Args:
    path: a Python file with a function `get_config`.
    *args: the file's argument, if it takes one.

  Returns:
    The config.

  Raises:
    UserError: the file cannot be read, or refuses the argument.

  Example:
    From a clone of the repository:

    ```python
    from mixer_jax import study

    config = study.read_config("configs/quickstart.py", "adam")
    ```
  """
  return _call(path, "get_config", *args)


def _call(path: str | pathlib.Path, function: str, *args: str) -> Any:
  """Calls a function of a Python file."""
  file = user_path(path)
  if not file.is_file() or file.suffix != ".py":
    raise UserError(f"{path} does not exist, or is no .py file")
  try:
    return runpy.run_path(str(file))[function](*args)
  except UserError:
    raise
  except Exception as e:  # such a file is a program: anything can go wrong in it
    raise UserError(f"{path}, {function}: {type(e).__name__}: {e}") from e
