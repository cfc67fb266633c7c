"""The report of a study against numbers worked out here from rows made by hand."""

import dataclasses
import json

import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import figures, results, study_figures
from mixer_jax.report import study as report
from mixer_jax.study import Published, Study, Tuning, record
from tests.study.grid import errors

EPOCHS = 4
KINDS = ("stem", "token_mixing", "channel_mixing", "norms", "head")


def config(model, optimizer):
  config = config_lib.default()
  config.num_epochs = EPOCHS
  config.target = 0.5
  sides = [config_lib.optimizer(name, learning_rate=0.1) for name in optimizer.split("_")]
  config.optimizer = config_lib.grafted(*sides) if sides[1:] else sides[0]
  return config


def rows(name, top1):
  """The rows of a run with these test accuracies, one an epoch of ten steps."""
  rng = np.random.default_rng(sum(map(ord, name)))
  for epoch, accuracy in enumerate(top1, 1):
    row = {
      "epoch": float(epoch),
      "step": 10 * epoch,
      "test/top1": accuracy,
      "test/loss": 2 - accuracy,
      "test/best_top1": max(top1[:epoch]),
      "test/best_step": 10 * (1 + int(np.argmax(top1[:epoch]))),
      "seconds": float(rng.uniform(50, 70)),
    }
    if "_" in name:
      sides = (f"train/norm.{side}.{kind}" for side in ("magnitude", "direction") for kind in KINDS)
      row |= {key: float(rng.uniform(1e-3, 1)) for key in sides}
    yield row


def session(**fields):
  return {
    "commit": "0123456789ab",
    "versions": {"mixer_jax": "0.1.0", "jax": "0.9.1"},
    "device": {"platform": "gpu", "kind": "H200", "count": 1},
    "data": {"name": "cifar10", "train": 50000, "test": 10000, "classes": 10},
    "from_step": 0,
    "started": "2026-01-01T00:00:00+00:00",
    "ended": "2026-01-01T01:00:00+00:00",
  } | fields


def write_run(opened, name, written, reason="", finished=True, **fields):
  """Fabricates a run's directory with rows, or the rows of accuracies; returns its rows."""
  (run,) = [run for run in opened.runs if run.name == name]
  path = opened.path(run)
  path.mkdir()
  written = written if isinstance(written, list) else list(rows(name, written))
  (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
  (path / "run.json").write_text(json.dumps({"sessions": [session(**fields)]}))
  if finished:
    opened.finish(run, reason)
  return written


@pytest.fixture
def opened(tmp_path):
  study = Study(
    title="Title",
    config=config,
    axes={"model": ("m1", "m2"), "optimizer": ("sgd", "kfac", "sgd_kfac", "kfac_sgd")},
    published={("m1", "sgd"): Published(60.5, 38), ("m1", "sgd_kfac"): Published(75.47)},
    published_at="best",
    source="Table 2",
    notes=["A note."],
  )
  return record.open_study(tmp_path, study, "file.py", [])


ERROR_ROW = {"step": 10, "epoch": 1.0, "seconds": 1.0, "test/error": 0.5}
ERROR_ROW |= {"test/best_error": 0.5, "test/best_step": 10}


def line_of(text, *start):
  (line,) = [line for line in text.splitlines() if line.startswith("| " + " | ".join(start) + " |")]
  return [cell.strip() for cell in line.strip("|").split("|")]


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


def test_a_band_is_mean_and_range_as_far_as_all_seeds_go():
  mean, low, high = study_figures.band([[1.0, 2.0, 9.0], [3.0, 5.0]])
  np.testing.assert_array_equal((mean, low, high), [[2.0, 3.5], [1.0, 2.0], [3.0, 5.0]])


def test_a_metric_where_lower_is_better_with_several_test_sets(tmp_path):
  """Rows of a run of 30 steps; the validation set picks step 20, the test set would pick 30."""
  tuning = Tuning({"sgd": [{"optimizer.learning_rate": r} for r in (0.1, 0.2)]}, hold_out={})
  study = Study(
    title="t",
    config=errors,
    axes={"optimizer": ("sgd",)},
    seeds=(0,),
    published={("sgd",): Published(0.04)},
    source="a table",
    tuning=tuning,
  )
  opened = record.open_study(tmp_path, study, "file.py", [])
  validation, test, fine = (0.3, 0.015, 0.02), (0.4, 0.05, 0.03125), (0.5, 0.6, 0.7)
  made = [
    {
      "step": 10 * i,
      "epoch": i / 2,
      "seconds": 30.0,
      "validation/error": validation[i - 1],
      "validation/best_error": min(validation[:i]),
      "validation/best_step": min(10 * i, 20),
      "test/error": test[i - 1],
      "fine/error": fine[i - 1],
    }
    for i in (1, 2, 3)
  ]
  better = [row | {"validation/error": row["validation/error"] / 2} for row in made]
  write_run(opened, "tune-sgd-0", made)
  write_run(opened, "tune-sgd-1", better)
  write_run(opened, "sgd-seed0", made)
  files = report.write(tmp_path)
  assert [f.name for f in files] == ["study.md", "steps.png", "time.png"]
  text = files[0].read_text()
  header = line_of(text, "optimizer", "seeds")
  assert dict(zip(header, line_of(text, "SGD", "1 of 1"))) == {
    "optimizer": "SGD",
    "seeds": "1 of 1",
    "length": "30 steps",
    "test error (m)": "0.03125",
    "validation error (m)": "0.02",
    "fine error (m)": "0.7",
    "best test error (m)": "0.05",
    "target": "0.02",
    "steps to it": "20.0",
    "minutes to it": "1.0",
    "s/epoch": "60.0",
    "published": "0.04",
    "difference": "-0.00875",
    "published epochs to target": "-",
  }
  assert "lower is better. *Best* is the value at the step that the validation set picked" in text
  chosen = ["sgd", "optimizer.learning_rate=0.2", "chosen", "0.01", "0.015"]
  assert line_of(text, *chosen[:2]) == chosen
  assert "The lowest after the last evaluation was chosen" in text


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


@pytest.mark.thorough
def test_an_optimizer_may_be_the_target_of_the_others(tmp_path):
  axes = {"model": ("m1",), "optimizer": ("sgd", "adam")}
  study = Study(title="Title", config=config, axes=axes, seeds=(0, 1), target_of="sgd")
  opened = record.open_study(tmp_path, study, "study.py", [])
  for name, top1 in (
    ("m1-sgd-seed0", (0.1, 0.2, 0.3, 0.4)),
    ("m1-sgd-seed1", (0.1, 0.2, 0.3, 0.5)),  # ends at 0.45 on average
    ("m1-adam-seed0", (0.1, 0.46, 0.5, 0.6)),
    ("m1-adam-seed1", (0.1, 0.2, 0.3, 0.44)),
  ):
    write_run(opened, name, top1)
  text = report.write(tmp_path)[0].read_text()
  names = line_of(text, "model", "optimizer", "seeds")
  sgd, adam = (dict(zip(names, line_of(text, "m1", line))) for line in ("SGD", "Adam"))
  assert sgd["target"] == adam["target"] == "45.00"
  assert (sgd["epochs to it"], adam["epochs to it"]) == ("4.0 (1 of 2)", "2.0 (1 of 2)")


def test_the_run_that_sets_the_target_reaches_it(tmp_path):
  """A percentage that is scaled and divided again differs in its last bit: 0.007 is such a one."""
  study = Study(
    title="t", config=config, axes={"model": ("m1",), "optimizer": ("sgd",)}, target_of="sgd"
  )
  opened = record.open_study(tmp_path, dataclasses.replace(study, seeds=(0,)), "study.py", [])
  write_run(opened, "m1-sgd-seed0", (0.001, 0.002, 0.003, 0.007))
  [cell] = results.gather(opened)
  assert [row["step"] for row in cell.reached()] == [cell.results[0].rows[-1]["step"]]


def test_tuning_shows_every_trial(tmp_path):
  settings = [{"optimizer.learning_rate": rate} for rate in (0.1, 0.2)]
  study = Study(
    title="t",
    config=config,
    axes={"model": ("m1",), "optimizer": ("sgd", "adam")},
    tuning=Tuning({"sgd": settings, "adam": settings}),
  )
  opened = record.open_study(tmp_path, study, "file.py", [])
  write_run(opened, "tune-m1-sgd-0", (0.1, 0.5, 0.9, 0.3))  # its best epoch does not count
  write_run(opened, "tune-m1-sgd-1", (0.1, 0.2, 0.3, 0.4))
  text = report.write(tmp_path)[0].read_text()
  chosen = ["m1 sgd", "optimizer.learning_rate=0.2", "chosen", "40.00", "40.00"]
  assert line_of(text, *chosen[:2]) == chosen
  other = ["m1 sgd", "optimizer.learning_rate=0.1", "", "30.00", "90.00"]
  assert line_of(text, *other[:2]) == other
  assert line_of(text, "m1 adam", "not decided")
  assert line_of(text, "m1", "SGD", "0 of 3")  # validation values stand in no other table


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
  axes = {"optimizer": ("sgd",)}
  study = Study(title="t", config=errors, axes=axes, seeds=(0, 1), tuning=tuning)
  opened = record.open_study(tmp_path, study, "file.py", [])
  for run, rate in zip(opened.runs, (None, None, 0.7)):
    write_run(opened, run.name, [ERROR_ROW])
    config = json.loads(json.dumps(run.config))
    config["optimizer"]["learning_rate"] = rate or config["optimizer"]["learning_rate"]
    config["optimizer"]["weight_decay"] = 0.3
    config["mesh"]["data"] = 1  # free
    (opened.path(run) / "config.json").write_text(json.dumps(config))
  text = report.write(tmp_path)[0].read_text()
  assert "`sgd-seed1`: optimizer.learning_rate was 0.7, is " in text and "`sgd-seed0`:" not in text


def pair_study(tmp_path):
  def pair(optimizer):
    made = errors("sgd")
    made.optimizer = config_lib.grafted(*(config_lib.optimizer(n, 0.1) for n in ("sgd", "adam")))
    return made

  study = Study(title="t", config=pair, axes={"optimizer": ("sgd_adam",)}, seeds=(0,))
  return record.open_study(tmp_path, study, "file.py", [])


def test_lengths_stand_by_their_side(tmp_path, monkeypatch):
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
  drawn, save = {}, figures.save
  monkeypatch.setattr(
    figures, "save", lambda f, path: (drawn.update({path.name: f}), save(f, path))[1]
  )
  report.write(tmp_path)
  lines = {
    line.get_label(): list(line.get_ydata()) for line in drawn["step_norms.png"].axes[0].lines
  }
  assert lines == {"magnitude: SGD": [2.0], "direction: Adam": [7.0]}


def test_a_published_value_is_dotted_at_its_height(tmp_path, monkeypatch):
  study = Study(
    title="t",
    config=config,
    axes={"model": ("m1",), "optimizer": ("sgd",)},
    seeds=(0,),
    published={("m1", "sgd"): Published(60.5)},
  )
  opened = record.open_study(tmp_path, study, "file.py", [])
  write_run(opened, "m1-sgd-seed0", (0.1, 0.2, 0.3, 0.4))
  drawn, save = {}, figures.save
  monkeypatch.setattr(
    figures, "save", lambda f, path: (drawn.update({path.name: f}), save(f, path))[1]
  )
  report.write(tmp_path)
  [dotted] = [line for line in drawn["epochs.png"].axes[0].lines if line.get_linestyle() == ":"]
  assert set(dotted.get_ydata()) == {60.5}


def test_a_target_is_of_its_own_panel(tmp_path):
  axes = {"model": ("m1", "m2"), "optimizer": ("sgd", "adam")}
  study = Study(title="T", config=config, axes=axes, seeds=(0,), target_of="sgd")
  opened = record.open_study(tmp_path, study, "s.py", [])
  for run, top1 in zip(opened.runs, (0.4, 0.6, 0.8, 0.9)):
    write_run(opened, run.name, (0.1, 0.2, 0.3, top1))
  assert [c.target for c in results.gather(opened)] == pytest.approx([0.4, 0.4, 0.8, 0.8])


def test_of_equal_tries_the_one_of_least_loss_is_chosen(tmp_path):
  rates = [{"optimizer.learning_rate": r} for r in (0.1, 0.2, 0.3)]
  study = Study(
    title="t",
    config=errors,
    axes={"optimizer": ("sgd",)},
    seeds=(0,),
    tuning=Tuning({"sgd": rates}, hold_out={"points.fold": "last"}),
  )
  opened = record.open_study(tmp_path, study, "f.py", [])
  row = {
    "step": 30,
    "epoch": 1.0,
    "seconds": 1.0,
    "test/error": 0.5,
    "test/best_error": 0.5,
    "test/best_step": 30,
  }
  for i, loss in enumerate((3.0, 1.0, 2.0)):
    write_run(opened, f"tune-sgd-{i}", [row | {"test/loss": loss}])
  assert [t["run"] for t in opened.trials(("sgd",))] == ["tune-sgd-1", "tune-sgd-2", "tune-sgd-0"]
