"""Targets of a study, and the tries of its tuning."""

import dataclasses

import pytest

from mixer_jax.report import results
from mixer_jax.report import study as report
from mixer_jax.study import Published, Study, Tuning, record
from tests.report.written_runs import (
  config,
  line_of,
  write_run,
)
from tests.study.grid import errors


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
  assert (sgd["share of the run"], adam["share of the run"]) == ("1.00", "0.50")


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


def test_the_share_of_a_run_until_the_target_is_of_its_own_length(tmp_path):
  """SGD is counted in steps, Adam in epochs of ten steps; both reach 0.3 after three quarters."""

  def mixed(optimizer):
    made = config("m1", optimizer)
    made.num_steps = 40 if optimizer == "sgd" else 0  # else four epochs
    return made

  axes = {"optimizer": ("sgd", "adam")}
  study = Study(title="T", config=mixed, axes=axes, seeds=(0,), target_of="sgd")
  opened = record.open_study(tmp_path, study, "s.py", [])
  for name in ("sgd", "adam"):
    write_run(opened, f"{name}-seed0", (0.1, 0.2, 0.3, 0.3))
  assert [report._target(c, "step")[3] for c in results.gather(opened)] == ["0.75", "0.75"]


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
