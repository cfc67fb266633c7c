"""Writes a run's parameters as an `.npz` of weights, for others and for fine-tuning.

python -m mixer_jax.export --workdir=DIR [--checkpoint=latest|best|STEP|mean:N] --out=FILE.npz
"""

import pathlib

from absl import flags
import jax

from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path
from mixer_jax.runtime import cli
from mixer_jax.training.restore import load_run


def export(path: str, which: str, out: str) -> pathlib.Path:
  """Saves the parameters of a checkpoint in `out`, an `.npz`; the data are not needed.

  Raises:
    UserError: no such run or checkpoint (see `restore`), or a file that cannot be written.
  """
  target = user_path(out)
  if target.suffix != ".npz":
    raise UserError(f"{out}: weights are saved as .npz")
  task, variables = load_run(path, which)
  with as_user_error(f"{out}: cannot be written", OSError):
    task.export(jax.device_get(variables), target)
  return target


def main(_: list[str]) -> None:
  options, path = flags.FLAGS, cli.workdir()
  if not options.out:
    raise UserError("--out is missing")
  print(export(path, options.checkpoint, options.out))


if __name__ == "__main__":
  cli.define("workdir", "checkpoint")
  flags.DEFINE_string("out", None, "File to write.")
  cli.run(main)
