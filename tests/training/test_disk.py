"""Disks that are full, small or read-only: one line, and nothing that was finished is lost."""

import contextlib
import json
import os
import pathlib
import resource
import shutil
import subprocess

import jax
import pytest

from mixer_jax.errors import UserError
from mixer_jax.evaluate import evaluate
from mixer_jax.rundir import directory, metrics_file
from mixer_jax.training import loop, resume
from mixer_jax.training.checkpoint import Checkpoints
from tests import children
from tests.conftest import waves


def before_second_save(do):
  """In a child: something happens when the first checkpoint is written."""
  save = Checkpoints.save

  def save_in_trouble(self, step, *args, **kwargs):
    if step == 16:
      self.wait()
      do()
    save(self, step, *args, **kwargs)

  Checkpoints.save = save_in_trouble


def starve(size):
  """In a child: then no file may grow beyond a size."""
  limits = (size, resource.RLIM_INFINITY)
  before_second_save(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))


@pytest.fixture
def config():
  """Its checkpoints have files of more than 20 kB; nothing else has."""
  return waves("adam", num_epochs=3, **{"model.width": 80})


@pytest.mark.thorough
def test_a_write_that_fails_is_one_line_and_the_run_goes_on_later(config, tmp_path):
  path, whole = tmp_path / "run", tmp_path / "whole"
  child = children.Child(config, path, starve, (20_000,))
  assert child.wait() == 75
  line = child.error
  assert f"a checkpoint in {path}/checkpoints cannot be written: File too large" in line
  assert "the same command goes on" in line
  assert children.latest(path) == 8
  resumed = children.trained(config, path)
  assert "resumed from step 8" in resumed.out
  children.trained(config, whole)
  children.assert_same_run(config, path, whole)


@contextlib.contextmanager
def small_disk(path, size):
  """A file system of its own, if this process may mount one."""
  path.mkdir()
  command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
  try:
    subprocess.run(command, check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError) as e:
    pytest.skip(f"mounting a tmpfs is not permitted: {getattr(e, 'stderr', e)}")
  try:
    yield path
  finally:
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path):
  """In a child: then the disk is filled to the last byte."""

  def to_the_last_byte():
    with (path / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
      while file.write(bytes(4096)):
        pass

  before_second_save(to_the_last_byte)


@pytest.mark.thorough
def test_a_disk_that_fills_up_and_is_cleared(config, tmp_path):
  with small_disk(tmp_path / "disk", "8m") as disk:
    path = disk / "run"
    child = children.Child(config, path, fill, (disk,), logs=tmp_path)
    assert child.wait() == 75
    assert "cannot be written: No space left on device" in child.error
    assert children.latest(path) == 8
    full = children.Child(config, path, logs=tmp_path)
    assert full.wait() == 75
    assert "disk/run" in full.error
    (disk / "ballast").unlink()
    children.trained(config, path, logs=tmp_path)
    children.trained(config, tmp_path / "whole")
    children.assert_same_run(config, path, tmp_path / "whole")


def test_a_read_only_disk_is_refused_before_training(tmp_path):
  with small_disk(tmp_path / "disk", "1m") as disk:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(UserError, match=f"workdir {disk}/run cannot be written: Read-only file"):
      loop.train(waves(), str(disk / "run"))


@pytest.mark.parametrize(
  "path, reason",
  [
    ("file", "File exists"),
    ("file/run", "Not a directory"),
    ("gs://bucket/run", "allowed: a folder"),
    # Orbax looks for the files of a checkpoint by a pattern: it would find none, and say nothing.
    ("lr[1e-3]", "could not be read again"),
    ("a\\b", "could not be read again"),
  ],
)
def test_a_workdir_that_cannot_be_is_refused_before_training(path, reason, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").write_text("mine")
  with pytest.raises(UserError, match=f"workdir .*{reason}"):
    loop.train(waves(), path)
  assert [p.name for p in tmp_path.iterdir()] == ["file"]
  assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["all*", "which?", "two words", "50%", "a]"])
def test_checkpoints_in_a_workdir_with_other_special_characters_are_read(tmp_path, name):
  loop.train(waves(), str(tmp_path / name))
  assert evaluate(str(tmp_path / name))["test"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_workdir_without_permission_is_refused_before_training(tmp_path):
  tmp_path.chmod(0o500)
  with pytest.raises(UserError, match="cannot be written: Permission denied"):
    loop.train(waves(), str(tmp_path / "run"))


def test_checkpoints_whose_config_was_removed_are_told(tmp_path):
  (tmp_path / "checkpoints" / "8").mkdir(parents=True)
  with pytest.raises(
    UserError, match=f"workdir {tmp_path} has checkpoints and no config.json; take"
  ):
    resume.begun(str(tmp_path))


def test_metrics_that_cannot_be_written_are_told(tmp_path):
  """/dev/full is a full disk for everyone."""
  if not os.path.exists("/dev/full"):
    pytest.skip("no /dev/full")
  (tmp_path / "metrics.tmp").symlink_to("/dev/full")
  row = {"step": 8, "epoch": 1, "seconds": 0.0}
  (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
  with pytest.raises(UserError, match=f"{tmp_path} cannot be written: No space left on device"):
    with directory.writing(tmp_path):
      metrics_file.Writer(tmp_path, 8)
  assert len(metrics_file.read(tmp_path)) == 1


def test_room_is_looked_for_before_training(tmp_path, monkeypatch):
  free = []
  monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, *free))
  saved = Checkpoints(tmp_path)
  state = {"a": jax.ShapeDtypeStruct((250_000,), "float32")}
  free[:] = [1_000_000]
  saved.check_room(state)
  free[:] = [900_000]
  with pytest.raises(UserError, match="has 0.9 MB free; a checkpoint takes 1.0 MB"):
    saved.check_room(state)
  saved.close()


@pytest.mark.thorough
def test_a_study_on_a_full_disk_is_told(tmp_path):
  study = "python -m mixer_jax.study --study=configs/studies/quickstart.py --max_minutes=0"
  line = f"ulimit -f 1; exec {study} --workdir={tmp_path / 'study'}"
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=root)
  assert done.returncode == 75 and "Traceback" not in done.stderr
  assert "cannot be written: File too large. All that was saved before is kept" in done.stderr
  assert not list((tmp_path / "study").glob("*.tmp")) + list((tmp_path / "study").glob(".*.tmp"))
