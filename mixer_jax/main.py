"""Trains, or resumes, the run that a config describes.

  python -m mixer_jax.main --config=configs/kfac_cifar100.py:b16 --workdir=DIR \
      --config.optimizer.damping=1e-2

On several hosts, or as several processes on one, the same command is started once
for each with --distributed, where SLURM, Open MPI, Kubernetes or Cloud TPU starts
them, or with --coordinator_address=HOST:PORT --num_processes=N --process_id=I.
"""

from absl import flags
from ml_collections import config_flags

from mixer_jax import cli

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Config file, with :MODEL where it takes one."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; default: fresh under runs/.")
_CACHE = flags.DEFINE_string(
  "compilation_cache", None, "Directory of compiled programs, '' for none; see docs/compilation.md."
)

_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "One of several processes, as SLURM, Open MPI, Kubernetes or a TPU says."
)
_ADDRESS = flags.DEFINE_string("coordinator_address", None, "HOST:PORT of the first process.")
_NUMBER = flags.DEFINE_integer("num_processes", None, "How many processes there are.")
_INDEX = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")


def main(argv: list[str]) -> None:
  del argv
  config = cli.checked_config(_CONFIG.value)
  from mixer_jax import compilation, processes, train  # after the flags: typing errors fail at once

  processes.join(_ADDRESS.value, _NUMBER.value, _INDEX.value, _DISTRIBUTED.value)
  compilation.keep_in(_CACHE.value)
  with processes.together():
    train.train(config, _WORKDIR.value)


if __name__ == "__main__":
  cli.run(main)
