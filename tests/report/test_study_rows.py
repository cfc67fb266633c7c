"""A study's runs as rows of a CSV file."""

import csv

import pytest

from mixer_jax.errors import UserError
from mixer_jax.report import study_rows
from mixer_jax.study import Tuning
from tests.report.written_runs import begin, error_row, write_run
from tests.study.grid import errors


def written(directory, path):
  count = study_rows.write(directory, path)
  with path.open(newline="") as file:
    found = list(csv.DictReader(file))
  assert len(found) == count
  return found


def test_rows_of_a_study(opened, tmp_path):
  values = dict.fromkeys(("m1-sgd-seed0", "m2-kfac-seed1"), (0.3, 0.625, 0.6))
  made = {name: write_run(opened, name, top1) for name, top1 in values.items()}
  write_run(opened, "m1-sgd-seed1", (0.9,), finished=False)
  found = written(opened.directory, tmp_path / "rows.csv")
  assert tuple(found[0]) == study_rows.COLUMNS
  own = {row["metric"]: row for row in found if row["optimizer"] == "K-FAC"}
  assert len(found) == 2 * len(own)
  assert own["test top-1 [%]"]["value"] == "60" and own["test best top-1 [%]"]["value"] == "62.5"
  seconds = sum(row["seconds"] for row in made["m2-kfac-seed1"])
  assert float(own["training time [min]"]["value"]) == pytest.approx(seconds / 60, rel=1e-3)
  row = own["test loss [nats]"]
  columns = ("model", "seed", "budget", "commit", "device", "versions")
  versions = "mixer_jax 0.1.0, jax 0.9.1"
  assert [row[c] for c in columns] == [
    *("m2", "1", "4 epochs", "0123456789ab", "1 x gpu (H200)", versions),
  ]
  assert row["command"] == "python -m mixer_jax.main --config=file.py:m2-kfac-seed1"
  with pytest.raises(UserError, match="none/rows.csv: cannot be written"):
    study_rows.write(opened.directory, tmp_path / "none" / "rows.csv")


def test_tries_are_validated_and_their_choice_is_in_the_rows(tmp_path):
  tries = [{"optimizer.learning_rate": rate} for rate in (0.3, 0.03)]
  tuning = Tuning({"sgd": tries}, hold_out={"points.fold": "last"})
  opened = begin(tmp_path, errors, {"optimizer": ("sgd",)}, tuning=tuning)
  for run, error in zip(opened.runs, (0.5, 0.25, 0.125)):
    write_run(opened, run.name, [error_row(error=error)])
  found = written(tmp_path, tmp_path / "rows.csv")
  values = {(r["settings"], r["metric"]): r["value"] for r in found}
  assert values["learning_rate=0.3", "validation error [m]"] == "0.5"
  assert values["learning_rate=0.03", "validation error [m]"] == "0.25"
  assert values["learning_rate=0.03", "test error [m]"] == "0.125"
  last = found[-1]
  assert last["command"].endswith("file.py:sgd-seed0 --config.optimizer.learning_rate=0.03")
