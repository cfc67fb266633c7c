"""What is worth measuring on a device that is at hand for some minutes, in order of value.

Each part is a process with a share of the time; what it has printed by then is kept. One file has
the answers, so that nothing has to be typed again.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, NamedTuple

import jax
import jax.extend

from benchmarks import optimizers, steps
from benchmarks.timing import take_turns
from mixer_jax import experiment
from mixer_jax import optimizers as own_optimizers
from mixer_jax.planning import programs, report, targets
from mixer_jax.planning.targets import Target
from mixer_jax.rundir import metrics_file
from mixer_jax.runtime import cli, devices

_KFAC = "configs/kfac_cifar10.py:s4"
_STUDY = "configs/studies/cifar10_optimizers.py"
_ROWS = "s4-kfac-seed0,s4-sgd-seed0,s4-adam-seed0"
_TESTS = "tests/optim/test_kfac.py tests/optim/test_linalg.py tests/optim/curvature tests/models"
_PLATFORMS = {"gpu": "cuda"}  # JAX's name of a device's platform: the one that it is asked by


class Part(NamedTuple):
  """A process, its share of the time, and what it leaves besides its output."""

  name: str
  share: float
  command: list[str]
  result: Callable[[], Any] = lambda: None


def parts(folder: pathlib.Path, config: list[str]) -> list[Part]:
  """The parts in order of value; `config` are overrides of all configs."""
  mixer = lambda module, *flags: [sys.executable, "-m", f"mixer_jax.{module}", *flags]
  overrides = [f"--config.{override}" for override in config]
  run, study = folder / "kfac", folder / "study"
  steps_file = folder / "steps.json"
  own = [sys.executable, "-m", "benchmarks", "device_steps", f"--config={_KFAC}", *overrides]
  settings = [f"--set={override}" for override in config]
  platform = jax.devices()[0].platform
  environment = f"MIXER_JAX_TEST_PLATFORM={_PLATFORMS.get(platform, platform)}"
  return [
    Part(
      *("a run of K-FAC", 0.25),
      mixer("main", f"--config={_KFAC}", f"--workdir={run}", *overrides),
      lambda: metrics_file.read(run) if run.is_dir() else None,
    ),
    Part(
      *("steps of all optimizers", 0.35, [*own, f"--out={steps_file}"]),
      lambda: json.loads(steps_file.read_text()) if steps_file.exists() else None,
    ),
    Part(
      *("tests", 0.15),
      ["env", environment, sys.executable, "-m", "pytest", "-n", "0", *_TESTS.split()],
    ),
    Part(
      *("rows of the K-FAC study", 0.25),
      mixer("study", f"--study={_STUDY}", f"--workdir={study}", f"--run={_ROWS}", *settings),
      lambda: {p.parent.name: metrics_file.read(p.parent) for p in study.rglob("metrics.jsonl")},
    ),
  ]


def measure(part: Part, seconds: float) -> dict[str, Any]:
  """Runs a part for so long at most."""
  start = time.perf_counter()
  process = subprocess.Popen(
    part.command,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )
  try:
    output, _ = process.communicate(timeout=seconds)
    ended = f"exit code {process.returncode}"
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, 15)  # a run writes a checkpoint
    try:
      output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, 9)
      output, _ = process.communicate()
    ended = "out of time"
  return {
    "part": part.name,
    "command": " ".join(part.command),
    "ended": ended,
    "seconds": time.perf_counter() - start,
    "output": output[-4000:],
    "result": part.result(),
  }


def main(options: Any) -> None:
  out, begin = pathlib.Path(options.out or "device.json"), time.perf_counter()
  device, commit = jax.devices()[0], ["git", "describe", "--always", "--dirty"]
  found = {
    "device": f"{jax.device_count()} x {device.device_kind}",
    "platform": device.platform,
    "versions": f"JAX {jax.__version__}",
    "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
    "date": time.strftime("%Y-%m-%d"),
    "parts": [],
  }
  devices.print_line()
  _leave_device()
  with tempfile.TemporaryDirectory() as folder:
    left = parts(pathlib.Path(folder), options.set)
    while left:
      rest = 60 * options.minutes - (time.perf_counter() - begin)
      part = left.pop(0)
      seconds = max(rest * part.share / (part.share + sum(p.share for p in left)), 1.0)
      print(f"{part.name}, at most {seconds:.0f} s: {' '.join(part.command)}", flush=True)
      found["parts"].append(measure(part, seconds))
      out.write_text(json.dumps(found, indent=2) + "\n")  # whatever happens to the next part
      print(f"  {found['parts'][-1]['ended']}", flush=True)
  print(f"written to {out}")


def _leave_device() -> None:
  """Gives the device's memory back: the parts are processes of their own."""
  jax.clear_caches()
  jax.extend.backend.clear_backends()


def target() -> Target | None:
  """The devices that are here, if their figures are known."""
  kind = jax.devices()[0].device_kind
  known = {k.name: name for name, k in targets.KINDS.items() if k.is_gpu}
  known |= {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
  name = next((name for text, name in known.items() if text and kind.startswith(text)), None)
  if name is None:
    return None
  return Target(name, targets.KINDS[name], 1, jax.device_count())


def of_steps(options: Any) -> None:
  """Seconds of a step of each optimizer, beside the least that published peaks allow."""
  config, found = cli.checked_config(options.config), {}
  known = target()
  for name in own_optimizers.OPTIMIZERS:
    given = config.copy_and_resolve_references()
    given.optimizer = optimizers.optimizer_config(name)
    try:
      found[name] = _step(given, options.rounds, known)
    except Exception as e:  # one optimizer that a device refuses must not cost the others
      found[name] = {"failed": f"{type(e).__name__}: {e}"[:500]}
    print(name, found[name], flush=True)
    pathlib.Path(options.out).write_text(json.dumps(found))
    jax.clear_caches()


def _step(config: Any, rounds: int, known: Target | None) -> dict[str, Any]:
  run = experiment.build(config)
  compiled = programs.training(run)
  own = {"compile_seconds": compiled.seconds, "bytes": compiled.bytes}
  if known:
    kinds = report.steps(compiled, known, own_optimizers.periods(config.optimizer))
    own["least_seconds"] = {step.kind: step.bound.seconds for step in kinds}
  fixed, kinds = steps.Fixed(run, steps.batch(run)).start(), optimizers.kinds(config.optimizer)
  calls = {kind: (lambda count=count: fixed(count)) for kind, (count, _) in kinds.items()}
  times = take_turns(calls, rounds)
  return own | {"seconds": {kind: sorted(t)[len(t) // 2] for kind, t in times.items()}}
