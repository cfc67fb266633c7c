"""The contents of a study, and the named runs that it expands to."""

import dataclasses
import fnmatch
import itertools
import pathlib
import re
import runpy
from typing import Any, Callable, Iterator, Mapping, Sequence

from absl import flags
import ml_collections
from ml_collections import config_flags

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

_WORD = re.compile(r"[A-Za-z0-9_.+]+")  # names become directories and parts of commands
Cell = tuple[str, ...]  # a value of each axis, in the order of the axes


@dataclasses.dataclass(frozen=True)
class Published:
  """A row of a published table.

  Attributes:
    value: of the task's primary metric, as printed: in percent where the metric is shown so.
    epochs_to_target: as printed; None: not reached, or not given.
  """

  value: int | float
  epochs_to_target: int | None = None


_LAST_TENTH = {"data.train_split": "train[:90%]", "data.test_split": "train[90%:]"}


@dataclasses.dataclass(frozen=True)
class Tuning:
  """A choice of settings for each cell, before the cell is run with all seeds.

  Attributes:
    candidates: to each value of the axis "optimizer" the settings (config field to value)
      that are tried, equally many for each.
    hold_out: settings of all candidates, by which they train on a part of the training set
      and are compared on the rest of it, never on the test set.
    seed: of all candidates.
  """

  candidates: Mapping[str, Sequence[Mapping[str, Any]]]
  hold_out: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _LAST_TENTH)
  seed: int = 0

  def fields(self) -> set[str]:
    """The config fields that tuning decides on."""
    return {field for t in self.candidates.values() for c in (*t, self.hold_out) for field in c}


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a study.

  Attributes:
    name: its directory.
    cell: the value of each axis.
    seed: of its config.
    settings: the candidate of tuning that it tries; None: it belongs to the tables.
    overrides: "field=value" of the user.
    config: as JSON, with the overrides, without the choice of tuning; {}: not planned yet.

  Raises:
    UserError: no run can have the config.
  """

  name: str
  cell: Cell
  seed: int
  settings: dict | None = None
  overrides: tuple[str, ...] = ()
  config: dict = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    try:
      config_lib.restored(self.config) if self.config else None
    except UserError as e:
      raise UserError(f"run {self.name}: {e}") from e

  @property
  def tunes(self) -> bool:
    return self.settings is not None


@dataclasses.dataclass(frozen=True)
class Study:
  """A grid of runs: every value of each axis with every other and every seed.

  Attributes:
    title: a heading.
    config: from a value of each axis, by keyword, to the config of a run. All have one task.
    axes: names to values; a run is named by its values, in this order.
    seeds: of the runs of a cell.
    lines: the axes told apart by lines in a figure; the other axes make its panels.
    published: to a cell the published values for it.
    published_at: the evaluation of a run that they are of, "last" or "best".
    source: where they are printed.
    notes: paragraphs for the report.
    tuning: a choice of settings that comes first, or None.
  """

  title: str
  config: Callable[..., ml_collections.ConfigDict]
  axes: Mapping[str, Sequence[str]]
  seeds: Sequence[int] = (0, 1, 2)
  lines: Sequence[str] = ("optimizer",)
  published: Mapping[Cell, Published] = dataclasses.field(default_factory=dict)
  published_at: str = "last"
  source: str = ""
  notes: Sequence[str] = ()
  tuning: Tuning | None = None

  def __post_init__(self):
    if mistake := next(self._mistakes(), None):
      raise UserError(f"the study has {mistake}")

  def _mistakes(self) -> Iterator[str]:
    if self.tuning:
      counts = {name: len(tried) for name, tried in self.tuning.candidates.items()}
      even = min(counts.values(), default=0) == max(counts.values(), default=0) > 0
      if not even or counts.keys() != set(self.axes.get("optimizer", ())):
        yield f"{counts} candidates of tuning; allowed: equally many for each value of 'optimizer'"
    names = [run.name for run in self.runs()]
    for name in names:
      if not all(map(_WORD.fullmatch, name.split("-"))) or names.count(name) > 1:
        yield f"the run {name!r}; allowed are distinct names of {_WORD.pattern}"
    for cell in self.published.keys() - set(self.cells()):
      yield f"published values of {cell}, which is no cell of it"
    if self.published_at not in ("last", "best"):
      yield f"published values of the {self.published_at!r} evaluation; allowed: last, best"
    for axis in set(self.lines) - self.axes.keys():
      yield f"lines by {axis!r}; its axes: {', '.join(self.axes)}"

  def cells(self) -> list[Cell]:
    """All combinations of the axes, the last axis fastest."""
    return list(itertools.product(*self.axes.values()))

  def runs(self) -> list[Run]:
    """All runs, tuning first."""
    runs = []
    for cell in self.cells() if self.tuning else ():
      candidates = self.tuning.candidates[dict(zip(self.axes, cell))["optimizer"]]
      for i, tried in enumerate(candidates):
        runs.append(Run("-".join(("tune", *cell, str(i))), cell, self.tuning.seed, dict(tried)))
    for cell, seed in itertools.product(self.cells(), self.seeds):
      runs.append(Run("-".join((*cell, f"seed{seed}")), cell, seed))
    return runs

  def select(self, patterns: str, runs: Sequence[Run] | None = None) -> list[Run]:
    """The runs that match any of some patterns such as "s4-*-seed0,b4-sgd-seed1".

    Args:
      patterns: with commas.
      runs: that may be selected; None: all.

    Raises:
      UserError: a pattern matches none.
    """
    runs, chosen = self.runs() if runs is None else runs, {}
    for pattern in patterns.split(","):
      found = {run.name: run for run in runs if fnmatch.fnmatchcase(run.name, pattern)}
      if not found:
        raise UserError(f"no run of the study is named {pattern!r}; --list shows them")
      chosen |= found
    return list(chosen.values())

  def run_config(self, name: str) -> ml_collections.ConfigDict:
    """The config of a run, before the user's overrides and the choice of tuning.

    Raises:
      UserError: the study has no such run.
    """
    [run] = self.select(name)
    config = self.config(**dict(zip(self.axes, run.cell)))
    config.seed = run.seed
    return override(config, settings({**self.tuning.hold_out, **run.settings} if run.tunes else {}))


def settings(fields: Mapping[str, Any]) -> list[str]:
  """Fields and values as "field=value", the form of `override` and of the command line."""
  return [f"{field}={value}" for field, value in fields.items()]


def override(
  config: ml_collections.ConfigDict, assignments: Sequence[str]
) -> ml_collections.ConfigDict:
  """Sets fields, in place, by "field=value" as `--config.field=value` of `mixer_jax.main` does.

  Raises:
    UserError: there is no such field, or it does not take the value.
  """
  for assignment in assignments:
    values, argument = flags.FlagValues(), f"--config.{assignment}"
    try:
      config_flags.DEFINE_config_dict(
        "config", config, flag_values=values, lock_config=False, sys_argv=["", argument]
      )
      values(["", argument])
    except (KeyError, AttributeError) as e:
      field = assignment.partition("=")[0]
      raise UserError(f"override {assignment}: the config has no field {field}") from e
    except (flags.Error, TypeError, ValueError) as e:
      raise UserError(f"override {assignment}: {' '.join(str(e).split())}") from e
  return config


def overrides_of(run: Run, assignments: Sequence[str]) -> list[str]:
  """The "[VALUE:]field=value" that concern a run: without VALUE, or with one of its cell."""
  chosen = []
  for assignment in assignments:
    left, equals, right = assignment.partition("=")
    scope, colon, field = left.rpartition(":")
    if not equals or not field or (colon and not scope):
      raise UserError(f"--set is {assignment!r}; allowed: field=value or VALUE:field=value")
    if not colon or scope in run.cell:
      chosen.append(f"{field}={right}")
  return chosen


def load(path: str) -> Study:
  """The study of a file.

  Raises:
    UserError: the file cannot be read, or holds no study.
  """
  study = _call(path, "get_study")
  if not isinstance(study, Study):
    raise UserError(f"--study={path}: get_study() gives a {type(study).__name__}, not a Study")
  return study


def read_config(path: str | pathlib.Path, *args: str) -> ml_collections.ConfigDict:
  """The config of a config file, as `--config=path:args` gives it."""
  return _call(path, "get_config", *args)


def _call(path: str | pathlib.Path, function: str, *args: str) -> Any:
  """Calls a function of a Python file."""
  file = pathlib.Path(path).expanduser()
  if not file.is_file() or file.suffix != ".py":
    raise UserError(f"{path} does not exist, or is no .py file")
  try:
    return runpy.run_path(str(file))[function](*args)
  except UserError:
    raise
  except Exception as e:  # such a file is a program: anything can go wrong in it
    raise UserError(f"{path}, {function}: {type(e).__name__}: {e}") from e
