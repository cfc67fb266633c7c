"""Memory and speed of a training step of every config, at its own batch, on one device."""

import pathlib
import tempfile
from typing import Any, Mapping, NamedTuple, Sequence

import jax

from benchmarks import optimizers, steps, tables
from benchmarks.timing import fits
from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.planning import stand_ins
from mixer_jax.runtime import devices
from mixer_jax.study import plan

_FOLDER = pathlib.Path(__file__).parent.parent / "configs"


class Row(NamedTuple):
  """A training step of a config on one device."""

  name: str  # of the config file, with its argument
  batch_size: int  # examples of a step; of batches of several shapes those of one
  peak_bytes: int  # arguments, results and temporaries of the step, as XLA plans them
  # median time of a step, its kinds averaged (`optimizers.kinds`); None: not timed
  seconds: float | None = None


def built(
  path: pathlib.Path, argument: str | None, folder: str, overrides: Sequence[str] = ()
) -> Experiment:
  """A config's experiment on one device, with data that need no network.

  Sizes of images, sequences and grids and the batch are the config's own, see `stand_ins`.

  Args:
    path: of the config file.
    argument: of the config; None: its default.
    folder: for generated functions.
    overrides: "FIELD=VALUE" each.
  """
  config = plan.read_config(path, *(() if argument is None else (argument,)))
  config.mesh.data = 1
  config_lib.override(config, overrides)
  return stand_ins.build(config, None, folder)[0]


def measure(name: str, run: Experiment, rounds: int) -> Row:
  """Plans a step, and times it in some rounds, 0 or more, if it fits into the memory."""
  row = Row(name, _examples(run, run.batch_shapes), steps.plan(run))
  if not (rounds and fits(row.peak_bytes)):
    return row
  cost = optimizers.compare({name: run}, rounds, name)[name]
  return Row(name, _examples(run, steps.batch(run)), cost.peak_bytes, cost.seconds)


def _examples(run: Experiment, batch: Any) -> int:
  """The examples of a batch; those of `batch_tokens` have as many as there is place for."""
  several = run.config.data.get("batch_tokens")
  return len(jax.tree.leaves(batch)[0]) if several else run.config.batch_size


TITLES = "config", "batch", "memory (MiB)", "seconds a step", "examples/s"


def cells(row: Row) -> list[str]:
  """A row of the table."""
  rate = row.seconds and row.batch_size / row.seconds
  numbers = tables.number(row.seconds, ".3g"), tables.number(rate, ".3g")
  return [f"`{row.name}`", str(row.batch_size), tables.mebibytes(row.peak_bytes), *numbers]


def main(options: Any) -> None:
  devices.print_line()
  rounds = 0 if options.memory_only else options.rounds
  print(f"{rounds} rounds; -: not timed, or does not fit\n")
  with tempfile.TemporaryDirectory() as folder:
    rows = (
      measure(name, built(path, argument, folder, options.set), rounds)
      for name, (path, argument) in chosen(options.configs).items()
    )
    tables.show(TITLES, map(cells, rows))


def chosen(names: list[str]) -> Mapping[str, tuple[pathlib.Path, str | None]]:
  """By name the files of `configs/` with their arguments; no names: all files without one."""
  files = {path.stem: path for path in sorted(_FOLDER.glob("*.py"))}
  found = {}
  for name in names or files:
    file, colon, argument = name.partition(":")
    if file not in files:
      raise UserError(f"--configs has {file!r}; allowed: {', '.join(files)}")
    found[name] = files[file], argument if colon else None
  return found
