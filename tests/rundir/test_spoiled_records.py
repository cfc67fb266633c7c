"""The files that runs keep of themselves, spoiled: named in one line."""

import json
import pathlib

import pytest

from mixer_jax import pretrained
from mixer_jax.data import cache
from mixer_jax.errors import UserError
from mixer_jax.evaluate import evaluate
from mixer_jax.images import folder
from mixer_jax.report import curves
from mixer_jax.rundir import directory, provenance
from mixer_jax.training import checkpoint
from tests.conftest import waves
from tests.rundir.spoiled import NONSENSE, line_of

SESSIONS = ['{"sessions": [1]}', '{"sessions": {}}', '{"sessions": [{}]}']


@pytest.fixture
def run(tmp_path):
  """A run's directory as training leaves it, but for the checkpoints."""
  directory.store_config(tmp_path, waves(), started=False)
  rows = [
    {"step": 8 * e, "epoch": e, "seconds": 1.0, "train/error": 0.9, "test/error": 0.5}
    for e in (1, 2, 3)
  ]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return tmp_path


@pytest.mark.parametrize("text", [*NONSENSE, SESSIONS[0]])
def test_the_config_of_a_run(run, text):
  (run / "config.json").write_text(text)
  (run / "checkpoints" / "8").mkdir(parents=True)
  for function, args in (
    (directory.load_config, (run,)),
    (directory.stored_config, (str(run),)),
    (evaluate, (str(run), "best")),
    (curves.draw, (run,)),
  ):
    assert str(run / "config.json") in line_of(function, *args)


def test_any_field_of_the_config_of_a_run(run):
  stored = json.loads((run / "config.json").read_text())
  assert directory.load_config(run).to_dict().keys() == waves().to_dict().keys()
  changes = [("batch_size", "8"), ("model", None), ("mesh", []), ("optimizer", {"name": "sgd"})]
  for field, value in changes:
    (run / "config.json").write_text(json.dumps(stored | {field: value}))
    assert f"config.json is not the config of a run: {field}" in line_of(directory.load_config, run)
  for field in stored:
    rest = {name: value for name, value in stored.items() if name != field}
    (run / "config.json").write_text(json.dumps(rest))
    if field == "task" or isinstance(stored[field], dict):
      assert f"{field} is missing from the config" in line_of(directory.load_config, run)


def test_options_that_came_later_take_their_defaults(run):
  """A run of an older version is evaluated, and resumed with the config of today."""
  stored = json.loads((run / "config.json").read_text())
  for group, field, default in (("schedule", "decay_end", 1.0), ("", "patience", 0)):
    del (stored[group] if group else stored)[field]
    (run / "config.json").write_text(json.dumps(stored))
    loaded = directory.load_config(run)
    assert (loaded[group] if group else loaded)[field] == default
  directory.check_config(run, loaded)
  loaded.patience = 3
  with pytest.raises(UserError, match="another config: patience was 0, is 3"):
    directory.check_config(run, loaded)


def test_fields_that_may_change_are_those_of_the_last_start(run):
  stored = json.loads((run / "config.json").read_text())
  loaded = directory.load_config(run)
  loaded.update(eval_batch_size=7, keep_checkpoints=5)
  directory.check_config(run, loaded)
  directory.store_config(run, loaded, started=True)
  assert json.loads((run / "config.json").read_text()) == stored | {
    "eval_batch_size": 7,
    "keep_checkpoints": 5,
  }


def test_copies_of_files_of_a_run_of_another_task(run):
  """The config of the other task has no such field; the differences are told, no traceback."""
  copy = run / "files" / "data.vocabulary" / "vocab.txt"
  copy.parent.mkdir(parents=True)
  copy.write_text("a")
  config = directory.with_files(run, waves())
  assert config.to_json() == waves().to_json()
  config.data.examples += 8
  with pytest.raises(UserError, match="data.examples was"):
    directory.check_config(run, config)


def test_a_file_is_kept_by_its_path_from_home_and_an_empty_folder_is_none(run, monkeypatch):
  monkeypatch.setenv("HOME", str(run))
  (run / "v.txt").write_text("a")
  for _ in range(2):  # a start that ended early, and the next
    directory.keep_files(run, {"data.vocabulary": "~/v.txt"})
  copy = run / "files" / "data.vocabulary" / "v.txt"
  assert copy.read_text() == "a"
  copy.unlink()
  before = directory.load_config(run).to_json()
  assert directory.with_files(run, directory.load_config(run)).to_json() == before


def test_paths_where_nothing_can_be_looked_up_are_a_line(run):
  long = str(run / ("x" * 300))
  with pytest.raises(UserError, match="cannot be written: File name too long"):
    directory.create(long)
  with pytest.raises(UserError, match="does not exist"):
    directory.existing(long)
  with pytest.raises(UserError, match="no such file"):
    pretrained.read(long)
  with pytest.raises(UserError, match="no such folder"):
    folder.Folder(long)
  assert cache.read(pathlib.Path(long), "a", "k", lambda allocate: {}) == {}


def test_a_checkpoint_that_was_never_finished_is_none(run):
  (run / "checkpoints" / "8.orbax-checkpoint-tmp").mkdir(parents=True)
  assert directory.stored_config(str(run)) is None
  (run / "checkpoints" / "4").mkdir()
  assert directory.stored_config(str(run)) == directory.load_config(run)


def test_curves_of_spoiled_metrics(run):
  path = run / "metrics.jsonl"
  path.write_text("{\n" + path.read_text())
  assert f"{path} is spoiled in line 1: " in line_of(curves.draw, run)


@pytest.mark.parametrize("text", [*NONSENSE, *SESSIONS])
def test_the_sessions_of_a_run(run, text):
  (run / "run.json").write_text(text)
  assert str(run / "run.json") in line_of(provenance.read, run)


@pytest.mark.parametrize("text", [*NONSENSE[:7], "[" * 10**5, "[[1, 2]]"])
def test_the_sums_of_a_checkpoint(tmp_path, text):
  (tmp_path / checkpoint._CHANGING).write_text("{}")
  (tmp_path / "a").write_text("a")
  checkpoint.write_sums(tmp_path)
  assert checkpoint.damage(tmp_path) is None
  for name in (checkpoint.SUMS, checkpoint._CHANGING):
    before = (tmp_path / name).read_text()
    (tmp_path / name).write_text(text)
    found = checkpoint.damage(tmp_path)
    assert name == checkpoint._CHANGING or "cannot be read" in found
    (tmp_path / name).write_text(before)
  (tmp_path / "a").unlink()
  assert checkpoint.damage(tmp_path) == "a is missing"
