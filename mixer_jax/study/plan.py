"""What a study consists of, and how it expands to named runs."""

import dataclasses
import fnmatch
import importlib.util
import itertools
import pathlib
import re
from typing import Any, Callable, Mapping, Sequence

from absl import flags
import ml_collections
from ml_collections import config_flags

from mixer_jax.errors import UserError

_WORD = re.compile(r"[A-Za-z0-9_.+]+")  # names become directories and parts of commands
Cell = tuple[str, ...]  # a value of each axis, in their order


@dataclasses.dataclass(frozen=True)
class Published:
  """A row of somebody's table, as it is printed.

  Attributes:
    top1: best test accuracy in percent.
    epochs_to_target: as printed; None: not reached, or not given.
  """

  top1: float
  epochs_to_target: int | None = None


@dataclasses.dataclass(frozen=True)
class Tuning:
  """A choice of settings for each cell, before it is run with all seeds.

  Attributes:
    candidates: to each value of the axis "optimizer" the settings (config field
      to value) that are tried, equally many for each.
    train_split: of `data`, what candidates are trained on.
    validation_split: what they are compared on; no part of the test set.
    seed: of all candidates.
  """

  candidates: Mapping[str, Sequence[Mapping[str, Any]]]
  train_split: str = "train[:90%]"
  validation_split: str = "train[90%:]"
  seed: int = 0

  def __post_init__(self):
    counts = {name: len(tried) for name, tried in self.candidates.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
      raise UserError(f"tuning has {counts} candidates; allowed: equally many for each optimizer")

  def fields(self) -> set[str]:
    """The config fields that tuning decides on."""
    chosen = {field for tried in self.candidates.values() for c in tried for field in c}
    return chosen | {"data.train_split", "data.test_split"}


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a study.

  Attributes:
    name: its directory.
    cell: the value of each axis.
    seed: of its config.
    candidate: the number of the settings it tries; None: it is no run of tuning.
  """

  name: str
  cell: Cell
  seed: int
  candidate: int | None = None


@dataclasses.dataclass(frozen=True)
class Study:
  """A grid of runs: every value of each axis with every other and every seed.

  Attributes:
    title: a heading.
    config: from a value of each axis, by keyword, to the config of a run.
    axes: names to values; a run is named by its values, in this order.
    seeds: of the runs of a cell.
    lines: the axes told apart by lines in a figure; those left make its panels.
    published: to a cell somebody's figures for it.
    source: where these are printed.
    notes: paragraphs for the report.
    tuning: a choice of settings that comes first, or None.
  """

  title: str
  config: Callable[..., ml_collections.ConfigDict]
  axes: Mapping[str, Sequence[str]]
  seeds: Sequence[int] = (0, 1, 2)
  lines: Sequence[str] = ("optimizer",)
  published: Mapping[Cell, Published] = dataclasses.field(default_factory=dict)
  source: str = ""
  notes: Sequence[str] = ()
  tuning: Tuning | None = None

  def __post_init__(self):
    names = [run.name for run in self.runs()]
    if bad := [
      n for n in names if not all(map(_WORD.fullmatch, n.split("-"))) or names.count(n) > 1
    ]:
      raise UserError(
        f"the study has the run {bad[0]!r}; allowed are distinct names of {_WORD.pattern}"
      )
    if unknown := set(self.published) - set(self.cells()):
      raise UserError(
        f"the study has published figures of {sorted(unknown)[0]}, which is no cell of it"
      )
    if missing := set(self.lines) - set(self.axes):
      raise UserError(
        f"the study draws lines by {sorted(missing)[0]!r}; its axes: {', '.join(self.axes)}"
      )

  def cells(self) -> list[Cell]:
    """All combinations of the axes, the last axis fastest."""
    return list(itertools.product(*self.axes.values()))

  def runs(self) -> list[Run]:
    """All runs, those of tuning first."""
    return [
      *self._tuning_runs(),
      *(
        Run("-".join((*cell, f"seed{seed}")), cell, seed)
        for cell in self.cells()
        for seed in self.seeds
      ),
    ]

  def _tuning_runs(self) -> list[Run]:
    if self.tuning is None:
      return []
    return [
      Run("-".join(("tune", *cell, str(i))), cell, self.tuning.seed, i)
      for cell in self.cells()
      for i in range(len(self.candidates(cell)))
    ]

  def candidates(self, cell: Cell) -> Sequence[Mapping[str, Any]]:
    """The settings that tuning tries for a cell."""
    return self.tuning.candidates[dict(zip(self.axes, cell))["optimizer"]]

  def find(self, name: str) -> Run:
    """The run of a name.

    Raises:
      UserError: there is none.
    """
    return self.select(name)[0]

  def select(self, patterns: str) -> list[Run]:
    """The runs that any of some patterns such as "s4-*-seed0,b4-sgd-seed1" names.

    Raises:
      UserError: one of them names none.
    """
    runs, chosen = self.runs(), {}
    for pattern in patterns.split(","):
      found = [run for run in runs if fnmatch.fnmatchcase(run.name, pattern)]
      if not found:
        raise UserError(f"no run of the study is named {pattern!r}; --list shows them")
      chosen |= {run.name: run for run in found}
    return list(chosen.values())

  def run_config(self, name: str) -> ml_collections.ConfigDict:
    """The config of a run, without what tuning chose or the user overrides.

    Raises:
      UserError: the study has no such run.
    """
    run = self.find(name)
    config = self.config(**dict(zip(self.axes, run.cell)))
    config.seed = run.seed
    if run.candidate is not None:
      config.data.update(
        train_split=self.tuning.train_split, test_split=self.tuning.validation_split
      )
      config = override(config, settings(self.candidates(run.cell)[run.candidate]))
    return config


def settings(fields: Mapping[str, Any]) -> list[str]:
  """Fields and values as "field=value", which `override` and the command line take."""
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
  """Those of "[VALUE:]field=value" that concern a run: without VALUE, or with one of its cell."""
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
  study = _module(path, "study").get_study()
  if not isinstance(study, Study):
    raise UserError(f"--study={path}: get_study() gives a {type(study).__name__}, not a Study")
  return study


def read_config(path: str | pathlib.Path, *args: str) -> ml_collections.ConfigDict:
  """The config of a config file, as `--config=path:args` gives it."""
  return _module(str(path), "config").get_config(*args)


def _module(path: str, kind: str) -> Any:
  """A Python file with a function get_KIND, executed."""
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise UserError(f"{kind} file {path} does not exist")
  spec = importlib.util.spec_from_file_location(f"{kind}_{file.stem}", file)
  if spec is None:
    raise UserError(f"{kind} file {path} is not a Python file")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except UserError:
    raise
  except Exception as e:  # a study file is a program: anything can go wrong in it
    raise UserError(f"{kind} file {path}: {type(e).__name__}: {e}") from e
  if not hasattr(module, f"get_{kind}"):
    raise UserError(f"{kind} file {path} has no function get_{kind}")
  return module
