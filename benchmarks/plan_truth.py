"""A plan for a CPU beside what a run takes there: memory of a step, and its operations."""

import ctypes
import gc
import pathlib
import re
from typing import Any

import jax

from benchmarks import configs, flops, steps, tables
from mixer_jax.experiment import Experiment
from mixer_jax.planning import programs
from mixer_jax.runtime import devices

_STATUS, _RESET = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
_CONFIGS = ("sgd_cifar10:s4", "kfac_cifar10:s4", "mlm", "darcy")
TITLES = (
  *("config", "planned: arguments MiB", "held", "planned: temporaries MiB", "taken"),
  *("planned: GFLOP", "counted"),
)


def _resident(peak: bool = False) -> int:
  """Bytes of this process that are in memory, or were at most since `_RESET`."""
  name = "VmHWM" if peak else "VmRSS"
  return 1024 * int(re.search(rf"{name}:\s*(\d+) kB", _STATUS.read_text())[1])


def measure(name: str, run: Experiment) -> list[str]:
  """A row of the table."""
  planned = programs.training(run)
  real = steps.Real(run).start()
  jax.block_until_ready(real.state)
  held = sum(x.nbytes for x in jax.tree.leaves((real.state, run.datasets["train"].arrays())))
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)  # what compilation has left would hide what the step takes
  _RESET.write_text("5")
  before = _resident()
  real()
  taken = _resident(peak=True) - before
  products = sum(o.times * o.products for o in planned.program.operations if o.scope == "plain")
  loss = lambda variables, batch: run.task.loss(variables, batch, jax.random.key(0))[0].total
  gradient = lambda params, rest, batch: jax.grad(
    lambda params: loss({**rest, "params": params}, batch)
  )(params)
  variables = dict(run.variable_shapes)
  counted = 2 * flops.multiply_adds(gradient, variables.pop("params"), variables, run.batch_shapes)
  mib = lambda size: f"{size / 2**20:.0f}"
  sizes = planned.arguments, held, planned.temporaries, taken
  return [
    f"`{name}`",
    *map(mib, sizes),
    f"{products / planned.steps / 1e9:.4g}",
    f"{counted / 1e9:.4g}",
  ]


def main(options: Any) -> None:
  devices.print_line()

  def measured():
    for name, (path, argument) in configs.chosen(options.configs or list(_CONFIGS)).items():
      yield measure(name, configs.built(path, argument, "", options.set))

  tables.show(TITLES, measured())
