"""Draws and tabulates runs, weights, studies and options.

python -m mixer_jax.report curves --workdir=DIR
python -m mixer_jax.report pictures --workdir=DIR [--checkpoint=best|STEP|mean:N] [--split=test]
    [--data_dir=DIR]
python -m mixer_jax.report augment --workdir=DIR|--config=FILE [--data_dir=DIR] [--out=DIR]
python -m mixer_jax.report weights --workdir=DIR [--checkpoint=best|STEP|mean:N] [--out=DIR]
python -m mixer_jax.report weights --pretrained=FILE [--out=DIR]
python -m mixer_jax.report study --workdir=DIR [--metric=loss]
python -m mixer_jax.report rows --workdir=DIR --out=FILE.csv
python -m mixer_jax.report compare --runs=[LABEL=]DIR,... [--metric=train/loss] [--log]
    [--over=seconds|step|epoch|SPLIT/METRIC] [--out=FILE.png]
python -m mixer_jax.report options [--config=FILE]
python -m mixer_jax.report configs [--folder=configs]
"""

import pathlib
from typing import Any, Mapping

from absl import flags
from ml_collections import config_flags

from mixer_jax import config, options, pretrained, tasks
from mixer_jax.errors import UserError
from mixer_jax.paths import user_path
from mixer_jax.report import compare, curves, figures, settings, study_rows, weight_pictures
from mixer_jax.report import study as study_report
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.runtime import cli, draws
from mixer_jax.training import restore

_FLAGS = flags.FLAGS


def _pictures(_: list[str]) -> None:
  directory = _workdir()
  restored = restore.restore(str(directory), _FLAGS.checkpoint, _FLAGS.data_dir)
  datasets, task = restored.run.datasets, restored.run.task
  if _FLAGS.split not in datasets:
    raise UserError(f"--split is {_FLAGS.split!r}; allowed: {', '.join(datasets)}")
  drawn = task.pictures(restored.variables, datasets[_FLAGS.split])
  _save(drawn, task, user_path(_FLAGS.out or directory / "pictures"))


def _augment(_: list[str]) -> None:
  """Draws training examples of a run, or of a config before there is one."""
  if bool(_FLAGS.workdir) == bool(_FLAGS.config):
    raise UserError("augment takes either --workdir=DIR of a run or --config=FILE")
  if _FLAGS.workdir:
    own, out = config.of_run(_workdir()), _workdir() / "pictures"
  else:
    own, out = cli.checked_config(_FLAGS.config), pathlib.Path("pictures")
  restore.change_data(own, dir=_FLAGS.data_dir)
  config.check(own)
  task = tasks.find(own.task)(own)
  task.datasets()
  drawn = task.prepared_pictures(draws.key(own.seed))
  _save(drawn, task, user_path(_FLAGS.out or out))


def _save(drawn: Mapping[str, Any], task: tasks.Task, out: pathlib.Path) -> None:
  if not drawn:
    raise UserError(f"task {type(task).__name__} has no pictures of this model")
  for name, figure in drawn.items():
    print(figures.save(figure, out / f"{name}.png"))


def _weights(_: list[str]) -> None:
  if bool(_FLAGS.workdir) == bool(_FLAGS.pretrained):
    raise UserError("weights takes either --workdir=DIR of a run or --pretrained=FILE")
  if _FLAGS.pretrained:
    read = pretrained.read(_FLAGS.pretrained)
    if not read.num_tokens:
      raise UserError(f"{_FLAGS.pretrained}: mixes any number of tokens, without a matrix")
    params, grid, out = read.arrays, read.grid or (1, read.num_tokens), "weights"
  else:
    directory = _workdir()
    task, variables = restore.load_run(str(directory), _FLAGS.checkpoint)
    params, out = task.backbone(variables), directory / "weights"
    kernel = params.get("stem", {}).get("kernel")
    data = config.of_run(directory).get("data", {})
    if kernel is None or kernel.ndim != 4 or "image_size" not in data:
      raise UserError(f"{directory}: the model has no 'stem' that cuts images into patches")
    grid = tuple(n // side for n, side in zip(options.pair(data.image_size), kernel.shape))
  print(*weight_pictures.draw(params, grid, user_path(_FLAGS.out or out)), sep="\n")


def _compare(_: list[str]) -> None:
  if not _FLAGS.runs:
    raise UserError("--runs is missing; it names directories of runs, with commas")
  path = user_path(_FLAGS.out or "compare.png")
  if path.suffix != ".png":
    raise UserError(f"--out is {_FLAGS.out!r}; the picture is a .png")
  metric = _FLAGS.metric or "train/loss"
  print(*compare.compare(_FLAGS.runs, metric, _FLAGS.over, path, _FLAGS.log), path, sep="\n")


def _study(_: list[str]) -> None:
  print(*study_report.write(_workdir(), _FLAGS.metric or ""), sep="\n")


def _rows(_: list[str]) -> None:
  path = user_path(_FLAGS.out or "rows.csv")
  print(f"{study_rows.write(_workdir(), path)} rows in {path}")


def _options(_) -> None:
  task = config.default().task
  if _FLAGS.config is not None:
    given = cli.checked_config(_FLAGS.config)
    task = given.task
    print(settings.of_one(given), end="")
  print(config.table(task), end="")


def _workdir() -> pathlib.Path:
  return directory_lib.existing(cli.workdir())


if __name__ == "__main__":
  cli.define("workdir", "checkpoint", "data_dir")
  flags.DEFINE_string("split", "test", "Split that pictures are made of.")
  flags.DEFINE_string("pretrained", None, "A file of weights, its address or public name.")
  flags.DEFINE_string(
    "out", None, "Where pictures go, of compare and rows a file; default: by the command."
  )
  flags.DEFINE_list("runs", [], "Directories of runs or patterns of them, each with LABEL= or not.")
  flags.DEFINE_string(
    "metric", None, "What is compared, default train/loss, or tabulated of a study, as loss."
  )
  flags.DEFINE_string("over", "seconds", "Axis that it is drawn over: these, step, epoch, column.")
  flags.DEFINE_string("folder", "configs", "Folder of config files.")
  flags.DEFINE_bool("log", False, "Whether both axes are logarithmic.")
  config_flags.DEFINE_config_file("config", None, "Config of augment, or whose options are listed.")
  # Each command with the flags that it takes.
  commands = {
    "curves": (lambda _: print(curves.draw(_workdir())), "workdir"),
    "pictures": (_pictures, "workdir checkpoint split data_dir out"),
    "augment": (_augment, "workdir config data_dir out"),
    "weights": (_weights, "workdir checkpoint pretrained out"),
    "compare": (_compare, "runs metric over log out"),
    "study": (_study, "workdir metric"),
    "rows": (_rows, "workdir out"),
    "options": (_options, "config"),
    "configs": (lambda _: print(settings.of_all(user_path(_FLAGS.folder)), end=""), "folder"),
  }
  functions, taken = ({name: both[i] for name, both in commands.items()} for i in (0, 1))
  cli.run_commands(functions, taken)
