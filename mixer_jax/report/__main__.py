"""Draws and tabulates what runs and models show.

python -m mixer_jax.report curves --workdir=DIR
python -m mixer_jax.report weights --workdir=DIR [--checkpoint=best|latest|STEP]
python -m mixer_jax.report weights --pretrained=FILE [--out=DIR]
python -m mixer_jax.report study --workdir=DIR
python -m mixer_jax.report models [--models=mixer_b16,resmlp_s12] [--batch_size=32]
"""

import math
import pathlib

from absl import flags

from mixer_jax import checkpoint, cli, models, pretrained, workdir
from mixer_jax.errors import UserError
from mixer_jax.report import console, curves
from mixer_jax.report import models as models_table
from mixer_jax.report import study as study_report
from mixer_jax.report import weights as weights_pictures


def _curves(argv: list[str]) -> None:
  del argv
  print(curves.draw(_workdir()))


def _weights(argv: list[str]) -> None:
  del argv
  options = flags.FLAGS
  if bool(options.workdir) == bool(options.pretrained):
    raise UserError("weights takes either --workdir=DIR of a run or --pretrained=FILE")
  if options.pretrained:
    weights = pretrained.read(options.pretrained)
    if not weights.num_tokens:
      raise UserError(f"{options.pretrained}: mixes any number of tokens, without a matrix")
    side = math.isqrt(weights.num_tokens)
    params, grid = weights.arrays, (side, side)
    directory = pathlib.Path(options.out or "weights")
  else:
    directory = _workdir()
    config = workdir.load_config(directory)
    saved = checkpoint.Checkpoints(directory, read_only=True)
    params = saved.restore_arrays(saved.find(options.checkpoint))
    side = config.data.image_size // params["stem"]["kernel"].shape[0]
    grid, directory = (side, side), pathlib.Path(options.out or directory / "weights")
  for path in weights_pictures.draw(params, grid, directory):
    print(path)


def _models(argv: list[str]) -> None:
  del argv
  options = flags.FLAGS
  names = options.models or list(models.VARIANTS)
  for name in names:
    models.fields(name)  # an unknown one is refused before the others are measured
  console.print_devices()
  print(f"batch of {options.batch_size}, median of {options.rounds}\n\n{models_table.HEADER}")
  for row in models_table.measure(names, options.batch_size, options.rounds):
    print(models_table.line(row), flush=True)


def _study(argv: list[str]) -> None:
  del argv
  for path in study_report.write(_workdir()):
    print(path)


def _workdir() -> pathlib.Path:
  if not flags.FLAGS.workdir:
    raise UserError("--workdir is missing; it names the directory of a run or study")
  return workdir.existing(flags.FLAGS.workdir)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Directory of the run or study.")
  flags.DEFINE_string("checkpoint", "best", '"best", "latest" or a step.')
  flags.DEFINE_string("pretrained", None, "A file of weights, its address or public name.")
  flags.DEFINE_string("out", None, "Where pictures go; default: the run's, or weights/.")
  flags.DEFINE_list("models", None, "Models by name; default: all.")
  flags.DEFINE_integer("batch_size", 32, "Images of a batch.", lower_bound=1)
  flags.DEFINE_integer("rounds", 3, "Timed batches a model; 0: sizes alone.", lower_bound=0)
  cli.run_commands({"curves": _curves, "weights": _weights, "study": _study, "models": _models})
