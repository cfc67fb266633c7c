"""Trains, or resumes, the run that a config describes.

  python -m mixer_jax.main --config=configs/kfac_cifar100.py:b16 --workdir=DIR \
      --config.optimizer.damping=1e-2

docs/devices.md has the flags of several hosts, or of several processes on one.
"""

import contextlib
import sys
from typing import Any, Callable

from absl import flags
from ml_collections import config_flags

from mixer_jax.errors import reason
from mixer_jax.runtime import cli


@contextlib.contextmanager
def _resumable():
  """Tells a user who interrupts it that nothing is lost."""
  try:
    yield
  except KeyboardInterrupt:
    print("\nthe same command with the same --workdir resumes from the last checkpoint", end="")
    raise


def _drawn(draw: Callable[[Any], Any], directory: Any) -> None:
  """Draws the curves of a run; the run is done whether or not they can be drawn."""
  try:
    print(f"curves in {draw(directory)}")
  except Exception as e:
    print(f"curves are not drawn: {reason(e)}", file=sys.stderr)


def main(_: list[str]) -> None:
  options = flags.FLAGS
  config = cli.checked_config(options.config)
  # After the flags: typing errors fail at once.
  from mixer_jax.report import curves
  from mixer_jax.runtime import compilation, processes
  from mixer_jax.training import loop

  one_of_several = (options.coordinator_address, options.num_processes, options.process_id)
  processes.join(*one_of_several, options.distributed)
  compilation.keep_in(options.compilation_cache)
  with processes.together(), _resumable():
    file = config_flags.get_config_filename(options["config"]).partition(":")[0]
    directory = loop.train(config, options.workdir, options.verbose_model, file)
    processes.on_first(lambda: _drawn(curves.draw, directory))


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", None, "Config file, with :MODEL where it takes one.")
  flags.DEFINE_string("workdir", None, "Directory of the run; default: fresh under runs/.")
  cli.define("compilation_cache")
  flags.DEFINE_bool("verbose_model", False, "Print the tables of parameters and blocks.")
  flags.DEFINE_bool("distributed", False, "One of several processes that a cluster has started.")
  flags.DEFINE_string("coordinator_address", None, "HOST:PORT of the first process.")
  flags.DEFINE_integer("num_processes", None, "Number of processes.")
  flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
  cli.run(main)
