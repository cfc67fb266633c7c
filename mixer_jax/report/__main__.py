"""Draws and tabulates what runs and models show.

python -m mixer_jax.report curves --workdir=DIR
"""

from absl import flags

from mixer_jax import cli, workdir
from mixer_jax.errors import UserError
from mixer_jax.report import curves


def _curves(argv: list[str]) -> None:
  del argv
  if not flags.FLAGS.workdir:
    raise UserError("--workdir is missing; it names the directory of a run")
  print(curves.draw(workdir.existing(flags.FLAGS.workdir)))


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Directory of the run.")
  cli.run_commands({"curves": _curves})
