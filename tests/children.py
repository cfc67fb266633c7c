"""Training in processes of its own, to kill, signal and starve.

A server process imports everything once and forks for each ("forkserver"), and all share a cache of
compiled programs: what remains of a start is a second or two.
"""

import atexit
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import jax
import ml_collections
import numpy as np

from mixer_jax import checkpoint, cli, experiment, sharding, train, workdir
from mixer_jax.optim import curvature  # noqa: F401 (so that the server has it)
import tests.conftest  # noqa: F401 (before any device is looked for)

TIMES = ("images_per_second", "seconds_per_epoch")
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.children"])


def _start_server() -> None:
  """With an environment of its own, which processes of other tests do not get."""
  cache = tempfile.mkdtemp(prefix="compiled-")
  atexit.register(shutil.rmtree, cache, ignore_errors=True)
  own = {
    "TQDM_DISABLE": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA takes its own options for features of a processor
    "JAX_COMPILATION_CACHE_DIR": cache,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  before = {name: os.environ.get(name) for name in own}
  os.environ |= own
  first = _SERVER.Process(target=int)
  first.start()
  first.join()
  for name, value in before.items():
    os.environ.pop(name)
    if value is not None:
      os.environ[name] = value


class Child:
  """A process that trains a config as `mixer_jax.main` would.

  Args:
    config: what.
    path: where.
    before: called first, in the process; a function of a module, with `args`.
    logs: the directory of what it prints; default: where the run's is.
  """

  _server_started = False

  def __init__(self, config, path: pathlib.Path, before=None, args=(), logs=None):
    if not Child._server_started:
      _start_server()
      Child._server_started = True
    logs = logs or path.parent
    logs.mkdir(parents=True, exist_ok=True)
    self._logs = [logs / f"{path.name}.{stream}" for stream in ("out", "err")]
    arguments = (config.to_json(), str(path), [str(log) for log in self._logs], before, args)
    self._process = _SERVER.Process(target=_train, args=arguments, daemon=True)
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
    return self._logs[0].read_text() if self._logs[0].exists() else ""

  @property
  def err(self) -> str:
    return self._logs[1].read_text() if self._logs[1].exists() else ""

  def kill(self) -> None:
    self._process.kill()
    self._process.join()


def trained(config, path: pathlib.Path, before=None, args=(), logs=None) -> Child:
  """A process that has trained without complaint."""
  child = Child(config, path, before, args, logs)
  assert child.wait() == 0, child.err
  return child


def _train(config: str, path: str, logs: list[str], before, args) -> None:
  for stream, log in zip((sys.stdout, sys.stderr), logs):
    stream.flush()
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream.fileno())
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
  if before:
    before(*args)
  sys.argv = ["train"]
  cli.run(lambda _: train.train(ml_collections.ConfigDict(json.loads(config)), path))


def rows(path: pathlib.Path):
  """The metrics of a run but for its times."""
  return [{k: v for k, v in row.items() if k not in TIMES} for row in workdir.read_metrics(path)]


def final_arrays(config, path: pathlib.Path):
  """Every array of the last checkpoint: parameters, optimizer, key, step."""
  run = experiment.build(config)
  saved = checkpoint.Checkpoints(path, read_only=True)
  shapes = jax.eval_shape(lambda: train.init_state(run))
  shapes = checkpoint.template(shapes, sharding.replicated(run.mesh))
  params, state, _ = saved.restore(
    saved.find("latest"), shapes.params, train._without_params(shapes)
  )
  return jax.tree.leaves((params, state))


def assert_same_run(config, a: pathlib.Path, b: pathlib.Path) -> None:
  """Bit for bit, at its end and in every epoch."""
  assert rows(a) == rows(b)
  pairs = zip(final_arrays(config, a), final_arrays(config, b), strict=True)
  assert all(np.array_equal(x, y) for x, y in pairs)


class _Signalled(train.EpochTrainer):
  """Sends its process a signal after some of the windows that it runs."""

  windows = 0
  at, number, times = 0, 0, 1

  def __call__(self, state, epoch, part=None, stop=None, restores=0):
    def asked():
      _Signalled.windows += 1
      if _Signalled.windows == self.at:
        for _ in range(self.times):
          os.kill(os.getpid(), self.number)
          _pause()
      return stop()

    return super().__call__(state, epoch, part, asked, restores)


def _pause() -> None:
  """Long enough for the thread that learns of signals."""
  import time

  time.sleep(0.2)


def signal_at(window: int, number: int = signal.SIGTERM, times: int = 1) -> None:
  """In a child: a signal after a window of steps, not counting the last of an epoch."""
  _Signalled.at, _Signalled.number, _Signalled.times = window, number, times
  train.EpochTrainer = _Signalled
