"""What every config needs on accelerators, as the compiler plans it: no device is used."""

import csv
import pathlib
import subprocess
from typing import Any

import jax

from benchmarks import configs, tables
from mixer_jax import config as config_lib
from mixer_jax import plan
from mixer_jax.planning import report, targets
from mixer_jax.planning.report import Plan
from mixer_jax.runtime import cli
from mixer_jax.study import plan as study_plan

TARGETS = ("h100", "h100:8", "v5e:2x4")
TITLES = (
  *("config", "devices", "batch", "compiled in s", "memory GiB", "fits", "TFLOP a plain step"),
  *("collectives", "MB", "step ms at least", "by"),
)
_FIELDS = (
  *("study", "model", "data", "optimizer", "settings", "budget", "seed", "metric", "value"),
  *("device", "versions", "commit", "command"),
)


def planned(name: str, spec: str, overrides: list[str]) -> Plan:
  """The plan of a config, "NAME[:ARGUMENT]" of a file of `configs/`."""
  [(path, argument)] = configs.chosen([name]).values()
  config = study_plan.read_config(path, *(() if argument is None else (argument,)))
  config_lib.override(config, overrides)
  return plan.plan(config, targets.parse(spec))


def numbers(found: Plan) -> dict[str, float]:
  """By name and unit; without those of a program that the compiler refuses."""
  training, evaluation = found.programs
  own = {"compiled [s]": training.seconds, "fits": 0.0}
  if training.refused:
    return own
  sums = [pair for step in found.steps for pair in step.collectives.values()]
  own |= {
    "fits": float(report.fits(training, found.target.usable_memory)),
    "memory [GiB]": training.bytes / 2**30,
    "evaluation memory [GiB]": evaluation.bytes / 2**30,
    "collectives [number]": sum(number for number, _ in sums),
    "collectives [MB]": sum(payload for _, payload in sums) / 1e6,
    "least step [ms]": 1e3 * found.step_seconds,
  }
  for step in found.steps:
    talk = sum(payload for _, payload in step.collectives.values())
    own[f"{step.kind} operations [TFLOP]"] = step.operations / 1e12
    own[f"{step.kind} moved [GB]"] = step.bytes / 1e9
    own[f"{step.kind} collectives [MB]"] = talk / 1e6
  return own


def cells(name: str, found: Plan) -> list[str]:
  """A row of the table."""
  training, own = found.programs[0], numbers(found)
  begin = [f"`{name}`", f"`{found.target.spec}`", str(found.batch_size), f"{training.seconds:.0f}"]
  if training.refused:
    return [*begin, "-", f"no: {training.refused}", *["-"] * 5]
  slowest = max(found.steps, key=lambda step: step.bound.seconds / step.every)
  return [
    *(*begin, f"{training.bytes / 2**30:.2f}", "yes" if own["fits"] else "no"),
    f"{own['plain operations [TFLOP]']:.3g}",
    *(f"{own['collectives [number]']:.0f}", f"{own['collectives [MB]']:.3g}"),
    *(f"{own['least step [ms]']:.3g}", slowest.bound.by),
  ]


def write(file: pathlib.Path, about: dict[str, str], found: Plan, own: dict[str, float]) -> None:
  """Adds rows to a file of `results/`, one a number."""
  commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True).stdout
  settings = f"batch={found.batch_size}; devices={found.target.spec}"
  about = {
    "settings": settings,
    "device": "compiled for, not run on",
    "versions": f"JAX {jax.__version__}",
    "commit": commit.strip(),
  } | about
  begun = file.exists()
  with file.open("a", newline="") as opened:
    writer = csv.DictWriter(opened, _FIELDS, lineterminator="\n")
    if not begun:
      writer.writeheader()
    for metric, value in own.items():
      row = dict.fromkeys(_FIELDS, "") | about | {"metric": metric, "value": f"{value:.4g}"}
      writer.writerow(row)


def main(options: Any) -> None:
  cli.without_devices()
  file = pathlib.Path(options.out) if options.out else None

  def measured():
    for name in configs.chosen(options.configs):
      for spec in options.devices or TARGETS:
        found = planned(name, spec, options.set)
        jax.clear_caches()
        if file:
          command = f"python -m benchmarks plans --configs={name} --devices={spec}"
          about = {"study": "devices", "model": name, "command": command}
          write(file, about, found, numbers(found))
        yield cells(name, found)

  tables.show(TITLES, measured(), texts=2)
