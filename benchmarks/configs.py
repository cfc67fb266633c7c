"""Memory and speed of a training step of every config, at its own batch, on one device."""

import json
import pathlib
import tempfile
from typing import Any, Mapping, NamedTuple, Sequence

import jax

from benchmarks import optimizers, steps, tables
from benchmarks.timing import fits
from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.runtime import devices
from mixer_jax.study import plan

_FOLDER = pathlib.Path(__file__).parent.parent / "configs"
# Bundled or generated data in the place of sets that are downloaded, at the config's own sizes.
_IMAGES = {"data.name": "sample", "data.train_split": "train", "data.test_split": "test"}
_SHAPES = {
  **{"data.name": "shapes", "data.classes": "", "data.void": 255},
  **{"data.train_split": "train", "data.validation_split": "", "data.test_split": "test"},
}
_FUNCTIONS = {"data.train_functions": 8, "data.test_functions": 2}
_TEACHER = dict(name="resnet_20", fields={}, image_size=32, mean=[0.5] * 3, std=[0.25] * 3)
_STAND_INS = {
  "ade20k": _SHAPES,
  "camvid": _SHAPES,
  **{name: _FUNCTIONS for name in ("burgers", "darcy", "darcy_inverse")},
  "mnli": {
    **{"data.name": "sample", "data.text": "sentence", "data.pair": ""},
    **{"data.train_split": "train", "data.test_split": "test", "data.extra_test_splits": ""},
  },
  "distill_cifar": {"distillation.described": json.dumps(_TEACHER)},
} | {
  name: _IMAGES
  for name in (
    *("adam_cifar10", "adam_cifar100", "sgd_cifar10", "sgd_cifar100", "kfac_cifar10"),
    *("kfac_cifar100", "graft_cifar10", "dino_resmlp", "resmlp_imagenet", "transfer"),
  )
}


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

  Sizes of images, sequences and grids and the batch are the config's own; the numbers of classes
  and of words are those of the data that stand in.

  Args:
    path: of the config file.
    argument: of the config; None: its default.
    folder: for generated functions.
    overrides: "FIELD=VALUE" each.
  """
  config = plan.read_config(path, *(() if argument is None else (argument,)))
  with config.unlocked():
    config.update_from_flattened_dict(_STAND_INS.get(path.stem, {}))
  if config.task == "operator_learning":
    config.data.cache_dir = folder
  config.mesh.data, config.require_accelerator = 1, False
  if config.get("pretrained") == config_lib.REQUIRED:
    config.pretrained = ""
  config_lib.override(config, overrides)
  return experiment.build(config)


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
