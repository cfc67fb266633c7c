"""What a run says of itself."""

import json
import subprocess
import sys

import jax
import pytest

from mixer_jax import experiment, provenance


def test_sessions_of_a_run(tiny_config, tmp_path):
  run = experiment.build(tiny_config)
  with provenance.session(tmp_path, run, 0):
    (open_one,) = provenance.read(tmp_path)
    assert open_one["ended"] is None
  with pytest.raises(ValueError, match="no"), provenance.session(tmp_path, run, 2):
    raise ValueError("no")
  first, second = json.loads((tmp_path / "run.json").read_text())["sessions"]
  assert (first["from_epoch"], second["from_epoch"]) == (1, 3)
  assert first["started"] <= first["ended"] <= second["started"] <= second["ended"]
  data = {k: first["data"][k] for k in ("name", "train_images", "test_images", "classes")}
  assert data == dict(name="npz", train_images=256, test_images=90, classes=4)
  assert first["device"]["platform"] == "cpu" and first["device"]["count"] == 1
  assert first["versions"]["jax"] == jax.__version__


def git(path, *args):
  identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
  subprocess.run(["git", "-C", str(path), *identity, *args], check=True, capture_output=True)


def commit_of(package):
  """What a copy of the module says in the package it was put into."""
  source = open(provenance.__file__).read()
  (package / "provenance.py").write_text(source)
  script = f"import runpy; print(runpy.run_path({str(package / 'provenance.py')!r})['commit']())"
  result = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, text=True, check=True
  )
  return result.stdout.strip()


def test_the_commit_is_this_package_s(tmp_path):
  package = tmp_path / "mixer_jax"
  package.mkdir()
  (package / "__init__.py").write_text("")
  assert commit_of(package) == "None"  # no repository
  git(tmp_path, "init")
  assert commit_of(package) == "None"  # one of somebody else: the package is not in it
  git(tmp_path, "add", ".")
  git(tmp_path, "commit", "-m", "x")
  head = subprocess.run(
    ["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True
  ).stdout.strip()
  assert commit_of(package) == head[:12]
  (package / "__init__.py").write_text("changed\n")
  assert commit_of(package) == f"{head[:12]}-dirty"
