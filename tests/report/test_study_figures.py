"""Figures of a study."""

import numpy as np
from PIL import Image
import pytest

from mixer_jax.report import results
from mixer_jax.report import study as report
from mixer_jax.study import Published, Tuning
from tests.report.written_runs import begin, config, error_row, line_of, pair, rows, write_run
from tests.study.grid import errors


@pytest.mark.thorough
def test_figures_are_drawn_of_the_runs_there_are(opened, saved):
  assert len(report.write(opened.directory)) == 1
  for name in ("m1-sgd-seed0", "m1-sgd-seed1", "m2-sgd_kfac-seed0", "m2-kfac_sgd-seed0"):
    write_run(opened, name, (0.1, 0.2, 0.3, 0.4))
  files = report.write(opened.directory)
  assert [f.name for f in files] == ["study.md", "epochs.png", "time.png", "step_norms_m2.png"]
  for picture in files[1:]:
    assert np.asarray(Image.open(picture)).std() > 0
    assert f"({picture.name})" in files[0].read_text()
    lines = [line.get_ydata() for axis in saved[picture.name].axes for line in axis.lines]
    assert len([y for y in lines if len(y) == 4]) > 3
  first = [line.get_ydata() for axis in saved["epochs.png"].axes for line in axis.lines]
  assert any(len(y) == 4 and np.allclose(y, [10, 20, 30, 40]) for y in first)  # in percent


def test_a_published_value_is_dotted_at_its_height(tmp_path, saved):
  axes = {"model": ("m1",), "optimizer": ("sgd",)}
  opened = begin(tmp_path, config, axes, published={("m1", "sgd"): Published(60.5)})
  write_run(opened, "m1-sgd-seed0", (0.1, 0.2, 0.3, 0.4))
  report.write(tmp_path)
  [dotted] = [line for line in saved["epochs.png"].axes[0].lines if line.get_linestyle() == ":"]
  assert set(dotted.get_ydata()) == {60.5}


def test_runs_of_different_lengths_stand_side_by_side(tmp_path, saved):
  def of_length(optimizer):
    made = errors("sgd")
    made.num_steps = {"short": 30, "long": 60}[optimizer]
    return made

  opened = begin(tmp_path, of_length, {"optimizer": ("short", "long")})
  for name, steps in (("short", (10, 20, 30)), ("long", (20, 40, 60))):
    write_run(opened, f"{name}-seed0", [error_row(s, 1 / s) for s in steps])
  files = report.write(tmp_path)
  assert [f.name for f in files] == ["study.md", "steps.png", "time.png", "share.png"]
  for line in saved["share.png"].axes[0].lines:
    np.testing.assert_allclose(line.get_xdata(), [1 / 3, 2 / 3, 1])


def test_last_values_stand_over_an_axis_that_shares_its_tuning(tmp_path, saved):
  def of_budget(data, budget, optimizer):
    made = errors(optimizer)
    made.num_steps = {"1x": 10, "2x": 20, "4x": 40}[budget]
    return made

  axes = {"data": ("a", "b"), "budget": ("1x", "2x", "4x"), "optimizer": ("sgd", "adam")}
  tries = {name: [{"optimizer.learning_rate": 0.1}] for name in axes["optimizer"]}
  tuning = Tuning(tries, hold_out={"points.fold": "last"}, shared=("budget",))
  opened = begin(tmp_path, of_budget, axes, seeds=(0, 1), tuning=tuning)
  ends = {"b-1x-sgd-seed0": 0.8, "b-4x-sgd-seed0": 0.3, "b-4x-sgd-seed1": 0.5}
  for name, error in (ends | {"a-2x-adam-seed0": 0.25}).items():
    step = {run.name: run for run in opened.runs}[name].config["num_steps"]
    write_run(opened, name, [error_row(step, error)])
  assert "over_budget.png" in [f.name for f in report.write(tmp_path)]
  (first, second) = saved["over_budget.png"].axes
  lines = {
    axis.get_title(): {x.get_label(): x.get_xydata().tolist() for x in axis.lines}
    for axis in (first, second)
  }
  assert lines == {"a": {"Adam": [[1, 0.25]]}, "b": {"SGD": [[0, 0.8], [2, 0.4]]}}
  ticks = [text.get_text() for text in second.get_xticklabels()]
  assert (ticks, second.get_xlabel()) == (["1x", "2x", "4x"], "budget")


def test_rows_without_a_column_leave_the_others_at_their_steps(opened, saved):
  """As rows of skipped steps have no lengths; one seed lacks the second, the other the first."""
  for seed, lacking in ((0, 2), (1, 1)):
    written = list(rows("m1-sgd_kfac", (0.1, 0.2, 0.3, 0.4)))
    for i, row in enumerate(written, 1):
      for name in [name for name in row if "norm." in name]:
        row[name] = float(i)
        if i == lacking:
          del row[name]
    write_run(opened, f"m1-sgd_kfac-seed{seed}", written)
  report.write(opened.directory)
  (panel, *_) = saved["step_norms_m1.png"].axes
  for line in panel.lines:
    np.testing.assert_array_equal(line.get_xdata(), [3, 4])
    np.testing.assert_array_equal(line.get_ydata(), [3, 4])


def test_a_band_is_mean_and_range_at_the_steps_of_all_runs():
  one, two = ((1.0, 2.0, 9.0), (3.0, 5.0, float("nan")))
  runs = [[{"step": i, "y": y} for i, y in enumerate(own)] for own in (one, two)]
  found = results.band(runs, "step", "y")
  np.testing.assert_array_equal(found, [[0, 1], [2.0, 3.5], [1.0, 2.0], [3.0, 5.0]])
  assert results.band([runs[0], runs[1][2:]], "step", "y") is None


def test_lengths_of_steps_stand_by_their_side_for_a_task_outside_the_package(tmp_path, saved):
  opened = begin(tmp_path, pair, {"optimizer": ("sgd_adam",)}, seeds=(0, 1))
  norms = {"train/norm.magnitude.a": 2.0, "train/norm.direction.a": 7.0}
  for seed in (0, 1):
    write_run(opened, f"sgd_adam-seed{seed}", [error_row(s, 1 / s, **norms) for s in (10, 20)])
  files = report.write(tmp_path)
  assert [f.name for f in files] == ["study.md", "steps.png", "time.png", "step_norms.png"]
  (panel,) = saved["step_norms.png"].axes
  lines = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
  assert lines == {"magnitude: SGD": [2.0, 2.0], "direction: Adam": [7.0, 7.0]}
  matrix = files[0].read_text().split("## last test error (m)\n")[1]
  assert line_of(matrix, "norm of \\ direction of", "Adam")
  assert line_of(matrix, "SGD") == ["SGD", "0.05 ± 0"]
