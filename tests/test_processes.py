"""Several processes train as one: same result, stopping, dying, resuming in other numbers."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mixer_jax import checkpoint, processes, train, workdir
from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
CONFIG_FILE = """
import json, ml_collections
def get_config():
  return ml_collections.ConfigDict(json.loads({!r}))
"""
OPTIMIZERS = {
  "adam": dict(learning_rate=3e-3, eps=1e-2),  # or it scales up gradients of rounding errors
  "kfac": dict(learning_rate=0.05, factor_period=2, inverse_period=4),
}
TIMES = ("images_per_second", "seconds_per_epoch")


class Job:
  """One run of `mixer_jax.main` as several processes of one device each."""

  def __init__(self, number, file, path, *args):
    with socket.socket() as s:
      s.bind(("localhost", 0))
      port = s.getsockname()[1]
    self.logs = [path.parent / f"log-{number}-{i}.txt" for i in range(number)]
    flags = "--xla_backend_optimization_level=0"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "mixer_jax.main", f"--config={file}", f"--workdir={path}"]
    command += [f"--coordinator_address=localhost:{port}", f"--num_processes={number}", *args]
    self.processes = [
      subprocess.Popen(
        [*command, f"--process_id={i}"],
        cwd=ROOT,
        env=env,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
      )
      for i, log in enumerate(self.logs)
    ]

  def wait(self, timeout=300):
    return [p.wait(timeout) for p in self.processes]

  def output(self):
    return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()
      process.wait()


def wait_until(condition, job, timeout=300):
  end = time.monotonic() + timeout
  while not condition():
    assert time.monotonic() < end, job.output()
    assert any(p.poll() is None for p in job.processes), job.output()
    time.sleep(0.05)


def rows(path):
  return [{k: v for k, v in row.items() if k not in TIMES} for row in workdir.read_metrics(path)]


def parameters(path):
  saved = checkpoint.Checkpoints(path, read_only=True)
  return saved.restore_arrays(saved.find("latest"))


@pytest.fixture
def config(tiny_config):
  """Enough epochs that a signal finds the run under way."""
  tiny_config.num_epochs = 24
  tiny_config.mesh.data = -1
  tiny_config.data.pad = 0
  return tiny_config


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("kfac", marks=pytest.mark.slow)])
def test_processes_stop_die_and_resume_as_one(optimizer, config, tmp_path):
  config.optimizer = config_lib.optimizer(optimizer, **OPTIMIZERS[optimizer])
  file, path = tmp_path / "config.py", tmp_path / "run"
  file.write_text(CONFIG_FILE.format(config.to_json()))

  # Four processes; one that is not the first is told to stop.
  with Job(4, file, path, "--config.mesh.model=2") as job:
    wait_until(lambda: len(rows(path)) >= 2, job)
    job.processes[2].send_signal(signal.SIGTERM)
    assert job.wait() == [143] * 4, job.output()
    first = job.logs[0].read_text()
    assert "4 x cpu in 4 processes" in first
    assert "stopped by a signal to another process; the checkpoint of step" in first
    assert "epoch 1/24" not in job.logs[1].read_text()  # the first alone reports
  reached = len(rows(path))

  # Two go on; one is killed, and the other ends within a minute.
  with Job(2, file, path) as job:
    wait_until(lambda: len(rows(path)) >= reached + 2, job)
    job.processes[1].kill()
    start = time.monotonic()
    code = job.processes[0].wait(timeout=60)
    assert time.monotonic() - start < 60
    assert code not in (0, None), job.output()
    assert "resumed from step" in job.logs[0].read_text()

  # One ends it: the run is that of one device from start to end.
  config.mesh.data = 1
  train.train(config, str(path))
  whole = train.train(config, str(tmp_path / "whole"))
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4)
  jax.tree.map(close, parameters(path), parameters(whole))
  assert [r["epoch"] for r in rows(path)] == [*range(1, 25)]
  for row, expected in zip(rows(path), rows(whole), strict=True):
    assert row["train/loss"] == pytest.approx(expected["train/loss"], rel=2e-3, abs=2e-4)
    assert row["test/top1"] == pytest.approx(expected["test/top1"], abs=0.012)  # one of 90 images


def test_a_refusal_by_the_first_process_ends_all(config, tmp_path):
  file = tmp_path / "config.py"
  file.write_text(CONFIG_FILE.format(config.to_json()))
  (tmp_path / "taken").write_text("a file")
  with Job(2, file, tmp_path / "taken") as job:
    assert job.wait() == [2, 2], job.output()
    first, second = (log.read_text() for log in job.logs)
  assert "taken is a file" in first
  assert "process 1 ends with the first, which says why" in second
  assert "Traceback" not in first + second


@pytest.mark.parametrize(
  "args, message",
  [
    (dict(number=2, index=0), "--coordinator_address, --num_processes and --process_id belong"),
    (dict(address="localhost:1", number=2, index=2), "--process_id is 2; allowed: 0 to 1"),
    (dict(detect=True), "the processes do not find each other"),
  ],
)
def test_what_join_refuses(args, message):
  with pytest.raises(UserError, match=message):
    processes.join(**args)
