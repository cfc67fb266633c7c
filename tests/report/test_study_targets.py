"""Targets of a study, and the tries of its tuning."""

import pytest

from mixer_jax.report import results
from mixer_jax.report import study as report
from mixer_jax.study import Published, Tuning
from tests.report.written_runs import begin, cells_of, config, error_row, line_of, write_run
from tests.study.grid import errors

BOTH = {"model": ("m1",), "optimizer": ("sgd", "adam")}


def rates(*values, **fields):
  return Tuning({"sgd": [{"optimizer.learning_rate": rate} for rate in values]}, **fields)


def test_a_metric_where_lower_is_better_with_several_test_sets(tmp_path):
  """Rows of a run of 30 steps; the validation set picks step 20, the test set would pick 30."""
  published = {("sgd",): Published(0.04)}
  tuning = rates(0.1, 0.2, hold_out={})
  fields = dict(published=published, source="a table", tuning=tuning)
  opened = begin(tmp_path, errors, {"optimizer": ("sgd",)}, **fields)
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
  assert cells_of(text, "SGD", "1 of 1") == {
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
  }
  assert "lower is better. *Best* is the value at the step that the validation set picked" in text
  chosen = ["sgd", "optimizer.learning_rate=0.2", "chosen", "0.01", "0.015"]
  assert line_of(text, *chosen[:2]) == chosen
  assert "The lowest after the last evaluation was chosen" in text


def test_an_optimizer_may_be_the_target_of_the_others(tmp_path):
  opened = begin(tmp_path, config, BOTH, seeds=(0, 1), target_of="sgd")
  for name, top1 in (
    ("m1-sgd-seed0", (0.1, 0.2, 0.3, 0.4)),
    ("m1-sgd-seed1", (0.1, 0.2, 0.3, 0.5)),  # ends at 0.45 on average
    ("m1-adam-seed0", (0.1, 0.46, 0.5, 0.6)),
    ("m1-adam-seed1", (0.1, 0.2, 0.3, 0.44)),
  ):
    write_run(opened, name, top1)
  text = report.write(tmp_path)[0].read_text()
  sgd, adam = (cells_of(text, "m1", line) for line in ("SGD", "Adam"))
  assert sgd["target"] == adam["target"] == "45.00"
  assert (sgd["epochs to it"], adam["epochs to it"]) == ("4.0 (1 of 2)", "2.0 (1 of 2)")
  assert (sgd["share of the run"], adam["share of the run"]) == ("1.00", "0.50")
  of_loss = report.write(tmp_path, "loss")[0].read_text()  # 1.55: Adam's are 1.54 and 1.56
  assert cells_of(of_loss, "m1", "Adam")["epochs to it"] == "2.0 (1 of 2)"


def test_the_run_that_sets_the_target_reaches_it(tmp_path):
  """A percentage that is scaled and divided again differs in its last bit: 0.007 is such a one."""
  opened = begin(tmp_path, config, BOTH | {"optimizer": ("sgd",)}, target_of="sgd")
  write_run(opened, "m1-sgd-seed0", (0.001, 0.002, 0.003, 0.007))
  [cell] = results.gather(opened)
  assert [row["step"] for row in cell.reached()] == [cell.results[0].rows[-1]["step"]]


def test_tuning_shows_every_trial(tmp_path):
  tries = [{"optimizer.learning_rate": 0.1}, {"freeze": "^stem/|^head/"}]
  opened = begin(tmp_path, config, BOTH, tuning=Tuning({"sgd": tries, "adam": tries}))
  write_run(opened, "tune-m1-sgd-0", (0.1, 0.5, 0.9, 0.3))  # its best epoch does not count
  write_run(opened, "tune-m1-sgd-1", (0.1, 0.2, 0.3, 0.4))
  text = report.write(tmp_path)[0].read_text()
  chosen = ["m1 sgd", r"freeze=^stem/\|^head/", "chosen", "40.00", "40.00"]
  assert line_of(text, *chosen[:2]) == chosen
  other = ["m1 sgd", "optimizer.learning_rate=0.1", "", "30.00", "90.00"]
  assert line_of(text, *other[:2]) == other
  assert line_of(text, "m1 adam", "not decided")
  assert cells_of(text, "m1", "SGD")["seeds"] == "0 of 1"  # tries stand in no other table


def test_the_share_of_a_run_until_the_target_is_of_its_own_length(tmp_path):
  """SGD is counted in steps, Adam in epochs of ten steps; both reach 0.3 after three quarters."""

  def mixed(optimizer):
    made = config("m1", optimizer)
    made.num_steps = 40 if optimizer == "sgd" else 0  # else four epochs
    return made

  opened = begin(tmp_path, mixed, {"optimizer": ("sgd", "adam")}, target_of="sgd")
  for name in ("sgd", "adam"):
    write_run(opened, f"{name}-seed0", (0.1, 0.2, 0.3, 0.3))
  text = report.write(tmp_path)[0].read_text()
  assert {cells_of(text, name)["share of the run"] for name in ("SGD", "Adam")} == {"0.75"}


def test_a_target_is_of_its_own_panel(tmp_path):
  opened = begin(tmp_path, config, BOTH | {"model": ("m1", "m2")}, target_of="sgd")
  for run, top1 in zip(opened.runs, (0.4, 0.6, 0.8, 0.9)):
    write_run(opened, run.name, (0.1, 0.2, 0.3, top1))
  assert [c.target for c in results.gather(opened)] == pytest.approx([0.4, 0.4, 0.8, 0.8])


def test_of_equal_tries_the_one_of_least_loss_is_chosen(tmp_path):
  tuning = rates(0.1, 0.2, 0.3, hold_out={"points.fold": "last"})
  opened = begin(tmp_path, errors, {"optimizer": ("sgd",)}, tuning=tuning)
  for i, loss in enumerate((3.0, 1.0, 2.0)):
    write_run(opened, f"tune-sgd-{i}", [error_row(30, **{"test/loss": loss})])
  assert [t["run"] for t in opened.trials(("sgd",))] == ["tune-sgd-1", "tune-sgd-2", "tune-sgd-0"]
