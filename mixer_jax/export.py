"""Writes a run's parameters as an `.npz` of weights, for others and for fine-tuning.

python -m mixer_jax.export --workdir=DIR [--checkpoint=best|latest|STEP] --out=FILE.npz
"""

import pathlib

from absl import flags

from mixer_jax import checkpoint, cli, experiment, pretrained, workdir
from mixer_jax.errors import UserError


def export(path: str, which: str, out: str) -> pathlib.Path:
  """Saves the parameters of a checkpoint in Linen's names, see `pretrained.save`.

  Args:
    path: the run's directory.
    which: "best", "latest" or a step.
    out: the file to write, ending in `.npz`.

  Returns:
    The file.

  Raises:
    UserError: no such run or checkpoint, or a file that cannot be written.
  """
  directory = workdir.existing(path)
  config = workdir.load_config(directory)
  saved = checkpoint.Checkpoints(directory, read_only=True)
  params = saved.restore_arrays(saved.find(which))
  model = experiment.build_model(config.model, num_classes=params["head"]["bias"].size)
  statistics = pretrained.Normalization(tuple(config.data.mean), tuple(config.data.std))
  pretrained.save(out, params, model, statistics)
  return pathlib.Path(out)


def main(argv: list[str]) -> None:
  del argv
  options = flags.FLAGS
  for name in ("workdir", "out"):
    if not options[name].value:
      raise UserError(f"--{name} is missing")
  print(export(options.workdir, options.checkpoint, options.out))


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Directory of the run.")
  flags.DEFINE_string("checkpoint", "best", '"best", "latest" or a step.')
  flags.DEFINE_string("out", None, "File to write.")
  cli.run(main)
