"""Figures of a study."""

import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax.report import figures, study_figures
from mixer_jax.report import study as report
from mixer_jax.study import Published, Study, Tuning, record
from tests.report.written_runs import ERROR_ROW, config, line_of, rows, write_run
from tests.study.grid import errors


@pytest.mark.thorough
def test_figures_are_drawn_of_the_runs_there_are(opened, monkeypatch):
  assert len(report.write(opened.directory)) == 1
  for name in ("m1-sgd-seed0", "m1-sgd-seed1", "m2-sgd_kfac-seed0", "m2-kfac_sgd-seed0"):
    write_run(opened, name, (0.1, 0.2, 0.3, 0.4))
  drawn, save = [], figures.save
  monkeypatch.setattr(figures, "save", lambda f, path: (drawn.append(f), save(f, path))[1])
  files = report.write(opened.directory)
  assert [f.name for f in files] == ["study.md", "epochs.png", "time.png", "step_norms_m2.png"]
  for picture in files[1:]:
    assert np.asarray(Image.open(picture)).std() > 0
    assert f"({picture.name})" in files[0].read_text()
  curves = [
    [line.get_ydata() for axis in f.axes for line in axis.lines if len(line.get_ydata()) == 4]
    for f in drawn
  ]
  assert [len(found) > 3 for found in curves] == [True] * 3
  assert any(np.allclose(y, [10, 20, 30, 40]) for y in curves[0])  # top-1 in percent


def test_runs_of_different_lengths_stand_side_by_side(tmp_path, monkeypatch):
  def of_length(optimizer):
    made = errors("sgd")
    made.num_steps = {"short": 30, "long": 60}[optimizer]
    return made

  study = Study(title="t", config=of_length, axes={"optimizer": ("short", "long")}, seeds=(0,))
  opened = record.open_study(tmp_path, study, "file.py", [])
  for name, steps in (("short", (10, 20, 30)), ("long", (20, 40, 60))):
    rows = [
      {"step": s, "epoch": s / 20, "seconds": 1.0, "test/error": 1 / s, "test/best_error": 1 / s}
      | {"test/best_step": s}
      for s in steps
    ]
    write_run(opened, f"{name}-seed0", rows)
  drawn, draw = {}, study_figures._draw
  spy = lambda axis, runs, over, *rest, **style: (
    drawn.setdefault(over, []).extend(row[over] for r in runs for row in r.rows),
    draw(axis, runs, over, *rest, **style),
  )
  monkeypatch.setattr(study_figures, "_draw", spy)
  files = report.write(tmp_path)
  assert [f.name for f in files] == ["study.md", "steps.png", "time.png", "share.png"]
  np.testing.assert_allclose(drawn["share"], [1 / 3, 2 / 3, 1] * 2)


@pytest.fixture
def saved(monkeypatch):
  """The figures that were saved, by the names of their files."""
  drawn, save = {}, figures.save
  monkeypatch.setattr(
    figures, "save", lambda f, path: (drawn.update({path.name: f}), save(f, path))[1]
  )
  return drawn


def test_last_values_stand_over_an_axis_that_shares_its_tuning(tmp_path, saved):
  def of_budget(data, budget, optimizer):
    made = errors(optimizer)
    made.num_steps = {"1x": 10, "2x": 20, "4x": 40}[budget]
    return made

  axes = {"data": ("a", "b"), "budget": ("1x", "2x", "4x"), "optimizer": ("sgd", "adam")}
  tries = {name: [{"optimizer.learning_rate": 0.1}] for name in axes["optimizer"]}
  tuning = Tuning(tries, hold_out={"points.fold": "last"}, shared=("budget",))
  study = Study(title="t", config=of_budget, axes=axes, seeds=(0, 1), tuning=tuning)
  opened = record.open_study(tmp_path, study, "file.py", [])
  ends = {"b-1x-sgd-seed0": 0.8, "b-4x-sgd-seed0": 0.3, "b-4x-sgd-seed1": 0.5}
  for name, error in (ends | {"a-2x-adam-seed0": 0.25}).items():
    step = {run.name: run for run in opened.runs}[name].config["num_steps"]
    write_run(opened, name, [ERROR_ROW | {"step": step, "test/error": error}])
  assert "over_budget.png" in [f.name for f in report.write(tmp_path)]
  (first, second) = saved["over_budget.png"].axes
  lines = {
    axis.get_title(): {x.get_label(): x.get_xydata().tolist() for x in axis.lines}
    for axis in (first, second)
  }
  assert lines == {"a": {"Adam": [[1, 0.25]]}, "b": {"SGD": [[0, 0.8], [2, 0.4]]}}
  ticks = [text.get_text() for text in second.get_xticklabels()]
  assert (ticks, second.get_xlabel()) == (["1x", "2x", "4x"], "budget")


def test_each_of_many_lines_has_a_style_and_a_name_beneath_the_panels():
  names = [f"optimizer {i}" for i in range(24)]
  styles = figures.styles(names)
  assert len({tuple(style.values()) for style in styles.values()}) == 24
  for number in (3, 24):
    figure, axes = figures.panels(1, 2, (8, 4))
    for i, name in enumerate(names[:number]):
      axes[0, i % 2].plot([0, 1], [i, i + 1], label=name, **styles[name])
    figures.legend(figure, axes)
    beneath = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    inside = [axis.get_legend() for axis in axes[0]]
    assert sorted(beneath) == sorted(names if number == 24 else [])
    assert (None in inside) == (number == 24)


@pytest.mark.parametrize("number, letters", [(30, 3), (30, 60), (30, 300), (2, 60), (2, 300)])
def test_a_legend_beneath_stays_in_the_figure_and_leaves_the_panel_its_height(number, letters):
  heights = []
  for named in (False, True):
    figure, axes = figures.panels(1, 1, (6, 4))
    for i in range(number):
      name = f"{i:{letters}d}".replace(" ", "a")
      axes[0, 0].plot([0, 1], [i, i + 1], label=name if named else None)
    figures.legend(figure, axes)
    figure.draw_without_rendering()
    heights.append(axes[0, 0].get_window_extent().height)
  box, (legend,) = figure.bbox, figure.legends
  inside = legend.get_window_extent()
  assert inside.x0 >= box.x0 and inside.x1 <= box.x1 and inside.y0 >= box.y0
  assert heights[1] > 0.9 * heights[0]


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


def test_a_band_is_mean_and_range_as_far_as_all_seeds_go():
  mean, low, high = study_figures.band([[1.0, 2.0, 9.0], [3.0, 5.0]])
  np.testing.assert_array_equal((mean, low, high), [[2.0, 3.5], [1.0, 2.0], [3.0, 5.0]])


@pytest.mark.thorough
def test_steps_of_a_pair_are_drawn_for_a_task_outside_the_package(tmp_path):
  def pair(optimizer):
    made = errors("sgd")
    made.optimizer = config_lib.grafted(*(config_lib.optimizer(n, 0.1) for n in ("sgd", "adam")))
    return made

  study = Study(title="t", config=pair, axes={"optimizer": ("sgd_adam",)}, seeds=(0, 1))
  opened = record.open_study(tmp_path, study, "file.py", [])
  for seed in (0, 1):
    made = []
    for step in (10, 20):
      row = {"step": step, "epoch": step / 20, "seconds": 1.0, "test/error": 1 / step}
      row |= {"test/best_error": 1 / step, "test/best_step": step}
      made.append(row | {f"train/norm.{s}.Dense_0": 1 / step for s in ("magnitude", "direction")})
    write_run(opened, f"sgd_adam-seed{seed}", made)
  files = report.write(tmp_path)
  assert [f.name for f in files] == ["study.md", "steps.png", "time.png", "step_norms.png"]
  for picture in files[1:]:
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20  # more than an empty frame
  matrix = files[0].read_text().split("## last test error (m)\n")[1]
  assert line_of(matrix, "norm of \\ direction of", "Adam")
  assert line_of(matrix, "SGD") == ["SGD", "0.05 ± 0"]


def pair_study(tmp_path):
  def pair(optimizer):
    made = errors("sgd")
    made.optimizer = config_lib.grafted(*(config_lib.optimizer(n, 0.1) for n in ("sgd", "adam")))
    return made

  study = Study(title="t", config=pair, axes={"optimizer": ("sgd_adam",)}, seeds=(0,))
  return record.open_study(tmp_path, study, "file.py", [])


def test_lengths_stand_by_their_side(tmp_path, saved):
  opened = pair_study(tmp_path)
  row = {
    "step": 10,
    "epoch": 1.0,
    "seconds": 1.0,
    "test/error": 0.5,
    "test/best_error": 0.5,
    "test/best_step": 10,
  }
  write_run(
    opened, "sgd_adam-seed0", [row | {"train/norm.magnitude.a": 2.0, "train/norm.direction.a": 7.0}]
  )
  report.write(tmp_path)
  lines = {
    line.get_label(): list(line.get_ydata()) for line in saved["step_norms.png"].axes[0].lines
  }
  assert lines == {"magnitude: SGD": [2.0], "direction: Adam": [7.0]}


def test_a_published_value_is_dotted_at_its_height(tmp_path, saved):
  study = Study(
    title="t",
    config=config,
    axes={"model": ("m1",), "optimizer": ("sgd",)},
    seeds=(0,),
    published={("m1", "sgd"): Published(60.5)},
  )
  opened = record.open_study(tmp_path, study, "file.py", [])
  write_run(opened, "m1-sgd-seed0", (0.1, 0.2, 0.3, 0.4))
  report.write(tmp_path)
  [dotted] = [line for line in saved["epochs.png"].axes[0].lines if line.get_linestyle() == ":"]
  assert set(dotted.get_ydata()) == {60.5}
