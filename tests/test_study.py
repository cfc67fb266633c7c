"""A real study of tiny nets: begun, interrupted, ended and reported."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from mixer_jax import workdir
from mixer_jax.report import study as report
from mixer_jax.study import record

ROOT = pathlib.Path(__file__).parent.parent

# A real study: tiny nets, three that learn and one that diverges.
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
  config.data = config_lib.data("npz")
  config.data.update(dir="SHAPES", image_size=8, pad=1, flip=False)
  diverges = (model, optimizer) == ("m2", "sgd")
  config.optimizer = config_lib.optimizer(optimizer, learning_rate=1e30 if diverges else 3e-3)
  return config


def get_study():
  return study.Study(
    title="Shapes",
    config=config,
    axes={"model": ("m1", "m2"), "optimizer": ("adam", "sgd")},
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


def test_a_study_from_start_through_an_interruption_to_the_report(shapes_npz, tmp_path):
  file, directory = tmp_path / "real.py", tmp_path / "study"
  file.write_text(REAL.replace("SHAPES", str(shapes_npz)))
  command = [sys.executable, "-m", "mixer_jax.study", f"--study={file}", f"--workdir={directory}"]
  env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles sooner

  started = subprocess.Popen(
    command, cwd=ROOT, env=env, stdout=subprocess.PIPE, start_new_session=True
  )
  interrupted = directory / "m1-adam-seed0"
  wait_until(lambda: len(workdir.read_metrics(interrupted)) > 3)
  os.killpg(started.pid, signal.SIGKILL)
  started.communicate()
  opened = record.load(directory)
  wait_until(lambda: opened.state(opened.runs[0]).kind == "interrupted")
  state = opened.state(opened.runs[0])
  assert 1 <= state.epoch < 15

  def call(*args):
    return subprocess.run([*command, *args], cwd=ROOT, env=env, capture_output=True, text=True)

  assert f"m1-adam-seed0  interrupted, epoch {state.epoch} of 15\n" in call("--list").stdout
  other = call("--set=num_epochs=1")
  assert other.returncode == 2 and "num_epochs was 15, is 1 in 4 of 4 runs" in other.stderr
  assert "no run of the study is named 'm3-*'; --list" in call("--run=m3-*").stderr
  assert opened.state(opened.runs[0]).kind == "interrupted"  # none of these ran anything

  result = call("--parallel=2")
  assert result.returncode == 1, result.stderr
  assert "m1-adam-seed0: goes on\n" in result.stdout
  assert "3 done, 1 failed" in result.stdout
  assert {run.name: opened.state(run).kind for run in opened.runs} == {
    "m1-adam-seed0": "done",
    "m1-sgd-seed0": "done",
    "m2-adam-seed0": "done",
    "m2-sgd-seed0": "failed",
  }
  rows = workdir.read_metrics(interrupted)
  assert [row["epoch"] for row in rows] == list(range(1, 16))
  sessions = json.loads((interrupted / "run.json").read_text())["sessions"]
  assert [s["ended"] is None for s in sessions] == [True, False]
  assert sessions[1]["from_epoch"] > 1
  assert sessions[0]["data"]["train_images"] == 256 and sessions[0]["data"]["test_images"] == 90

  files = report.write(directory)
  assert [f.name for f in files] == ["study.md", "epochs.png", "time.png"]
  text = files[0].read_text()
  assert "`m2-sgd-seed0`: failed: the update of step 2 (epoch 1) is not finite" in text
  best = 100 * max(row["test/top1"] for row in rows)
  assert f"| m1 | Adam | 1 of 1 | 15 | {best:.2f} | {100 * rows[-1]['test/top1']:.2f} |" in text
