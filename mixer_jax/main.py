"""Trains, or resumes, the run that a config describes.

  python -m mixer_jax.main --config=configs/kfac_cifar100.py:b16 --workdir=DIR \
      --config.optimizer.damping=1e-2
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


def main(argv: list[str]) -> None:
  del argv
  config = cli.checked_config(_CONFIG.value)
  from mixer_jax import compilation, train  # after the flags: a typing error fails at once

  compilation.keep_in(_CACHE.value)
  train.train(config, _WORKDIR.value)


if __name__ == "__main__":
  cli.run(main)
