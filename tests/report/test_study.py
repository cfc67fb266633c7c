"""The report of a study: numbers of its cells, tables, where they come from."""

import json

import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import results
from mixer_jax.report import study as report
from mixer_jax.study import Tuning
from tests.report.written_runs import (
  EPOCHS,
  begin,
  cells_of,
  config,
  error_row,
  line_of,
  write_run,
)
from tests.study.grid import errors

TOP1 = {
  "m1-sgd-seed0": (0.3, 0.5, 0.62, 0.60),
  "m1-sgd-seed1": (0.2, 0.4, 0.45, 0.49),
  "m1-sgd-seed2": (0.52, 0.6, 0.7, 0.58),
}


def spread(values, digits=2):
  return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def test_numbers_of_a_cell(opened):
  written = {name: write_run(opened, name, values) for name, values in TOP1.items()}
  text = report.write(opened.directory)[0].read_text()
  cells = cells_of(text, "m1", "SGD", "3 of 3")
  assert cells["length"] == "4 epochs"
  assert cells["test top1 (%)"] == spread([60, 49, 58])
  assert cells["best test top1 (%)"] == spread([62, 49, 70])
  # 50% was reached in epochs 2 and 1 of seeds 0 and 2, by seed 1 never.
  assert (cells["target"], cells["epochs to it"]) == ("50.00", "1.5 (2 of 3)")
  seconds = {n: [row["seconds"] for row in r] for n, r in written.items()}
  minutes = (sum(seconds["m1-sgd-seed0"][:2]) + seconds["m1-sgd-seed2"][0]) / 2 / 60
  assert cells["minutes to it"] == f"{minutes:.1f}"
  assert cells["s/epoch"] == spread([np.median(s) for s in seconds.values()], 1)
  assert (cells["published"], cells["published epochs to target"]) == ("60.50", "38")
  assert cells["difference"] == f"{np.mean([62, 49, 70]) - 60.5:+.2f}"
  assert "higher is better" in text and "Published: Table 2" in text


def test_any_metric_has_its_table_by_name(opened, saved):
  """The loss on both splits, the best at the steps that the accuracy picked."""
  for name, values in TOP1.items():
    write_run(opened, name, values)
  for asked in ("loss", "train/loss"):
    files = report.write(opened.directory, asked)
    assert files[0] == opened.directory / "report" / "loss" / "study.md"
    text = files[0].read_text()
    assert cells_of(text, "m1", "SGD", "3 of 3") == cells_of(text, "m1", "SGD") | {
      "test loss (nats)": "1.443 ± 0.059",  # 1.40, 1.51, 1.42
      "train loss (nats)": "0.4433 ± 0.059",
      "best test loss (nats)": "1.397 ± 0.11",  # 1.38, 1.51, 1.30
    }
    assert "lower is better" in text and "itself picked, which flatters it by top1" in text
    assert "published" not in text and "to it" not in text.split("Values")[0]
  curves = [line.get_ydata() for line in saved["epochs.png"].axes[0].lines]
  np.testing.assert_allclose(curves, [2 - np.mean([*TOP1.values()], axis=0)])
  with pytest.raises(UserError, match="--metric is 'top5'; allowed: top1, loss"):
    report.write(opened.directory, "top5")


def test_missing_runs_are_named_and_count_nowhere(opened):
  write_run(opened, "m1-kfac-seed0", (0.4, 0.4, 0.4, 0.4))
  write_run(opened, "m1-kfac-seed1", (0.9,), reason="the loss of step 12 is not finite")
  write_run(opened, "m1-kfac-seed2", (0.9, 0.9), finished=False)
  text = report.write(opened.directory)[0].read_text()
  shown = ["test top1 (%)", "best test top1 (%)", "target", "epochs to it"]
  cells = cells_of(text, "m1", "K-FAC", "1 of 3")
  assert [cells[name] for name in shown] == ["40.00", "40.00", "50.00", "not reached"]
  cells = cells_of(text, "m2", "K-FAC", "0 of 3")
  assert [cells[name] for name in (*shown, "s/epoch")] == ["-", "-", "50.00", "-", "-"]
  assert "- `m1-kfac-seed1`: failed, epoch 1 of 4: the loss of step 12 is not finite" in text
  assert "- `m1-kfac-seed2`: interrupted, epoch 2 of 4" in text
  assert "- not run (21): `m1-sgd-seed0`" in text
  cells = cells_of(text, "m1", "SGD", "0 of 3")  # published values stand without ours
  assert (cells["published"], cells["published epochs to target"]) == ("60.50", "38")


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


def test_a_study_without_published_values_targets_or_panels_has_no_empty_columns(tmp_path):
  def without_target(optimizer):
    made = config("m1", optimizer)
    made.target = 0.0
    return made

  opened = begin(tmp_path, without_target, {"optimizer": ("sgd", "kfac")})
  for name in ("sgd", "kfac"):
    write_run(opened, f"{name}-seed0", (0.5, 0.6, 0.6, 0.7))
  text = report.write(tmp_path)[0].read_text()
  cells = cells_of(text, "SGD")
  wanted = ["optimizer", "seeds", "length", "test top1 (%)", "best test top1 (%)", "s/epoch"]
  assert list(cells) == wanted
  assert list(cells.values())[1:5] == ["1 of 1", "4 epochs", "70.00", "70.00"]
  assert "## last test top1 (%)\n" in text
  assert line_of(text, "top1 (%)") == ["top1 (%)", "70.00", "70.00"]


def test_origin(opened):
  write_run(opened, "m1-sgd-seed0", (0.6,) * EPOCHS)
  write_run(opened, "m1-sgd-seed1", (0.6,) * EPOCHS, commit=None, ended="2026-01-03T01:00:00+00:00")
  text = report.write(opened.directory)[0].read_text()
  assert text.startswith("# t\n\nA note.\n")
  assert "- commit: 0123456789ab; unknown\n- versions: mixer_jax 0.1.0, jax 0.9.1\n" in text
  assert "- device: 1 x gpu (H200)" in text
  assert "- data: name cifar10, train 50000, test 10000, classes 10" in text
  times = ["2026-01-01T00:00:00+00:00", "2026-01-03T01:00:00+00:00"]
  assert line_of(text, "m1-sgd-seed1", "done") == ["m1-sgd-seed1", "done", *times, "-"]
  assert "num_epochs=4" in text and "optimizer.magnitude.name=kfac" in text
  assert "seed=" not in text and "data.dir" not in text


@pytest.mark.parametrize("lines", [("model", "optimizer"), ("optimizer",)])
def test_settings_that_share_an_optimizer_and_pairs_of_two_models_stand_apart(lines, tmp_path):
  def made(model, optimizer):
    config = errors("sgd")
    if optimizer == "pair":
      sides = (config_lib.optimizer(n, 0.1) for n in ("sgd", "adam"))
      config.optimizer = config_lib.grafted(*sides)
    elif optimizer == "slow":
      config.optimizer.learning_rate = 1e-4
    return config

  axes = {"model": ("m1", "m2"), "optimizer": ("sgd", "slow", "pair")}
  opened = begin(tmp_path, made, axes, lines=lines)
  for i, run in enumerate(opened.runs):
    write_run(opened, run.name, [error_row(error=1 / (i + 1))])
  if lines == ("optimizer",):
    names = [c.line for c in results.gather(opened) if c.panel == "m1"]
    assert names == ["SGD (sgd)", "SGD (slow)", "(SGD, Adam)"]
    return
  text = report.write(tmp_path)[0].read_text()
  for model, value in (("m1", "0.3333"), ("m2", "0.1667")):
    table = text.split(f"| {model}: norm of \\ direction of |")[1].split("\n\n")[0]
    assert line_of(table, "SGD") == ["SGD", value]


def test_runs_of_another_plan_are_named(tmp_path):
  def decaying(optimizer):
    config = errors(optimizer)
    config.optimizer.weight_decay = 0.1
    return config

  tuning = Tuning({"sgd": [{"optimizer.weight_decay": 0.3}]}, hold_out={"points.fold": "last"})
  opened = begin(tmp_path, decaying, {"optimizer": ("sgd",)}, seeds=(0, 1, 2), tuning=tuning)
  for run, rate, decay in zip(opened.runs, (None, None, 0.7, None), (0.3, 0.3, 0.3, 0.1)):
    write_run(opened, run.name, [error_row()])
    config = json.loads(json.dumps(run.config))
    config["optimizer"]["learning_rate"] = rate or config["optimizer"]["learning_rate"]
    config["optimizer"]["weight_decay"] = decay
    config["mesh"]["data"] = 1  # free
    (opened.path(run) / "config.json").write_text(json.dumps(config))
  text = report.write(tmp_path)[0].read_text()
  assert "`sgd-seed1`: optimizer.learning_rate was 0.7, is " in text and "`sgd-seed0`:" not in text
  assert "`sgd-seed2`: optimizer.weight_decay was 0.1, is 0.3" in text  # the chosen one


def test_an_epoch_of_millions_of_steps_has_its_seconds(tmp_path):
  opened = begin(tmp_path, errors, {"optimizer": ("sgd",)})
  steps = (1, 2, 2_000_000)
  rows = [error_row(n, epoch=round(n / 3e6, 6), seconds=2.0) for n in steps]
  write_run(opened, "sgd-seed0", rows)
  found = [row["epoch_seconds"] for row in results.rows_of(tmp_path / "sgd-seed0")]
  np.testing.assert_allclose(found, [6e6, 6e6, 2 / (2_000_000 - 2) * 3e6], rtol=1e-5)
