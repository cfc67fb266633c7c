"""Says what a config needs on devices that are not here: memory, communication, the least time of a step.

python -m mixer_jax.plan --config=configs/kfac_cifar10.py:b16 --devices=h100:8 --config.batch_size=512
python -m mixer_jax.plan --config=configs/sgd_cifar10.py:s4 --devices=v5e:2x4 --json

The programs of training and evaluation are compiled by XLA, `pip install 'mixer_jax[plan]'`, and not run.
DEVICES are KIND[:NUMBER], KIND:HOSTSxNUMBER of GPUs or KIND:TOPOLOGY of TPUs. No data are read that would
be downloaded: sets of the same shapes stand in. docs/devices.md explains the numbers.
"""

import json
import tempfile

from absl import flags
from ml_collections import ConfigDict, config_flags

from mixer_jax import optimizers
from mixer_jax.errors import UserError
from mixer_jax.planning import programs, report, stand_ins, targets
from mixer_jax.planning.report import Plan
from mixer_jax.planning.targets import Target
from mixer_jax.runtime import cli

# The batch of a second compilation, over the config's: memory between the two grows in proportion.
_LARGER = 8


def plan(config: ConfigDict, target: Target, largest_batch: bool = False) -> Plan:
  """Compiles the programs of a config for some devices.

  Args:
    config: of a run; it is not changed.
    target: the devices, see `targets.parse`.
    largest_batch: compiles a larger batch as well, to find the largest that fits.

  Raises:
    UserError: a mistake in the config, a batch that the devices do not divide, no compiler for them.
  """
  devices = targets.devices(target)
  with tempfile.TemporaryDirectory() as folder:
    run, told = stand_ins.build(config, devices, folder)
    training = programs.training(run, target)
    found = [training, programs.evaluation(run, target)]
    most = None
    if largest_batch and not training.refused and not config.get("data", {}).get("batch_tokens"):
      larger = config.copy_and_resolve_references()
      larger.batch_size = _LARGER * config.batch_size
      another, _ = stand_ins.build(larger, devices, folder)
      most = _largest(training, programs.training(another, target), run, target)
  steps = report.steps(training, target, optimizers.periods(config.optimizer))
  about = run.config.batch_size, found, steps if not training.refused else []
  return Plan(target, *about, run.order.steps_per_epoch, most, [told] if told else [])


def _largest(one, larger, run, target: Target) -> int | None:
  """The batch that fills the memory if it grows with the batch as it does between two programs."""
  size = run.config.batch_size
  if larger.refused:
    return None
  each = (larger.bytes - one.bytes) / (size * (_LARGER - 1))
  if each <= 0:
    return None
  unit = run.mesh.size * run.config.accum_steps
  most = size + (target.usable_memory - one.bytes) / each
  return max(int(most) // unit * unit, 0)


def main(_: list[str]) -> None:
  options = flags.FLAGS
  config = cli.checked_config(options.config)
  if not options.devices:
    kinds = ", ".join(targets.KINDS)
    raise UserError(f"--devices is missing; allowed: {kinds}, and as h100:8, h100:4x8, v5e:2x4")
  found = plan(config, targets.parse(options.devices), options.largest_batch)
  if options.json:
    print(json.dumps(report.as_json(found), indent=2))
    return
  for line in report.lines(found):
    print(line)


if __name__ == "__main__":
  cli.without_devices()
  config_flags.DEFINE_config_file("config", None, "Config file, with :MODEL where it takes one.")
  flags.DEFINE_string("devices", None, "KIND[:NUMBER], KIND:HOSTSxNUMBER or KIND:TOPOLOGY.")
  flags.DEFINE_bool("largest_batch", True, "Compile a larger batch as well, to find what fits.")
  flags.DEFINE_bool("json", False, "Print an object for programs, in bytes and seconds.")
  cli.run(main)
