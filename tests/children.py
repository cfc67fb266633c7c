"""Training and commands in processes of their own, to kill, signal and starve.

A server process imports everything once and forks for each ("forkserver"), and all share the
compiled programs: what remains of a start is a second or two.
"""

import json
import multiprocessing
import os
import pathlib
import pickle
import runpy
import signal
import sys
import time

import jax
import ml_collections
import numpy as np

from docs import own_task  # noqa: F401 (so that the server has it)
from mixer_jax import experiment
from mixer_jax.optim.curvature import kfac_jax_blocks  # noqa: F401 (likewise)
from mixer_jax.rundir import metrics_file
from mixer_jax.runtime import cli
from mixer_jax.training import loop
from mixer_jax.training.checkpoint import Checkpoints
from mixer_jax.training.state import state_shapes
from mixer_jax.training.trainer import Trainer
import tests.conftest  # noqa: F401 (before any device is looked for)

TIMES = ("examples_per_second", "seconds")
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.children"])


class Process:
  """A function in a process of its own, as a command would run it.

  Args:
    log: its two streams go to `log`.out and `log`.err.
    function: of a module; called with `args`.
    args: can be pickled.
    devices: number of virtual CPU devices of the process.
    daemon: ends with this process, and has no children.
  """

  def __init__(self, log: pathlib.Path, function, args=(), devices=8, daemon=True):
    log.parent.mkdir(parents=True, exist_ok=True)
    self._logs = [log.with_name(f"{log.name}.{stream}") for stream in ("out", "err")]
    for path in self._logs:
      path.write_text("")
    arguments = ([str(path) for path in self._logs], devices, function, args)
    self._process = _SERVER.Process(target=_call, args=arguments, daemon=daemon)
    self._process.start()

  def wait(self, seconds: float = 900) -> int:
    """Its exit code, as a shell has it."""
    self._process.join(seconds)
    code = self._process.exitcode
    if code is None:
      self.kill()
      raise TimeoutError(self.err)
    return code if code >= 0 else 128 - code

  @property
  def alive(self) -> bool:
    return self._process.is_alive()

  @property
  def out(self) -> str:
    return self._logs[0].read_text()

  @property
  def err(self) -> str:
    return self._logs[1].read_text()

  @property
  def error(self) -> str:
    """The one line that it ended with."""
    assert "Traceback" not in self.err
    [line] = [x for x in self.err.splitlines() if x.startswith(("error: ", "FATAL"))]
    return line

  def signal(self, number: int) -> None:
    os.kill(self._process.pid, number)

  def kill(self) -> None:
    self._process.kill()
    self._process.join()


class Child(Process):
  """A process that trains a config as `mixer_jax.main` would.

  Args:
    config: of the run.
    path: its directory.
    before: called first, in the process; a function of a module, with `args`.
    logs: the directory of what it prints; default: where the run's is.
    devices: number of virtual CPU devices of the process.
  """

  def __init__(self, config, path: pathlib.Path, before=None, args=(), logs=None, devices=8):
    arguments = (config.to_json(), str(path), before, args)
    super().__init__((logs or path.parent) / path.name, _train, arguments, devices)


def trained(config, path: pathlib.Path, *args, **kwargs) -> Child:
  """A process that has trained without complaint; see `Child`."""
  child = Child(config, path, *args, **kwargs)
  assert child.wait() == 0, child.err
  return child


def command(log: pathlib.Path, module: str, *args: str, devices=8) -> Process:
  """`python -m mixer_jax.MODULE ARGS`, ended; see `Process`."""
  process = Process(log, _command, (module, args), devices)
  process.code = process.wait()
  return process


def called(log: pathlib.Path, function, *args, devices=8):
  """The result of a function in a process of its own, which may have children; it can be pickled."""
  result = log.with_name(f"{log.name}.pickle")
  process = Process(log, _keep, (str(result), function, args), devices, daemon=False)
  assert process.wait() == 0, process.err
  return pickle.loads(result.read_bytes())


def _call(logs: list[str], devices: int, function, args) -> None:
  for stream, log in zip((sys.stdout, sys.stderr), logs):
    stream.flush()
    os.dup2(os.open(log, os.O_WRONLY), stream.fileno())
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
  signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and what `nohup` starts this one
  flag = "--xla_force_host_platform_device_count="
  os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(f"{flag}8", f"{flag}{devices}")
  function(*args)


def _train(config: str, path: str, before, args) -> None:
  if before:
    before(*args)
  sys.argv = ["train"]
  cli.run(lambda _: loop.train(ml_collections.ConfigDict(json.loads(config)), path))


def _command(module: str, args: tuple[str, ...]) -> None:
  sys.argv = [module, *args]
  runpy.run_module(f"mixer_jax.{module}", run_name="__main__", alter_sys=True)


def _keep(path: str, function, args) -> None:
  pathlib.Path(path).write_bytes(pickle.dumps(function(*args)))


def rows(path: pathlib.Path):
  """The metrics of a run but for its times."""
  return [{k: v for k, v in row.items() if k not in TIMES} for row in metrics_file.read(path)]


def latest(path: pathlib.Path) -> int | None:
  """The step of a run's newest checkpoint."""
  return Checkpoints(path, read_only=True).latest()


def final_state(config, path: pathlib.Path):
  """The last checkpoint: variables, optimizer, key, step."""
  run = experiment.build(config)
  saved = Checkpoints(path, read_only=True)
  state, _ = saved.restore(saved.find("latest"), state_shapes(run))
  return state


def assert_same_run(config, a: pathlib.Path, b: pathlib.Path) -> None:
  """Bit for bit, at its end and in every evaluation."""
  assert rows(a) == rows(b)
  pairs = zip(*(jax.tree.leaves(final_state(config, path)) for path in (a, b)), strict=True)
  assert all(np.array_equal(x, y) for x, y in pairs)


class _Signalled(Trainer):
  """Sends its process a signal between two calls of the program."""

  at, number, times, apart = 0, 0, 1, 0.0

  def advance(self, stop=lambda: False):
    def asked():
      while _Signalled.times and self.step >= self.at:
        _Signalled.times -= 1
        os.kill(os.getpid(), self.number)
        time.sleep(self.apart)
      return stop()

    super().advance(asked)


def signal_at(step: int, number: int = signal.SIGTERM, times: int = 1, apart: float = 0.2) -> None:
  """In a child: a signal after a step that neither an evaluation nor a checkpoint follows.

  0.2 seconds are long enough for the thread that learns of signals.
  """
  _Signalled.at, _Signalled.number = step, number
  _Signalled.times, _Signalled.apart = times, apart
  loop.Trainer = _Signalled
