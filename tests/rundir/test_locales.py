"""Names of a run's directory that Python and the library of checkpoints may read in two ways."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

UMLAUT, NO_UTF_8 = "run-ü".encode(), b"run-\xff"
PLAIN = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
_CREATE = "import sys; from mixer_jax.rundir import directory; directory.create(sys.argv[1])"


@pytest.fixture(scope="module")
def latin_1(tmp_path_factory):
  """The environment of a German locale in ISO 8859-1, which is made here."""
  where = tmp_path_factory.mktemp("locales")
  made = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(where / "de_DE.ISO-8859-1")]
  if not shutil.which("localedef") or subprocess.run(made, capture_output=True).returncode:
    pytest.skip("localedef makes no locale here")
  return dict(LOCPATH=str(where), LC_ALL="de_DE.ISO-8859-1", PYTHONUTF8="0")


def run(*args, **environment):
  return subprocess.run([sys.executable, *args], env=os.environ | environment, capture_output=True)


def command(module, workdir, *args, **environment):
  """A command that trains for a moment, or reads what was trained."""
  return run("-m", f"mixer_jax.{module}", b"--workdir=" + workdir, *args, **environment)


TRAIN = ("--config=docs/own_task.py", "--config.num_steps=4", "--config.eval_steps=4")
TRAIN += ("--config.checkpoint_steps=4", "--config.data.examples=256")


def test_a_directory_that_checkpoints_would_not_find_is_refused(tmp_path, latin_1):
  for name, environment in ((UMLAUT, latin_1), (NO_UTF_8, {"LC_ALL": "C.UTF-8"})):
    path = os.fsencode(tmp_path / "new") + name
    said = run("-c", _CREATE, path, **environment)
    assert b"UserError: workdir" in said.stderr and b"PYTHONUTF8=1" in said.stderr
    assert os.listdir(path) == []
  said = run("-c", _CREATE, os.fsencode(tmp_path) + UMLAUT, **latin_1 | dict(PYTHONUTF8="1"))
  assert not said.returncode


@pytest.mark.thorough
def test_a_run_in_any_locale_is_restored_or_ends_in_a_line_at_the_start(tmp_path, latin_1):
  utf_8, path = dict(LC_ALL="C.UTF-8"), os.fsencode(tmp_path) + b"/" + UMLAUT
  for name, environment in ((UMLAUT, latin_1), (UMLAUT, PLAIN), (NO_UTF_8, utf_8)):
    said = command("main", os.fsencode(tmp_path) + b"/no-" + name, *TRAIN, **environment)
    assert said.returncode == 2, said.stderr
    assert [line[:15] for line in said.stderr.splitlines()][-1] == b"error: workdir "
  for environment in (utf_8, latin_1 | dict(PYTHONUTF8="1")):
    said = command("main", path, *TRAIN, **environment)
    assert said.returncode == 0 and b"done" in said.stdout, said.stderr
    said = command("evaluate", path, **environment)
    assert said.returncode == 0 and b"error" in said.stdout, said.stderr
    said = command("evaluate", path, **latin_1)
    assert said.returncode == 2 and b"error: workdir " in said.stderr
    shutil.rmtree(pathlib.Path(os.fsdecode(path)))
