"""The record of a run: its sessions, the commit of this package, and other data or code later."""

import inspect
import json
import logging
import subprocess
import sys

import jax
import numpy as np
import pytest

from mixer_jax import experiment
from mixer_jax.data.dataset import sample
from mixer_jax.errors import UserError
from mixer_jax.evaluate import evaluate
from mixer_jax.rundir import provenance
from mixer_jax.training import loop, session
from tests.conftest import waves


@pytest.fixture
def run():
  return experiment.build(waves())


def test_sessions_of_a_run(run, tmp_path):
  run.task.notes = lambda: {"scale": np.float32(0.5), "grid": np.array([64, 32])}
  with session.session(tmp_path, 0, run):
    (open_one,) = provenance.read(tmp_path)
    assert open_one["ended"] is None
  with pytest.raises(ValueError, match="no"), session.session(tmp_path, 16, run):
    raise ValueError("no")
  first, second = json.loads((tmp_path / "run.json").read_text())["sessions"]
  assert (first["from_step"], second["from_step"]) == (0, 16)
  assert first["started"] <= first["ended"] <= second["started"] <= second["ended"]
  assert first["device"]["platform"] == "cpu" and first["device"]["count"] == 1
  assert first["versions"]["jax"] == jax.__version__
  notes = provenance.notes(tmp_path)
  assert (notes["train"], notes["test"], notes["scale"], notes["grid"]) == (256, 64, 0.5, [64, 32])
  assert notes["shapes"] == {"x": [8], "y": [8], "mask": [8]}


@pytest.mark.parametrize("names", [("cat", "dog"), np.array(["cat", "dog"]), np.arange(2)])
def test_classes_in_another_order_are_refused(run, names, tmp_path):
  session.check_classes(tmp_path, names)  # nothing is recorded
  run.task.class_names = names
  with session.session(tmp_path, 0, run):
    session.check_classes(tmp_path, list(names))
    session.check_classes(tmp_path, ())
    for others, label in ((names[::-1], 0), ([*names, "eel"], 2), (names[:1], 1)):
      with pytest.raises(UserError, match=f"label {label} is "):
        session.check_classes(tmp_path, others)


def test_other_data_are_refused(run, tmp_path):
  session.check_data(tmp_path, run)  # nothing is recorded
  x = run.datasets["train"].tree["x"]
  rows = np.arange(8) * len(x) // 8
  found = sample(run.datasets["train"])["x"]
  assert found == pytest.approx([x[rows].mean(), x[rows].std()], abs=1e-6)
  with session.session(tmp_path, 0, run):
    x += 1e-3 * x.std()  # as another machine decodes them
    session.check_data(tmp_path, run)
    x += x.std()
    with pytest.raises(UserError, match="trained on other data: some x of mean"):
      session.check_data(tmp_path, run)
    for field, value, what in (("data.points", 16, "x of shape"), ("data.examples", 128, "256 ex")):
      other = experiment.build(waves(**{field: value}))
      with pytest.raises(UserError, match=f"trained on other data: .*{what}"):
        session.check_data(tmp_path, other)


OWN = """
from docs.own_task import Derivative
import {helper}

class Own(Derivative):
  pass
"""


def test_changed_code_of_a_task_is_told_by_a_start_and_by_evaluate(tmp_path, monkeypatch, caplog):
  """Its own file, a module that this imports, and the file of the config."""
  monkeypatch.syspath_prepend(str(tmp_path))
  helper, module, file = tmp_path / "helper_of_own.py", tmp_path / "own_code.py", tmp_path / "c.py"
  helper.write_text("A = 1\n")
  module.write_text(OWN.format(helper="helper_of_own"))
  file.write_text("config")
  config, path = waves(task="own_code:Own", num_steps=1, eval_steps=1), str(tmp_path / "run")
  monkeypatch.setattr(logging.getLogger("mixer_jax"), "propagate", True)
  for _ in range(2):
    loop.train(config, path, config_file=str(file))
  evaluate(path)
  assert not caplog.messages
  for changed, name in ((helper, "helper_of_own"), (module, "own_code"), (file, "the config file")):
    before = changed.read_text()
    changed.write_text(before + "# changed\n")
    loop.train(config, path, config_file=str(file))
    if changed is not file:
      evaluate(path)
    told = [line for line in caplog.messages if f"other code: {name} has changed" in line]
    assert len(told) == len(caplog.messages) == (1 if changed is file else 2)
    changed.write_text(before)
    caplog.clear()


def git(path, *args):
  identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
  subprocess.run(["git", "-C", str(path), *identity, *args], check=True, capture_output=True)


def commit_of(root):
  """The commit that a copy of the function names in the package it was put into."""
  script = f"""
import sys, types
sys.path.insert(0, {str(root)!r})
import mixer_jax
names = dict(mixer_jax=mixer_jax)
exec("import pathlib, subprocess\\n" + {inspect.getsource(session.commit)!r}, names)
print(names["commit"]())
"""
  command = [sys.executable, "-I", "-c", script]
  result = subprocess.run(command, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  return result.stdout.strip()


def test_the_commit_is_this_package_s(tmp_path):
  package = tmp_path / "mixer_jax"
  package.mkdir()
  (package / "__init__.py").write_text("")
  assert commit_of(tmp_path) == "None"  # no repository
  git(tmp_path, "init")
  assert commit_of(tmp_path) == "None"  # one of somebody else: the package is not in it
  git(tmp_path, "add", ".")
  git(tmp_path, "commit", "-m", "x")
  head = subprocess.run(
    ["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True
  ).stdout.strip()
  assert commit_of(tmp_path) == head[:12]
  (package / "__init__.py").write_text("changed = True\n")
  assert commit_of(tmp_path) == f"{head[:12]}-dirty"
