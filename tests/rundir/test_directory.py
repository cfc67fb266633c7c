"""What is read from the directory of a run: its config, its copies of files, its record."""

import json

import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.evaluate import evaluate
from mixer_jax.report import curves
from mixer_jax.rundir import directory, provenance
from mixer_jax.training import checkpoint, resume
from tests.conftest import waves
from tests.rundir.spoiled import line_of


@pytest.fixture
def run(tmp_path):
  """A run's directory as training leaves it, but for the checkpoints."""
  resume.store(tmp_path, waves())
  rows = [
    {"step": 8 * e, "epoch": e, "seconds": 1.0, "train/error": 0.9, "test/error": 0.5}
    for e in (1, 2, 3)
  ]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return tmp_path


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', '{"task": "nothing"}'])
def test_a_config_that_is_none_is_named(run, text):
  (run / "config.json").write_text(text)
  for function, args in (
    (config_lib.of_run, (run,)),
    (evaluate, (str(run), "best")),
    (curves.draw, (run,)),
  ):
    assert str(run / "config.json") in line_of(function, *args)


def test_options_that_came_later_take_their_defaults(run):
  """A run of an older version is evaluated, and resumed with the config of today."""
  stored = json.loads((run / "config.json").read_text())
  for group, field, default in (("schedule", "decay_end", 1.0), ("", "patience", 0)):
    del (stored[group] if group else stored)[field]
    (run / "config.json").write_text(json.dumps(stored))
    loaded = config_lib.of_run(run)
    assert (loaded[group] if group else loaded)[field] == default
  assert resume.resolve(loaded, run).to_json() == loaded.to_json()
  loaded.patience = 3
  with pytest.raises(UserError, match="another config: patience was 0, is 3"):
    resume.resolve(loaded, run)
  loaded.update(patience=0, eval_batch_size=7)  # a field that may differ
  resume.resolve(loaded, run)


def test_the_copies_of_files(run, monkeypatch):
  """They are named from home; the copies of the last of two starts stay."""
  monkeypatch.setenv("HOME", str(run))
  for name in ("v.txt", "w.txt"):
    (run / name).write_text(name)
    resume.keep_files(run, {"data.vocabulary": f"~/{name}"})
  copy = run / "files" / "data.vocabulary" / "w.txt"
  assert directory.kept_files(run) == {"data.vocabulary": copy} and copy.read_text() == "w.txt"
  assert config_lib.of_run(run).to_json() == waves().to_json()  # it has no such field


def test_a_checkpoint_that_was_never_finished_is_none(run):
  (run / "checkpoints" / "8.orbax-checkpoint-tmp").mkdir(parents=True)
  assert resume.begun(str(run)) is None
  (run / "checkpoints" / "4").mkdir()
  assert resume.begun(str(run)) == run


@pytest.mark.parametrize("text", ["{", "[]", '{"sessions": {}}'])
def test_a_record_that_is_none_is_named(run, text):
  (run / "run.json").write_text(text)
  assert str(run / "run.json") in line_of(provenance.read, run)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_the_sums_of_a_checkpoint(tmp_path, text):
  (tmp_path / checkpoint.CHANGING).write_text("{}")
  (tmp_path / "a").write_text("a")
  checkpoint.write_sums(tmp_path)
  assert checkpoint.damage(tmp_path) is None
  (tmp_path / "a").write_text("b")
  assert checkpoint.damage(tmp_path) == "a is not as it was written"
  (tmp_path / "a").unlink()
  assert checkpoint.damage(tmp_path) == "a is missing"
  (tmp_path / checkpoint.SUMS).write_text(text)
  assert checkpoint.SUMS in checkpoint.damage(tmp_path)
