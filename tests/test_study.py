"""A real study of tiny nets: begun, interrupted, resumed, ended and reported."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mixer_jax.report import study as report
from mixer_jax.report import study_rows
from mixer_jax.rundir import metrics_file
from mixer_jax.study import record
from tests.environment import QUICK

ROOT = pathlib.Path(__file__).parent.parent

# Tiny nets, one that learns and one that diverges.
REAL = """
from mixer_jax import config as config_lib
from mixer_jax import study


def config(model, optimizer):
  config = config_lib.default()
  config.num_epochs = 15
  config.batch_size = config.eval_batch_size = 32
  config.model = config_lib.model(
    "mixer_small", hidden_dim=8, num_blocks=1, tokens_mlp_dim=8, channels_mlp_dim=8 * int(model[1:])
  )
  config.data = config_lib.data("npz", like="cifar10")
  config.data.update(dir="SHAPES", image_size=8, pad=1, flip=False)
  config.optimizer = config_lib.optimizer(optimizer, learning_rate=1e30 if model == "m2" else 3e-3)
  return config


def get_study():
  return study.Study(
    title="Shapes",
    config=config,
    axes={"model": ("m1", "m2"), "optimizer": ("sgd",)},
    seeds=(0,),
  )


def get_config(run):
  return get_study().run_config(run)
"""


def wait_until(happened, seconds=100):
  give_up = time.monotonic() + seconds
  while not happened():
    assert time.monotonic() < give_up
    time.sleep(0.01)


@pytest.mark.thorough
def test_a_study_from_start_through_an_interruption_to_the_report(shapes_npz, tmp_path):
  file, directory = tmp_path / "real.py", tmp_path / "study"
  file.write_text(REAL.replace("SHAPES", str(shapes_npz)))
  command = [sys.executable, "-m", "mixer_jax.study", f"--study={file}", f"--workdir={directory}"]
  env = os.environ | {"XLA_FLAGS": " ".join(QUICK)}  # one device

  started = subprocess.Popen(
    command, cwd=ROOT, env=env, stdout=subprocess.PIPE, start_new_session=True
  )
  interrupted = directory / "m1-sgd-seed0"
  wait_until(lambda: len(metrics_file.read(interrupted)) > 3)
  os.killpg(started.pid, signal.SIGKILL)
  started.communicate()
  opened = record.load(directory)
  first = opened.runs[0]
  wait_until(lambda: opened.state(first).kind == "interrupted")
  state = opened.state(first)
  assert 4 <= metrics_file.read(interrupted)[-1]["epoch"] < 15

  def call(*args):
    return subprocess.run([*command, *args], cwd=ROOT, env=env, capture_output=True, text=True)

  assert f"m1-sgd-seed0  interrupted, {state.progress}\n" in call("--list").stdout
  assert opened.state(first).kind == "interrupted"  # listing ran nothing

  result = call("--parallel=2")
  assert result.returncode == 1, result.stderr
  assert "m1-sgd-seed0: goes on\n" in result.stdout
  assert "1 done, 1 failed" in result.stdout
  assert [opened.state(run).kind for run in opened.runs] == ["done", "failed"]
  rows = metrics_file.read(interrupted)
  assert [row["epoch"] for row in rows] == list(range(1, 16))
  sessions = json.loads((interrupted / "run.json").read_text())["sessions"]
  assert [s["ended"] is None for s in sessions] == [True, False]
  assert sessions[1]["from_step"] > 0
  assert (sessions[0]["data"]["train"], sessions[0]["data"]["test"]) == (256, 90)

  files = report.write(directory)
  assert [f.name for f in files] == ["study.md", "epochs.png", "time.png"]
  text = files[0].read_text()
  assert "`m2-sgd-seed0`: failed: the update of step 2" in text
  last, best = 100 * rows[-1]["test/top1"], 100 * max(row["test/top1"] for row in rows)
  assert f"| m1 | SGD | 1 of 1 | 15 epochs | {last:.2f} | {best:.2f} |" in text
  ask = [sys.executable, "-m", "mixer_jax.report", "study", f"--workdir={directory}"]
  asked = lambda name: subprocess.run(
    [*ask, f"--metric={name}"], cwd=ROOT, env=env, capture_output=True, text=True
  )
  page = pathlib.Path(asked("loss").stdout.splitlines()[0])
  last, train, at_best = (
    rows[i][f"{split}/loss"]
    for i, split in ((-1, "test"), (-1, "train"), (rows[-1]["test/best_step"] // 8 - 1, "test"))
  )
  numbers = " | ".join(f"{x:.4g}" for x in (last, train, at_best))
  assert page == directory / "report" / "loss" / "study.md"
  assert f"| m1 | SGD | 1 of 1 | 15 epochs | {numbers} |" in page.read_text()
  assert "--metric is 'top9'; allowed: top1, " in asked("top9").stderr
  last = 100 * rows[-1]["test/top1"]
  assert study_rows.write(directory, tmp_path / "rows.csv")
  lines = (tmp_path / "rows.csv").read_text().splitlines()
  assert sum(f",0,test top-1 [%],{last:.6g}," in line for line in lines) == 1
  assert all(line.startswith("real,m1,npz,SGD,,15 epochs,0,") for line in lines[1:])


TUNED = """
from mixer_jax.study import Study, Tuning
from tests.study.grid import GRID


def get_study():
  tries = [{"optimizer.learning_rate": rate} for rate in (0.1, 0.2)]
  return Study(**GRID, tuning=Tuning(dict.fromkeys(("sgd", "adam"), tries)))
"""


@pytest.mark.thorough
def test_runs_that_wait_for_tries_are_told(tmp_path):
  (tmp_path / "tuned.py").write_text(TUNED)
  command = [sys.executable, "-m", "mixer_jax.study", f"--study={tmp_path}/tuned.py"]
  command += [f"--workdir={tmp_path}/runs", "--run=m1-sgd-*,m2-adam-seed0"]
  call = lambda *more: subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True)
  listed = call("--list")
  assert listed.stdout.splitlines()[0] == "m1-sgd-seed0  waiting, nothing was begun"
  assert not (tmp_path / "runs").exists()
  ended = call()
  assert ended.returncode == 1 and ended.stdout.splitlines() == [
    "4 waiting",
    "3 of them wait for tune-m1-sgd-*, which --run leaves out, another process runs or failed",
    "1 of them wait for tune-m2-adam-*, which --run leaves out, another process runs or failed",
  ]
  assert "m2-adam-seed0  waiting for tune-m2-adam-*" in call("--list").stdout.splitlines()
