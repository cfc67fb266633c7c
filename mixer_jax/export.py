"""Writes a run's parameters as an `.npz` of weights, for others and for fine-tuning.

python -m mixer_jax.export --workdir=DIR [--checkpoint=latest|best|STEP] --out=FILE.npz
"""

import pathlib

from absl import flags
import jax

from mixer_jax.errors import UserError
from mixer_jax.runtime import cli
from mixer_jax.training.restore import without_data


def export(path: str, which: str, out: str) -> pathlib.Path:
  """Saves the parameters of a checkpoint, as its task writes them. The data are not needed.

  Args:
    path: the run's directory.
    which: "latest", "best" or a step.
    out: the file to write and return, ending in `.npz`.

  Raises:
    UserError: no such run or checkpoint, or a file that cannot be written.
  """
  target = pathlib.Path(out).expanduser()
  if target.suffix != ".npz":
    raise UserError(f"{out}: weights are saved as .npz")
  task, variables = without_data(path, which)
  try:
    task.export(jax.device_get(variables), target)
  except OSError as e:
    raise UserError(f"{out}: cannot be written: {e.strerror}") from e
  return target


def main(argv: list[str]) -> None:
  del argv
  options = flags.FLAGS
  for name in ("workdir", "out"):
    if not options[name].value:
      raise UserError(f"--{name} is missing")
  print(export(options.workdir, options.checkpoint, options.out))


if __name__ == "__main__":
  cli.define("workdir", "checkpoint")
  flags.DEFINE_string("out", None, "File to write.")
  cli.run(main)
