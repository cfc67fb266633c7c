"""The task of docs/own_task.py, which no file of the package knows: every command takes it.

Every fresh process has modules on its path that cannot be imported.
"""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from docs.own_task import Waves
from mixer_jax import config as config_lib
from mixer_jax.rundir import metrics_file
from tests import children
from tests.runtime.test_devices import trap, trapped

ROOT = pathlib.Path(__file__).parent.parent
FILE = ROOT / "docs" / "own_task.py"
# Long enough that it is killed before its end: every step is saved.
SIZES = {"model.width": 16, "data.points": 8, "data.examples": 512, "batch_size": 64}
SIZES |= {"num_steps": 24, "eval_steps": 4, "checkpoint_steps": 1, "mesh.data": 1}
STUDY = """
from docs import own_task
from mixer_jax import config as config_lib
from mixer_jax.study import Study

def config(optimizer):
  made = own_task.get_config()
  made.optimizer = config_lib.optimizer("sgd", {"low": 1e-3, "high": 1e-1}[optimizer])
  made.num_epochs = 2
  made.model.width = 16
  made.data.update(points=8, examples=256)
  return made

def get_study():
  return Study(title="Rates", config=config, axes={"optimizer": ("low", "high")}, seeds=(0,))

def get_config(name):
  return get_study().run_config(name)
"""


def test_it_is_a_page_that_names_no_file_of_the_package():
  lines = FILE.read_text().splitlines()
  assert len(lines) < 100
  package = "\n".join(p.read_text() for p in (ROOT / "mixer_jax").rglob("*.py"))
  for name in ("docs.own_task", "class Derivative"):
    assert name not in package


def start(path, *args):
  """A fresh process of `mixer_jax.main`, and not one that has imported everything."""
  command = [sys.executable, "-m", "mixer_jax.main", "--config=docs/own_task.py", *args]
  log = (path / "main.txt").open("a")
  env = trapped(path)
  return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


ARGS = [f"--config.{name}={value}" for name, value in SIZES.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A directory with a run, "run", and modules that are traps."""
  path = tmp_path_factory.mktemp("own")
  for name in ("torch", "tensorflow"):
    trap(path, name)
  whole = start(path, *ARGS, f"--workdir={path}/run")
  assert whole.wait(300) == 0, (path / "main.txt").read_text()
  return path


def test_it_is_trained(trained):
  said = (trained / "main.txt").read_text()
  assert "step/s" not in said  # bars are for terminals
  assert "curvature blocks: 3 kronecker" in said
  assert f"curves in {trained}/run/curves.png" in said
  rows = metrics_file.read(trained / "run")
  assert [row["step"] for row in rows] == [*range(4, 25, 4)]
  assert rows[-1]["test/error"] < 0.8 * rows[0]["test/error"]


def test_it_is_killed_and_resumed_bit_for_bit(trained, tmp_path):
  killed = start(tmp_path, *ARGS, f"--workdir={tmp_path}/run")
  deadline = time.monotonic() + 200
  while len(metrics_file.read(tmp_path / "run")) < 1 and time.monotonic() < deadline:
    time.sleep(0.02)
  killed.kill()
  assert killed.wait() == -9, (tmp_path / "main.txt").read_text()
  resumed = start(tmp_path, *ARGS, f"--workdir={tmp_path}/run")
  assert resumed.wait(300) == 0, (tmp_path / "main.txt").read_text()
  assert "resumed from step" in (tmp_path / "main.txt").read_text()
  config = config_lib.of_run(tmp_path / "run")
  children.assert_same_run(config, tmp_path / "run", trained / "run")


def test_it_is_evaluated_predicted_exported_and_reported(trained):
  path = trained
  row, workdir = metrics_file.read(path / "run")[-1], f"--workdir={path}/run"
  ended = children.command(path / "log", "evaluate", workdir)
  assert ended.code == 0, ended.err
  headline, test = ended.out.splitlines()[-2:]
  assert headline == f"{path}/run step {row['step']} (epoch {row['epoch']:g})"
  assert test == f"test  error {row['test/error']:.6g}"

  ended = children.command(path / "log", "predict", workdir, f"--out={path}/p.npz")
  shapes = "outputs [128, 8], targets [128, 8], weights [128, 8]"
  assert ended.code == 0 and shapes in ended.out, ended.err
  predicted = np.load(path / "p.npz")
  mask = Waves(8, 512).split(1, 128).tree["mask"]
  np.testing.assert_array_equal(predicted["weights"], mask)
  squares = mask * np.square(predicted["outputs"] - predicted["targets"])
  assert np.sqrt(squares.sum() / mask.sum()) == pytest.approx(row["test/error"], rel=1e-5)
  ended = children.command(path / "log", "predict", workdir, "a.png")
  assert ended.code == 2 and "Derivative answers no inputs" in ended.error

  ended = children.command(path / "log", "export", workdir, f"--out={path}/w.npz")
  assert ended.code == 0 and np.load(path / "w.npz")["Dense_2/kernel"].shape == (16, 8), ended.err
  (path / "run" / "curves.png").unlink()
  ended = children.command(path / "log", "report.__main__", "curves", workdir)
  assert ended.code == 0 and (path / "run" / "curves.png").stat().st_size > 1000, ended.err


@pytest.mark.thorough
def test_it_is_in_a_study_of_two_runs(trained):
  path = trained
  (path / "study.py").write_text(STUDY)
  args = [f"--study={path}/study.py", f"--workdir={path}/study"]
  command = [sys.executable, "-m", "mixer_jax.study", *args]
  done = subprocess.run(
    command, cwd=ROOT, env=trapped(path), capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "low-seed0: done" in done.stdout and "high-seed0: done" in done.stdout
  ended = children.command(path / "log", "report.__main__", "study", f"--workdir={path}/study")
  assert ended.code == 0, ended.err
  written = [pathlib.Path(line) for line in ended.out.split() if os.path.exists(line)]
  tables = "\n".join(p.read_text() for p in written if p.suffix in (".md", ".csv"))
  for name in ("low", "high"):
    value = metrics_file.read(path / "study" / f"{name}-seed0")[-1]["test/error"]
    assert f"{value:.4g}" in tables or f"{value:.3g}" in tables


def test_no_command_has_imported_torch_or_tensorflow(trained):
  assert (trained / "torch.py").exists() and not list(trained.glob("imported-*"))
