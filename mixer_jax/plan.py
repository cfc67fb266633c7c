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
from mixer_jax.planning.programs import Compiled
from mixer_jax.planning.report import Plan
from mixer_jax.planning.targets import Target
from mixer_jax.runtime import cli

_LARGER = 8  # a second batch that is compiled, over the config's
_PROBES = 3  # compilations of other batches


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
    most = _largest(config, run, training, devices, target, folder) if largest_batch else None
  steps = report.steps(training, target, optimizers.periods(config.optimizer))
  about = run.config.batch_size, found, steps if not training.refused else []
  return Plan(target, *about, run.order.steps_per_epoch, most, [told] if told else [])


def _largest(config, run, training: Compiled, devices, target: Target, folder: str) -> int | None:
  """About the largest batch that fits, or the whole training set; None if it is not known.

  Memory grows with the batch, but not in a straight line: programs are compiled where the line through
  the last two says that the memory is full.
  """
  if training.refused or config.get("data", {}).get("batch_tokens"):
    return None
  unit, number = run.mesh.size * run.config.accum_steps, len(run.datasets["train"])
  whole = lambda size: min(int(size), number) // unit * unit
  points = [(config.batch_size, training.bytes)]
  size = whole(_LARGER * config.batch_size)
  for _ in range(_PROBES):
    if size in (0, *dict(points)):
      break
    larger = config.copy_and_resolve_references()
    larger.batch_size = size
    compiled = programs.training(stand_ins.build(larger, devices, folder)[0], target)
    if compiled.refused:
      return None
    points.append((size, compiled.bytes))
    (one, its), (other, theirs) = points[-2:]
    each = (theirs - its) / (other - one)
    if each <= 0:
      return None
    size = whole(max(other + (target.usable_memory - theirs) / each, unit))
  return size


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
