"""A study's runs as rows of a CSV file."""

import csv

import pytest

from mixer_jax.errors import UserError
from mixer_jax.report import study_rows as rows
from mixer_jax.study import Study, Tuning, record
from tests.report.written_runs import ERROR_ROW, write_run
from tests.study.grid import errors


def written(directory, path):
  count = rows.write(directory, path)
  with path.open(newline="") as file:
    found = list(csv.DictReader(file))
  assert len(found) == count
  return found


def test_rows_of_a_study(opened, tmp_path):
  values = {name: (0.3, 0.625, 0.6) for name in ("m1-sgd-seed0", "m2-kfac-seed1")}
  made = {name: write_run(opened, name, top1) for name, top1 in values.items()}
  write_run(opened, "m1-sgd-seed1", (0.9,), finished=False)
  found = written(opened.directory, tmp_path / "rows.csv")
  assert tuple(found[0]) == rows.COLUMNS
  own = {row["metric"]: row for row in found if row["optimizer"] == "K-FAC"}
  assert len(found) == 2 * len(own)
  assert own["test top-1 [%]"]["value"] == "60" and own["test best top-1 [%]"]["value"] == "62.5"
  seconds = sum(row["seconds"] for row in made["m2-kfac-seed1"])
  assert float(own["training time [min]"]["value"]) == pytest.approx(seconds / 60, rel=1e-3)
  row = own["test loss [nats]"]
  assert [row[c] for c in ("model", "seed", "budget", "commit")] == [
    *("m2", "1", "4 epochs", "0123456789ab"),
  ]
  assert row["device"] == "1 x gpu (H200)" and row["versions"] == "mixer_jax 0.1.0, jax 0.9.1"
  assert row["command"] == "python -m mixer_jax.main --config=file.py:m2-kfac-seed1"


def test_tries_are_validated_and_their_choice_is_in_the_rows(tmp_path):
  rates = (0.3, 0.03)
  tuning = Tuning(
    {"sgd": [{"optimizer.learning_rate": rate} for rate in rates]}, hold_out={"points.fold": "last"}
  )
  study = Study(title="t", config=errors, axes={"optimizer": ("sgd",)}, seeds=(0,), tuning=tuning)
  opened = record.open_study(tmp_path, study, "file.py", [])
  for run, error in zip(opened.runs, (0.5, 0.25, 0.125)):
    write_run(opened, run.name, [ERROR_ROW | {"test/error": error}])
  found = written(tmp_path, tmp_path / "rows.csv")
  values = {(r["settings"], r["metric"]): r["value"] for r in found}
  assert values["learning_rate=0.3", "validation error [m]"] == "0.5"
  assert values["learning_rate=0.03", "validation error [m]"] == "0.25"
  assert values["learning_rate=0.03", "test error [m]"] == "0.125"
  last = found[-1]
  assert last["command"].endswith("file.py:sgd-seed0 --config.optimizer.learning_rate=0.03")


def test_a_file_that_cannot_be_written_is_told(opened, tmp_path):
  with pytest.raises(UserError, match="cannot be written"):
    rows.write(opened.directory, tmp_path / "none" / "rows.csv")
