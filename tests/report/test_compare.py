"""Runs in one picture, from rows made by hand."""

import json

import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import compare
from tests.study.grid import errors


def write_run(path, optimizer, losses, seconds, seed=0, every=5, config=None, **fields):
  config = config or errors(optimizer)
  config.update(seed=seed, **fields)
  path.mkdir(parents=True)
  (path / "config.json").write_text(config.to_json())
  rows = [
    {"step": every * i, "epoch": i / 2, "seconds": seconds, "train/error": x, "test/error": 1.0}
    for i, x in enumerate(losses, 1)
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
def draw(saved, tmp_path):
  """Compares runs; the lines that are said, and the panel that was drawn."""

  def call(runs, over, key="train/error", **options):
    said = compare.compare(runs, key, over, tmp_path / "a.png", **options)
    (axis,) = saved["a.png"].axes
    return said, axis

  return call


def test_seeds_are_a_line_over_their_mean_time(runs, draw, tmp_path):
  said, axis = draw(runs, "seconds", log=True)
  assert said == [
    "Adam: 1.5 after 12 s",
    "K-FAC: 1 after 3 s; 1.5 after 2 s, 6.0 times sooner than Adam",
  ]
  adam, kfac = axis.lines
  np.testing.assert_array_equal(adam.get_xydata(), [[3, 7], [6, 5], [9, 3], [12, 1.5]])
  np.testing.assert_array_equal(kfac.get_xydata(), [[1, 5], [2, 1.5], [3, 1]])
  assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
  assert axis.get_ylabel() == "train error (m)" and axis.get_xlabel().startswith("seconds of train")
  assert np.asarray(Image.open(tmp_path / "a.png")).std() > 0


def test_runs_are_found_once_below_the_home_of_the_user_and_by_paths_with_an_equals_sign(
  runs, draw, monkeypatch, tmp_path
):
  twice = [*runs, f"{tmp_path}/adam-0", f"{tmp_path}/../{tmp_path.name}/adam-0"]
  assert draw(twice, "seconds")[0][0] == "Adam: 1.5 after 12 s"
  monkeypatch.setenv("HOME", str(tmp_path))
  assert draw(["Mine=~/adam-*"], "seconds")[0] == ["Mine: 1.5 after 12 s"]
  write_run(tmp_path / "rate=0.1", "adam", (4.0, 3.0), 1.0)
  for name in (f"{tmp_path}/rate=0.1", f"Adam={tmp_path}/rate=0.1"):
    said, axis = draw([name], "step")
    assert said == ["Adam: 3 after 10 steps"] and axis.lines[0].get_marker() == "."


def test_runs_of_other_tasks_and_examples_are_told(runs, draw, caplog, tmp_path):
  draw(runs, "step")
  assert "differ" not in caplog.text
  for name, split in (("own", "test"), ("other", "train[90%:]")):
    images = config_lib.default()
    images.data.test_split = split
    write_run(tmp_path / name, "", (4.0,), 1.0, config=images)
  draw([*runs, f"{tmp_path}/other"], "step")
  assert "task: image_classification, tests.study.grid:Errors" in caplog.messages[0]
  caplog.clear()
  draw([f"{tmp_path}/own", f"{tmp_path}/other"], "step")
  assert "data.test_split: test, train[90%:]" in caplog.messages[0]


def test_one_metric_against_another_is_a_point_for_each_label(runs, draw, tmp_path):
  for path, own in ((tmp_path / "adam-0", 4.0), (tmp_path / "adam-1", 2.0)):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["test/error"] = own
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  said, axis = draw(runs, "test/error", log=True)
  assert said == ["Adam: test/error 3, train/error 1.5", "K-FAC: test/error 1, train/error 1"]
  points = [line.get_xydata().tolist() for line in axis.lines if line.get_marker() == "o"]
  assert points == [[[3, 1.5]], [[1, 1]]]
  assert (axis.get_xlabel(), axis.get_ylabel()) == ("test error (m)", "train error (m)")
  assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")


def test_the_other_s_time_is_its_first_at_that_value(runs, draw, tmp_path):
  write_run(tmp_path / "flat", "adam", (4.0, 2.0, 2.0, 2.0), 1.0)
  said, axis = draw([f"flat={tmp_path}/flat", f"slow={tmp_path}/adam-1"], "step")
  assert said[1] == "slow: 1 after 20 steps; 2 after 15 steps, 1.5 times later than flat"
  np.testing.assert_array_equal(axis.lines[0].get_xdata(), [5, 10, 15, 20])
  assert [text.get_text() for text in axis.get_legend().get_texts()] == ["flat", "slow"]


def test_failed_runs_are_left_out_and_short_ones_told(runs, draw, tmp_path, caplog):
  write_run(tmp_path / "adam-2", "adam", (9.0,), 2.0, seed=2)
  (tmp_path / "adam-2/outcome.json").write_text('{"reason": "the loss is nan", "step": 5}')
  assert draw(runs, "seconds")[0][0] == "Adam: 1.5 after 12 s"
  assert "adam-2 failed, and is left out" in caplog.text
  (tmp_path / "adam-2/outcome.json").unlink()
  draw(runs, "seconds")
  assert "Adam: of up to 4 rows, the 1 at steps of all runs" in caplog.text


def test_runs_are_averaged_at_steps_that_all_share(draw, tmp_path):
  for name, every in (("a", 1), ("b", 2)):
    write_run(tmp_path / name, "adam", [0.1 * i * every for i in range(1, 5)], 1.0, every=every)
  assert draw([f"X={tmp_path}/a", f"X={tmp_path}/b"], "step")[0] == ["X: 0.4 after 4 steps"]


def test_data_and_the_content_of_files_tell_runs_apart(draw, tmp_path):
  for i, words in enumerate(("one", "one", "two")):
    write_run(tmp_path / f"r{i}", "adam", (4.0, 2.0), 1.0, seed=i)
    copy = tmp_path / f"r{i}/files/data.dir/vocab.txt"
    copy.parent.mkdir(parents=True)
    copy.write_text(words)
    (copy.parent / ".DS_Store").touch()
  assert len(draw([f"{tmp_path}/r*"], "step")[0]) == 2  # two seeds, and a run of another vocabulary
  for i in range(2):
    made = config_lib.default()
    made.data.update(name="folder", dir=f"/set{i}")
    write_run(tmp_path / f"data{i}", "", (4.0,), 1.0, config=made)
  assert len(draw([f"{tmp_path}/data*"], "step")[0]) == 2


@pytest.mark.parametrize("over", ["step", "test/error"])
def test_each_of_many_labels_has_its_own_colour_and_form(runs, draw, tmp_path, over):
  _, axis = draw([f"{i}={tmp_path}/kfac-0" for i in range(21)], over)
  drawn_as = lambda line: (line.get_color(), line.get_linestyle(), line.get_marker())
  assert len({drawn_as(line) for line in axis.lines}) >= 21


def test_runs_of_one_optimizer_with_other_settings_keep_a_line_each(runs, draw, tmp_path):
  write_run(tmp_path / "longer", "adam", (7.0, 5.0), 2.0, num_steps=60)
  said, _ = draw([*runs, f"{tmp_path}/longer"], "epoch")
  names = [line.partition(":")[0] for line in said]
  assert names == [f"Adam, {tmp_path}/adam-0", "K-FAC", f"Adam, {tmp_path}/longer"]


@pytest.mark.parametrize(
  "asked, named",
  [
    (dict(runs="none*"), "--runs .*none"),
    (dict(runs="label=none"), "--runs .*none"),
    (dict(key="train/top1"), "--metric is 'train/top1'; .*adam-0 has train/error, test/error"),
    (dict(over="test/top1"), "--over is 'test/top1'; .*adam-0 has train/error, test/error"),
    (dict(over="hours"), "--over is 'hours'; allowed: seconds, step, epoch"),
    (dict(runs="X=other-*"), "runs of X"),  # no step is shared
    (dict(runs="spoiled"), "outcome.json"),
  ],
)
def test_mistakes_are_named(asked, named, runs, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write_run(tmp_path / "other-0", "adam", (1.0,), 1.0)
  write_run(tmp_path / "other-1", "adam", (1.0,), 1.0, every=3)
  write_run(tmp_path / "spoiled", "adam", (1.0,), 1.0)
  (tmp_path / "spoiled/outcome.json").write_text("[]")
  given = dict(runs="adam-*", key="train/error", over="step") | asked
  with pytest.raises(UserError, match=named):
    compare.compare([given["runs"]], given["key"], given["over"], tmp_path / "a.png")
  assert not (tmp_path / "a.png").exists()
