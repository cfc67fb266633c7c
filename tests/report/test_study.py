"""The report of a study: numbers of its cells, tables, where they come from."""

import dataclasses
import json

import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import results
from mixer_jax.report import study as report
from mixer_jax.study import Study, Tuning, record
from tests.report.written_runs import (
  EPOCHS,
  ERROR_ROW,
  config,
  line_of,
  write_run,
)
from tests.study.grid import errors


def test_numbers_of_a_cell(opened):
  top1 = {
    "m1-sgd-seed0": (0.3, 0.5, 0.62, 0.60),
    "m1-sgd-seed1": (0.2, 0.4, 0.45, 0.49),
    "m1-sgd-seed2": (0.52, 0.6, 0.7, 0.58),
  }
  written = {name: write_run(opened, name, values) for name, values in top1.items()}
  text = report.write(opened.directory)[0].read_text()
  header = line_of(text, "model", "optimizer", "seeds")
  cells = dict(zip(header, line_of(text, "m1", "SGD", "3 of 3")))
  best, last = np.array([62, 49, 70]), np.array([60, 49, 58])
  assert cells["length"] == "4 epochs"
  assert cells["test top1 (%)"] == f"{last.mean():.2f} ± {last.std(ddof=1):.2f}"
  assert cells["best test top1 (%)"] == f"{best.mean():.2f} ± {best.std(ddof=1):.2f}"
  # 50% was reached in epochs 2 and 1 of seeds 0 and 2, by seed 1 never.
  assert (cells["target"], cells["epochs to it"]) == ("50.00", "1.5 (2 of 3)")
  seconds = {n: [row["seconds"] for row in r] for n, r in written.items()}
  minutes = (sum(seconds["m1-sgd-seed0"][:2]) + seconds["m1-sgd-seed2"][0]) / 2 / 60
  assert cells["minutes to it"] == f"{minutes:.1f}"
  medians = np.array([np.median(s) for s in seconds.values()])
  assert cells["s/epoch"] == f"{medians.mean():.1f} ± {medians.std(ddof=1):.1f}"
  assert (cells["published"], cells["published epochs to target"]) == ("60.50", "38")
  assert cells["difference"] == f"{best.mean() - 60.5:+.2f}"
  assert "higher is better. *Best* is the value at the step that the test set itself picked" in text
  assert "Published: Table 2; the difference is of our best value." in text


def test_missing_runs_are_named_and_count_nowhere(opened):
  write_run(opened, "m1-kfac-seed0", (0.4, 0.4, 0.4, 0.4))
  write_run(opened, "m1-kfac-seed1", (0.9,), reason="the loss of step 12 is not finite")
  write_run(opened, "m1-kfac-seed2", (0.9, 0.9), finished=False)
  text = report.write(opened.directory)[0].read_text()
  assert line_of(text, "m1", "K-FAC", "1 of 3")[4:9] == [
    "40.00",
    "40.00",
    "50.00",
    "not reached",
    "-",
  ]
  assert line_of(text, "m2", "K-FAC", "0 of 3")[4:] == ["-", "-", "50.00", *["-"] * 6]
  assert "- `m1-kfac-seed1`: failed, epoch 1 of 4: the loss of step 12 is not finite" in text
  assert "- `m1-kfac-seed2`: interrupted, epoch 2 of 4" in text
  assert "- not run (21): `m1-sgd-seed0`" in text
  # Published values stand without ours.
  assert line_of(text, "m1", "SGD", "0 of 3")[10:] == ["60.50", "-", "38"]


@pytest.mark.thorough
def test_tables_in_the_form_of_the_paper(opened):
  for name, accuracy in {"m1-sgd": 0.6, "m2-kfac": 0.7, "m1-sgd_kfac": 0.75}.items():
    write_run(opened, f"{name}-seed0", (accuracy, 0.1, 0.1, 0.1))
  text = report.write(opened.directory)[0].read_text()
  assert "## best test top1 (%), ours / published" in text
  assert line_of(text, "model", "SGD", "K-FAC")
  assert line_of(text, "m1", "60.00 / 60.50") == ["m1", "60.00 / 60.50", "- / -"]
  assert line_of(text, "m2", "- / -") == ["m2", "- / -", "70.00 / -"]
  matrix = text[text.index("| m1: norm of") :]
  assert matrix.splitlines()[0] == "| m1: norm of \\ direction of | K-FAC | SGD |"
  assert line_of(matrix.split("| m2")[0], "SGD") == ["SGD", "75.00 / 75.47", "- / -"]


def test_a_study_without_published_values_targets_or_panels_has_no_empty_cells(tmp_path):
  def without_target(optimizer):
    made = config("m1", optimizer)
    made.target = 0.0
    return made

  study = Study(title="Title", config=without_target, axes={"optimizer": ("sgd", "kfac")})
  opened = record.open_study(tmp_path, study, "file.py", [])
  for name in ("sgd", "kfac"):
    write_run(opened, f"{name}-seed0", (0.5, 0.6, 0.6, 0.7))
  text = report.write(opened.directory)[0].read_text()
  wanted = ["optimizer", "seeds", "length", "test top1 (%)", "best test top1 (%)", "s/epoch"]
  assert line_of(text, *wanted[:2]) == wanted
  assert line_of(text, "SGD", "1 of 3")[2:5] == ["4 epochs", "70.00", "70.00"]
  assert "## last test top1 (%)\n" in text
  assert line_of(text, "top1 (%)") == ["top1 (%)", "70.00", "70.00"]


@pytest.mark.thorough
def test_origin(opened):
  write_run(opened, "m1-sgd-seed0", (0.6,) * EPOCHS)
  write_run(opened, "m1-sgd-seed1", (0.6,) * EPOCHS, commit=None, ended="2026-01-03T01:00:00+00:00")
  text = report.write(opened.directory)[0].read_text()
  assert text.startswith("# Title\n\nA note.\n")
  assert "- commit: 0123456789ab; unknown\n- versions: mixer_jax 0.1.0, jax 0.9.1\n" in text
  assert "- device: 1 x gpu (H200)" in text
  assert "- data: name cifar10, train 50000, test 10000, classes 10" in text
  times = ["2026-01-01T00:00:00+00:00", "2026-01-03T01:00:00+00:00"]
  assert line_of(text, "m1-sgd-seed1", "done") == ["m1-sgd-seed1", "done", *times, "-"]
  assert "num_epochs=4" in text and "optimizer.magnitude.name=kfac" in text
  assert "seed=" not in text and "data.dir" not in text


def test_a_directory_without_a_study_is_refused(tmp_path):
  with pytest.raises(UserError, match=r"holds no study \(no study.json in it\)"):
    report.write(tmp_path)


def test_settings_that_share_an_optimizer_and_pairs_of_two_models_stand_apart(tmp_path):
  def made(model, optimizer):
    config = errors("sgd")
    if optimizer == "pair":
      sides = (config_lib.optimizer(n, 0.1) for n in ("sgd", "adam"))
      config.optimizer = config_lib.grafted(*sides)
    elif optimizer == "slow":
      config.optimizer.learning_rate = 1e-4
    return config

  axes = {"model": ("m1", "m2"), "optimizer": ("sgd", "slow", "pair")}
  study = Study(title="t", config=made, axes=axes, seeds=(0,), lines=("model", "optimizer"))
  opened = record.open_study(tmp_path, study, "file.py", [])
  for i, run in enumerate(opened.runs):
    row = ERROR_ROW | dict.fromkeys(("test/error", "test/best_error"), 1 / (i + 1))
    write_run(opened, run.name, [row])
  text = report.write(tmp_path)[0].read_text()
  for model, value in (("m1", "0.3333"), ("m2", "0.1667")):
    table = text.split(f"| {model}: norm of \\ direction of |")[1].split("\n\n")[0]
    assert line_of(table, "SGD") == ["SGD", value]
  study = dataclasses.replace(study, lines=("optimizer",))
  (tmp_path / "lines").mkdir()
  opened = record.open_study(tmp_path / "lines", study, "file.py", [])
  names = [c.line for c in results.gather(opened) if c.panel == "m1"]
  assert names == ["SGD (sgd)", "SGD (slow)", "(SGD, Adam)"]


def test_runs_of_another_plan_are_named(tmp_path):
  tuning = Tuning({"sgd": [{"optimizer.weight_decay": 0.3}]}, hold_out={"points.fold": "last"})

  def decaying(optimizer):
    config = errors(optimizer)
    config.optimizer.weight_decay = 0.1
    return config

  axes = {"optimizer": ("sgd",)}
  study = Study(title="t", config=decaying, axes=axes, seeds=(0, 1, 2), tuning=tuning)
  opened = record.open_study(tmp_path, study, "file.py", [])
  for run, rate, decay in zip(opened.runs, (None, None, 0.7, None), (0.3, 0.3, 0.3, 0.1)):
    write_run(opened, run.name, [ERROR_ROW])
    config = json.loads(json.dumps(run.config))
    config["optimizer"]["learning_rate"] = rate or config["optimizer"]["learning_rate"]
    config["optimizer"]["weight_decay"] = decay
    config["mesh"]["data"] = 1  # free
    (opened.path(run) / "config.json").write_text(json.dumps(config))
  text = report.write(tmp_path)[0].read_text()
  assert "`sgd-seed1`: optimizer.learning_rate was 0.7, is " in text and "`sgd-seed0`:" not in text
  assert "`sgd-seed2`: optimizer.weight_decay was 0.1, is 0.3" in text  # the chosen one


def test_an_epoch_of_millions_of_steps_has_its_seconds(tmp_path):
  study = Study(title="t", config=errors, axes={"optimizer": ("sgd",)}, seeds=(0,))
  opened = record.open_study(tmp_path, study, "file.py", [])
  steps = (1, 2, 2_000_000)
  rows = [ERROR_ROW | {"step": n, "epoch": round(n / 3e6, 6), "seconds": 2.0} for n in steps]
  write_run(opened, "sgd-seed0", rows)
  [run] = opened.runs
  found = [row["s/epoch"] for row in results._read(opened, run).rows]
  np.testing.assert_allclose(found, [6e6, 6e6, 2 / (2_000_000 - 2) * 3e6], rtol=1e-5)


def test_bars_in_cells_are_escaped():
  lines = report._table(["settings", "top-1"], [["freeze=^stem/|^head/", 20]]).splitlines()
  assert lines[2] == r"| freeze=^stem/\|^head/ | 20 |"
