"""Several processes train as one: same result, stopping, dying, resuming in other numbers."""

import signal
import socket
import time

import jax
import numpy as np
import pytest

from mixer_jax.errors import UserError
from mixer_jax.runtime import processes
from mixer_jax.training import loop
from tests.children import Process, _command, final_state, rows
from tests.conftest import waves

CONFIG_FILE = """
import json, ml_collections
def get_config():
  return ml_collections.ConfigDict(json.loads({!r}))
"""


class Job:
  """One run of `mixer_jax.main` as several processes of one device each."""

  def __init__(self, number, file, path, *args):
    with socket.socket() as s:
      s.bind(("localhost", 0))
      port = s.getsockname()[1]
    command = (f"--config={file}", f"--workdir={path}", f"--num_processes={number}")
    command += (f"--coordinator_address=localhost:{port}", *args)
    self.processes = []
    for i in range(number):
      arguments = ("main", (*command, f"--process_id={i}"))
      self.processes.append(Process(path.parent / f"log-{number}-{i}", _command, arguments, 1))

  def wait(self, timeout=300):
    return [p.wait(timeout) for p in self.processes]

  def output(self):
    return "\n".join(f"--- {i}\n{p.out}\n{p.err}" for i, p in enumerate(self.processes))

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()


def wait_until(condition, job, timeout=300):
  end = time.monotonic() + timeout
  while not condition():
    assert time.monotonic() < end, job.output()
    assert any(p.alive for p in job.processes), job.output()
    time.sleep(0.05)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("kfac", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_processes_stop_die_and_resume_as_one(optimizer, tmp_path):
  """Enough steps, each evaluated, that a signal finds the run under way."""
  config = waves(optimizer, num_steps=40, eval_steps=2, checkpoint_steps=8, **{"mesh.data": -1})
  file, path = tmp_path / "config.py", tmp_path / "run"
  file.write_text(CONFIG_FILE.format(config.to_json()))

  # Four processes; one that is not the first is told to stop.
  with Job(4, file, path, "--config.mesh.model=2") as job:
    wait_until(lambda: len(rows(path)) >= 2, job)
    job.processes[2].signal(signal.SIGTERM)
    assert job.wait() == [143] * 4, job.output()
    first = job.processes[0].out
    assert "4 x cpu in 4 processes" in first
    assert "stopped by a signal to another process; the checkpoint of step" in first
    assert "step 2/40" in first and "step 2/40" not in job.processes[1].out  # the first reports
  reached = len(rows(path))

  # Two go on; one is killed, and the other ends within a minute.
  with Job(2, file, path) as job:
    wait_until(lambda: len(rows(path)) >= reached + 2, job)
    job.processes[1].kill()
    start = time.monotonic()
    code = job.processes[0].wait(60)
    assert time.monotonic() - start < 60
    assert code != 0, job.output()
    assert "resumed from step" in job.processes[0].out

  # One ends it: the run is that of one device from start to end.
  config.mesh.data = 1
  loop.train(config, str(path))
  whole = loop.train(config, str(tmp_path / "whole"))
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4)
  jax.tree.map(close, *(final_state(config, p).params for p in (path, whole)))
  assert [r["step"] for r in rows(path)] == [*range(2, 41, 2)]
  for row, expected in zip(rows(path), rows(whole), strict=True):
    assert row == pytest.approx(expected, rel=2e-3, abs=2e-4)


def test_a_refusal_by_the_first_process_ends_all(tmp_path):
  file = tmp_path / "config.py"
  file.write_text(CONFIG_FILE.format(waves(**{"mesh.data": -1}).to_json()))
  (tmp_path / "taken").write_text("a file")
  with Job(2, file, tmp_path / "taken") as job:
    assert job.wait() == [2, 2], job.output()
    first, second = (p.err for p in job.processes)
  assert "taken cannot be written" in first
  assert "process 1 ends with the first, which says why" in second
  assert "Traceback" not in first + second


@pytest.mark.parametrize(
  "args, message",
  [
    (dict(number=2, index=0), "--coordinator_address, --num_processes and --process_id belong"),
    (dict(address="host", number=2, index=0), "coordinator_address is 'host'; allowed: HOST:PORT"),
    (dict(address="host:x", number=2, index=0), "HOST:PORT"),  # JAX ends the process
    (dict(detect=True), "the processes do not find each other"),
  ],
)
def test_what_join_refuses(args, message):
  with pytest.raises(UserError, match=message):
    processes.join(**args)
