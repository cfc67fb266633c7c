"""Signals, and a second process in the directory of a run."""

import errno
import fcntl
import json
import os
import signal
import termios
import time

import pytest

from mixer_jax import evaluate, export
from mixer_jax.errors import UserError
from mixer_jax.rundir import lock, metrics_file
from mixer_jax.runtime import processes
from mixer_jax.training import loop
from mixer_jax.training.trainer import Trainer
from tests.children import Child, assert_same_run, latest, rows, signal_at, trained
from tests.conftest import waves


def test_signals_end_a_run_between_steps_with_a_checkpoint(tmp_path):
  """In windows of two steps: two processes end in epoch 2, two in 3; of any optimizer.

  Each signal comes twice, as from `timeout`, which signals a process and its group.
  """
  config = waves("adam", num_epochs=3, steps_per_dispatch=2)
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  trained(config, whole)
  for name, code, step in (
    ("SIGTERM", 143, 10),
    ("SIGUSR1", 138, 12),
    ("SIGHUP", 129, 18),
    ("SIGINT", 130, 20),
  ):
    ended = Child(config, parts, signal_at, (step, signal.Signals[name], 2, 0.2))
    assert ended.wait() == code, ended.err
    assert f"{name}: stopping with a checkpoint; a second ends at once" in ended.err
    assert f"stopped by {name}; the checkpoint of step {step} is written" in ended.out
    assert "Traceback" not in ended.err and "step/s" not in ended.err  # no bar in a log
    assert latest(parts) == step
  trained(config, parts)
  assert_same_run(config, parts, whole)
  best = evaluate.evaluate(str(parts), "best")["test"]["error"]
  assert best == rows(whole)[-1]["test/best_error"]


@pytest.mark.slow  # a run with collections, in test_collections.py, is stopped so, too
@pytest.mark.parametrize("name", ["kfac", "graft"])
def test_kfac_goes_on_between_two_inverses(name, tmp_path):
  """Inverses are renewed before steps 1, 5, 9, 13, ...; a signal comes after step 11."""
  config, whole, parts = waves(name), tmp_path / "whole", tmp_path / "parts"
  trained(config, whole)
  ended = Child(config, parts, signal_at, (11,))
  assert ended.wait() == 143, ended.err
  assert latest(parts) == 11
  trained(config, parts)
  assert_same_run(config, parts, whole)


class HungUp(Trainer):
  """Closes the terminal that the run prints to, when the first evaluation begins."""

  terminal = None

  def report(self):
    if HungUp.terminal is not None:
      os.close(HungUp.terminal)
      HungUp.terminal = None
      time.sleep(0.2)
    return super().report()


def hang_up():
  """In a child: prints to a terminal of its own, which closes."""
  HungUp.terminal, own = os.openpty()
  os.setsid()
  fcntl.ioctl(own, termios.TIOCSCTTY, 0)  # closing it sends SIGHUP
  for stream in (1, 2):
    os.dup2(own, stream)
  os.close(own)
  loop.Trainer = HungUp


def test_a_terminal_that_closes_ends_a_run_with_a_checkpoint(tmp_path):
  config, whole, parts = waves("adam"), tmp_path / "whole", tmp_path / "parts"
  trained(config, whole)
  ended = Child(config, parts, hang_up)
  assert ended.wait() == 129, ended.err
  assert latest(parts) == 9  # the evaluation of step 8 went on
  trained(config, parts)
  assert_same_run(config, parts, whole)


def test_a_second_signal_ends_at_once(tmp_path):
  arguments = (2, signal.SIGINT, 2, 1.2)
  ended = Child(waves("adam", num_epochs=3), tmp_path / "run", signal_at, arguments)
  assert ended.wait() == 130
  assert "stopped by" not in ended.out
  assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


@pytest.mark.thorough
def test_signals_mean_what_they_meant_afterwards(tmp_path):
  before = [signal.getsignal(s) for s in processes.SIGNALS]
  loop.train(waves(num_steps=1), str(tmp_path))
  assert [signal.getsignal(s) for s in processes.SIGNALS] == before
  assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.thorough
def test_a_second_process_is_refused_while_the_first_lives(tmp_path):
  """And not once it was killed. The live run, which saves every step, is evaluated and exported."""
  path, config = tmp_path / "run", waves("adam", num_steps=10**6, eval_steps=7, checkpoint_steps=1)
  first = Child(config, path)
  try:
    deadline = time.monotonic() + 120
    while len(metrics_file.read(path)) < 2 and time.monotonic() < deadline:
      time.sleep(0.05)
    with pytest.raises(UserError, match=f"workdir {path} is in use: another process"):
      loop.train(config, str(path))
    steps = set()
    for which in ("latest", "best", "latest", "latest"):
      assert 0 < evaluate.evaluate(str(path), which)["test"]["error"] < 3
      steps.add(latest(path))
    for i in range(20):
      export.export(str(path), "latest", str(tmp_path / f"{i}.npz"))
      steps.add(latest(path))
    assert first.alive and len(steps) > 5, first.err
  finally:
    first.kill()
  assert not lock.held(path)
  config.num_steps = latest(path) + 1
  stored = json.loads((path / "config.json").read_text()) | {"num_steps": config.num_steps}
  (path / "config.json").write_text(json.dumps(stored))
  trained(config, path)
  found = [row["step"] for row in rows(path)]
  assert found == sorted({*range(7, config.num_steps + 1, 7), config.num_steps})


def test_a_lock_is_inherited_by_its_number(tmp_path, monkeypatch):
  held = lock.hold(tmp_path)
  assert lock.hold(tmp_path) is None
  monkeypatch.setenv(lock.INHERITED, str(held))
  again = lock.hold(tmp_path)
  assert again is not None
  os.close(again)
  assert lock.held(tmp_path)
  other = tmp_path / "other"
  other.mkdir()
  (other / "lock").touch()
  assert lock.hold(other) not in (None, held)  # the number is that of another directory
  os.close(held)
  assert not lock.held(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch, caplog, number):
  def flock(*_):
    raise OSError(number, f"no locks {tmp_path}")

  monkeypatch.setattr("fcntl.flock", flock)
  held = [lock.hold(tmp_path) for _ in range(2)]
  assert None not in held and not lock.held(tmp_path)
  for descriptor in held:
    os.close(descriptor)
  assert caplog.text.count("nothing keeps a second process out") == 1


def warn_as_jax_does():
  """In a child: JAX's search for devices says why it takes a CPU."""
  import logging

  import jax

  devices = jax.devices

  def found(*args):
    logging.getLogger("jax._src.xla_bridge").warning("An NVIDIA GPU may be present:\n no CUDA.")
    return devices(*args)

  jax.devices = found


def test_the_first_line_of_a_run_says_why_it_is_on_a_cpu(tmp_path):
  child = trained(waves(num_steps=1), tmp_path / "run", warn_as_jax_does)
  first = child.out.splitlines()[0]
  assert "backend cpu: 8 x cpu (An NVIDIA GPU may be present: no CUDA.)" in first
  assert "NVIDIA" not in child.err  # and nowhere else
