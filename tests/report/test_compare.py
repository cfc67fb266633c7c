"""Runs in one picture, from rows made by hand."""

import json

import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import compare, figures
from mixer_jax.rundir import metrics_file
from tests.study.grid import errors


def write_run(path, optimizer, losses, seconds, seed=0, **fields):
  config = errors(optimizer)
  config.update(seed=seed, **fields)
  path.mkdir(parents=True)
  (path / "config.json").write_text(config.to_json())
  rows = [
    {"step": 5 * i, "epoch": i / 2, "seconds": seconds, "train/error": loss, "test/error": 1.0}
    for i, loss in enumerate(losses, 1)
  ]
  (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def runs(tmp_path):
  """Two seeds of Adam, one of K-FAC; a row takes 2 s, 4 s and 1 s."""
  write_run(tmp_path / "adam-0", "adam", (8.0, 6.0, 4.0, 2.0), 2.0)
  write_run(tmp_path / "adam-1", "adam", (6.0, 4.0, 2.0, 1.0), 4.0, seed=1)
  write_run(tmp_path / "kfac-0", "kfac", (5.0, 1.5, 1.0), 1.0)
  return [f"{tmp_path}/adam-*", f"{tmp_path}/kfac-0"]


@pytest.fixture
def drawn(monkeypatch):
  """The panels that were drawn."""
  panels = []
  save = figures.save
  monkeypatch.setattr(figures, "save", lambda f, path: (panels.extend(f.axes), save(f, path))[1])
  return panels


def test_seeds_are_a_line_over_their_mean_time(runs, drawn, tmp_path):
  said = compare.compare(runs, "train/error", "seconds", tmp_path / "a.png", log=True)
  assert said == [
    "Adam: 1.5 after 12 s",
    "K-FAC: 1 after 3 s; 1.5 after 2 s, 6.0 times sooner than Adam",
  ]
  (axis,) = drawn
  adam, kfac = axis.lines
  np.testing.assert_array_equal(adam.get_xydata(), [[3, 7], [6, 5], [9, 3], [12, 1.5]])
  np.testing.assert_array_equal(kfac.get_xydata(), [[1, 5], [2, 1.5], [3, 1]])
  assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
  assert axis.get_ylabel() == "train error (m)" and axis.get_xlabel().startswith("seconds of train")
  assert np.asarray(Image.open(tmp_path / "a.png")).std() > 0


def test_a_run_that_two_patterns_find_counts_once(runs, tmp_path):
  twice = [*runs, f"{tmp_path}/adam-0", f"{tmp_path}/../{tmp_path.name}/adam-0"]
  said = compare.compare(twice, "train/error", "seconds", tmp_path / "a.png")
  assert said[0] == "Adam: 1.5 after 12 s"


def test_a_line_of_one_evaluation_is_a_point(drawn, tmp_path):
  write_run(tmp_path / "short", "adam", (4.0,), 1.0)
  compare.compare([f"{tmp_path}/short"], "train/error", "step", tmp_path / "a.png")
  assert drawn[0].lines[0].get_marker() == "."


def test_runs_of_other_tasks_and_examples_are_told(runs, caplog, tmp_path):
  compare.compare(runs, "train/error", "step", tmp_path / "a.png")
  assert "differ" not in caplog.text
  images = config_lib.default()
  images.data.test_split = "train[90%:]"
  write_run(tmp_path / "other", "adam", (4.0,), 1.0)
  (tmp_path / "other" / "config.json").write_text(images.to_json())
  compare.compare([*runs, f"{tmp_path}/other"], "train/error", "step", tmp_path / "a.png")
  assert caplog.messages[0] == (
    "The runs differ in task: image_classification, tests.study.grid:Errors"
  )
  images.data.test_split = "test"
  (tmp_path / "adam-0" / "config.json").write_text(images.to_json())
  caplog.clear()
  compare.compare(
    [f"{tmp_path}/adam-0", f"{tmp_path}/other"], "train/error", "step", tmp_path / "a.png"
  )
  assert caplog.messages[0] == "The runs differ in data.test_split: test, train[90%:]"


def test_runs_below_the_home_of_the_user(runs, monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  said = compare.compare(["Mine=~/adam-*"], "train/error", "seconds", tmp_path / "a.png")
  assert said == ["Mine: 1.5 after 12 s"]


def test_a_directory_with_brackets_is_a_run_of_that_name(drawn, tmp_path):
  write_run(tmp_path / "rate[1]", "adam", (4.0, 2.0), 1.0)
  write_run(tmp_path / "of[2]" / "a", "adam", (4.0, 2.0), 1.0)
  for name in (*(f"{tmp_path}/rate[1]", f"own={tmp_path}/rate[1]"), f"{tmp_path}/of[2]/*"):
    [said] = compare.compare([name], "train/error", "step", tmp_path / "a.png")
    assert said.endswith(": 2 after 10 steps")


def test_runs_that_measure_otherwise_and_paths_with_an_equals_sign(drawn, monkeypatch, tmp_path):
  monkeypatch.setattr(compare, "_MEASURING", ("eval_batch_size",))  # these runs have no data.dir
  for i in range(2):
    write_run(tmp_path / f"rate=0.1/{i}", "adam", (4.0, 2.0 + i), 1.0, eval_batch_size=1 + i)
  said = compare.compare([f"{tmp_path}/rate=0.1/*"], "train/error", "step", tmp_path / "a.png")
  assert [line.partition(";")[0] for line in said] == [
    f"Adam, {i}: {2 + i} after 10 steps" for i in (0, 1)
  ]
  said = compare.compare([f"own={tmp_path}/rate=0.1/1"], "train/error", "step", tmp_path / "a.png")
  assert said == ["own: 3 after 10 steps"]


def test_one_metric_against_another_is_a_point_for_each_label(runs, drawn, tmp_path):
  for path, own in ((tmp_path / "adam-0", 4.0), (tmp_path / "adam-1", 2.0)):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["test/error"] = own
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  said = compare.compare(runs, "train/error", "test/error", tmp_path / "a.png")
  assert said == ["Adam: test/error 3, train/error 1.5", "K-FAC: test/error 1, train/error 1"]
  (axis,) = drawn
  points = [line.get_xydata().tolist() for line in axis.lines if line.get_marker() == "o"]
  assert points == [[[3, 1.5]], [[1, 1]]]
  assert (axis.get_xlabel(), axis.get_ylabel()) == ("test error (m)", "train error (m)")
  compare.compare(runs, "train/error", "test/error", tmp_path / "a.png", log=True)
  assert (drawn[-1].get_xscale(), drawn[-1].get_yscale()) == ("log", "log")
  with pytest.raises(
    UserError, match="--over is 'test/top1'; .*adam-0 has train/error, test/error"
  ):
    compare.compare(runs, "train/error", "test/top1", tmp_path / "a.png")
  with pytest.raises(
    UserError, match="--over is 'hours'; allowed: seconds, step, epoch or a metric"
  ):
    compare.compare(runs, "train/error", "hours", tmp_path / "a.png")


def test_the_other_s_time_is_its_first_at_that_value(runs, drawn, tmp_path):
  write_run(tmp_path / "flat", "adam", (4.0, 2.0, 2.0, 2.0), 1.0)
  labelled = [f"flat={tmp_path}/flat", f"slow={tmp_path}/adam-1"]
  said = compare.compare(labelled, "train/error", "step", tmp_path / "a.png")
  assert said[1] == "slow: 1 after 20 steps; 2 after 15 steps, 1.5 times later than flat"


def test_failed_runs_are_left_out_and_short_ones_told(runs, drawn, tmp_path, caplog):
  write_run(tmp_path / "adam-2", "adam", (9.0,), 2.0, seed=2)
  (tmp_path / "adam-2/outcome.json").write_text('{"reason": "the loss is nan", "step": 5}')
  said = compare.compare(runs, "train/error", "seconds", tmp_path / "a.png")
  assert said[0] == "Adam: 1.5 after 12 s" and "adam-2 failed, and is left out" in caplog.text
  (tmp_path / "adam-2/outcome.json").unlink()
  compare.compare(runs, "train/error", "seconds", tmp_path / "a.png")
  assert "Adam: of up to 4 rows, the 1 at steps of all runs" in caplog.text


def test_runs_are_averaged_at_steps_that_all_share(drawn, tmp_path):
  for name, every in (("a", 1), ("b", 2)):
    write_run(tmp_path / name, "adam", [0.1 * i * every for i in range(1, 5)], 1.0)
    rows = metrics_file.read(tmp_path / name)
    lines = [json.dumps(row | {"step": (i + 1) * every}) for i, row in enumerate(rows)]
    (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  both = [f"X={tmp_path}/a", f"X={tmp_path}/b"]
  said = compare.compare(both, "train/error", "step", tmp_path / "a.png")
  assert said == ["X: 0.4 after 4 steps"]
  lines = [
    json.dumps(row | {"step": row["step"] + 100}) for row in metrics_file.read(tmp_path / "b")
  ]
  (tmp_path / "b/metrics.jsonl").write_text("\n".join(lines) + "\n")
  with pytest.raises(UserError, match="runs of X were evaluated at no step that all of them share"):
    compare.compare(both, "train/error", "step", tmp_path / "a.png")


def test_files_of_runs_count_by_their_content(drawn, tmp_path):
  for i, words in enumerate(("one", "one", "two")):
    write_run(tmp_path / f"r{i}", "adam", (4.0, 2.0), 1.0, seed=i)
    copy = tmp_path / f"r{i}/files/data.dir/vocab.txt"
    copy.parent.mkdir(parents=True)
    copy.write_text(words)
    (copy.parent / ".DS_Store").touch()
  said = compare.compare([f"{tmp_path}/r*"], "train/error", "step", tmp_path / "a.png")
  assert len(said) == 2  # two seeds of one vocabulary, and a run of another


def test_the_best_so_far_is_judged_as_its_metric():
  config = config_lib.default("image_classification", "mixer_small")
  assert compare._metric(config, "test/best_top1").higher_is_better


def test_a_spoiled_outcome_is_told(runs, tmp_path):
  (tmp_path / "adam-1/outcome.json").write_text("[]")
  with pytest.raises(UserError, match="outcome.json is not the outcome of a run; delete it"):
    compare.compare(runs, "train/error", "step", tmp_path / "a.png")


@pytest.mark.parametrize("over", ["step", "test/error"])
def test_each_of_many_labels_has_its_own_colour_and_form(runs, drawn, tmp_path, over):
  labelled = [f"{i}={tmp_path}/kfac-0" for i in range(21)]
  compare.compare(labelled, "train/error", over, tmp_path / "a.png")
  drawn_as = lambda line: (line.get_color(), line.get_linestyle(), line.get_marker())
  assert len({drawn_as(line) for line in drawn[0].lines}) >= 21


def test_other_axes_and_labels(runs, drawn, tmp_path):
  labelled = [f"first={tmp_path}/adam-0", f"second={tmp_path}/adam-1"]
  said = compare.compare(labelled, "train/error", "step", tmp_path / "a.png")
  assert said[1] == "second: 1 after 20 steps; 2 after 15 steps, 1.3 times sooner than first"
  (axis,) = drawn
  np.testing.assert_array_equal(axis.lines[0].get_xdata(), [5, 10, 15, 20])
  assert [text.get_text() for text in axis.get_legend().get_texts()] == ["first", "second"]


def test_runs_of_one_optimizer_with_other_settings_are_other_lines(runs, drawn, tmp_path):
  write_run(tmp_path / "adam-longer", "adam", (7.0, 5.0), 2.0, num_steps=60)
  compare.compare(runs, "train/error", "epoch", tmp_path / "a.png")
  texts = [text.get_text() for text in drawn[0].get_legend().get_texts()]
  assert texts == ["Adam, adam-0", "Adam, adam-longer", "K-FAC"]


def test_runs_in_folders_of_one_name_keep_a_line_each(drawn, tmp_path):
  for i, folder in enumerate("ab"):
    write_run(tmp_path / folder / "seed0", "adam", (4.0, 2.0 + i), 1.0, num_steps=30 + i)
  paths = [f"{tmp_path}/{folder}/seed0" for folder in "ab"]
  said = compare.compare(paths, "train/error", "step", tmp_path / "a.png")
  assert [line.partition(":")[0] for line in said] == [f"Adam, {path}" for path in paths]


def test_mistakes_are_named(runs, tmp_path, monkeypatch):
  with pytest.raises(UserError, match="--runs has .*/none.*; no run with metrics is there"):
    compare.compare([*runs, f"{tmp_path}/none*"], "train/error", "step", tmp_path / "a.png")
  monkeypatch.chdir(tmp_path / "adam-0")  # a run's own directory
  with pytest.raises(UserError, match="--runs has 'typo'; no run with metrics is there"):
    compare.compare(["typo"], "train/error", "step", tmp_path / "a.png")
  with pytest.raises(UserError, match="--metric is 'train/top1'; .*adam-0 has train/error, test"):
    compare.compare(runs, "train/top1", "step", tmp_path / "a.png")
  assert not (tmp_path / "a.png").exists()


def test_runs_of_other_data_are_other_lines(tmp_path):
  for i in range(2):
    made = config_lib.default()
    made.data.update(name="folder", dir=f"/set{i}")
    path = tmp_path / f"r{i}"
    path.mkdir()
    (path / "config.json").write_text(made.to_json())
    (path / "metrics.jsonl").write_text(
      json.dumps({"step": 1, "epoch": 1, "seconds": 1.0, "test/top1": 0.5}) + "\n"
    )
  assert len(compare.compare([f"{tmp_path}/r*"], "test/top1", "step", tmp_path / "a.png")) == 2
