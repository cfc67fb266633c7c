"""The report of a study against numbers worked out here from what its runs wrote."""

import json

import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import study as report
from mixer_jax.report import study_figures
from mixer_jax.study import Published, Study, Tuning, record

EPOCHS = 4
GROUPS = ("stem", "token_mixing", "channel_mixing", "norms", "head")


def config(model, optimizer):
  config = config_lib.default()
  config.num_epochs = EPOCHS
  config.target_accuracy = 0.5
  sides = [config_lib.optimizer(name, learning_rate=0.1) for name in optimizer.split("_")]
  config.optimizer = config_lib.grafted(*sides) if sides[1:] else sides[0]
  return config


def rows(name, top1):
  """What a run writes, with the given test accuracies."""
  rng = np.random.default_rng(sum(map(ord, name)))
  reached = [epoch for epoch, accuracy in enumerate(top1, 1) if accuracy >= 0.5]
  for epoch, accuracy in enumerate(top1, 1):
    row = {
      "epoch": epoch,
      "step": 10 * epoch,
      "test/top1": accuracy,
      "test/loss": 2 - accuracy,
      "test/best_top1": max(top1[:epoch]),
      "test/target_epoch": reached[0] if reached and reached[0] <= epoch else 0,
      "seconds_per_epoch": float(rng.uniform(50, 70)),
    }
    if "_" in name:
      sides = (
        f"train/norm/{side}/{group}" for side in ("magnitude", "direction") for group in GROUPS
      )
      row |= {key: float(rng.uniform(1e-3, 1)) for key in sides}
    yield row


def session(**fields):
  return {
    "commit": "0123456789ab",
    "versions": {"mixer_jax": "0.1.0", "jax": "0.9.1"},
    "device": {"platform": "gpu", "kind": "H200", "count": 1},
    "data": {
      "name": "cifar10",
      "train_split": "train",
      "train_images": 50000,
      "test_split": "test",
      "test_images": 10000,
      "classes": 10,
    },
    "from_epoch": 1,
    "started": "2026-01-01T00:00:00+00:00",
    "ended": "2026-01-01T01:00:00+00:00",
  } | fields


def write_run(opened, name, top1, reason="", finished=True, **fields):
  """Fabricates a run's directory; returns its rows."""
  (run,) = [run for run in opened.runs if run.name == name]
  path = opened.path(run)
  path.mkdir()
  written = list(rows(name, top1))
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
    source="Table 2",
    notes=["A note."],
  )
  return record.open_study(tmp_path, study, "file.py", [])


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
  (text, *_) = report.write(opened.directory)
  cells = line_of(text.read_text(), "m1", "SGD", "3 of 3")
  best, last = np.array([62, 49, 70]), np.array([60, 49, 58])
  assert cells[3] == "4"
  assert cells[4] == f"{best.mean():.2f} ± {best.std(ddof=1):.2f}"
  assert cells[5] == f"{last.mean():.2f} ± {last.std(ddof=1):.2f}"
  # 50% was reached in epochs 2 and 1 of seeds 0 and 2, by seed 1 never.
  assert cells[6:8] == ["50", "1.5 (2 of 3)"]
  seconds = {n: [row["seconds_per_epoch"] for row in r] for n, r in written.items()}
  minutes = (sum(seconds["m1-sgd-seed0"][:2]) + seconds["m1-sgd-seed2"][0]) / 2 / 60
  assert cells[8] == f"{minutes:.1f}"
  medians = np.array([np.median(s) for s in seconds.values()])
  assert cells[9] == f"{medians.mean():.1f} ± {medians.std(ddof=1):.1f}"
  assert cells[10:] == ["60.50", f"{best.mean() - 60.5:+.2f}", "38"]


def test_what_is_missing_is_named_and_counts_nowhere(opened):
  write_run(opened, "m1-kfac-seed0", (0.4, 0.4, 0.4, 0.4))
  write_run(opened, "m1-kfac-seed1", (0.9,), reason="the loss is nan in epoch 2")
  write_run(opened, "m1-kfac-seed2", (0.9, 0.9), finished=False)
  text = report.write(opened.directory)[0].read_text()
  cells = line_of(text, "m1", "K-FAC", "1 of 3")
  assert cells[4:9] == ["40.00", "40.00", "50", "not reached", "-"]
  assert line_of(text, "m2", "K-FAC", "0 of 3")[4:] == ["-", "-", "50", *["-"] * 6]
  assert "- `m1-kfac-seed1`: failed, epoch 1 of 4: the loss is nan in epoch 2" in text
  assert "- `m1-kfac-seed2`: interrupted, epoch 2 of 4" in text
  assert "- not run (21): `m1-sgd-seed0`" in text
  # Published figures stand without ours, and nothing stands for either.
  assert line_of(text, "m1", "SGD", "0 of 3")[10:] == ["60.50", "-", "38"]


def test_tables_in_the_form_of_the_paper(opened):
  for name, accuracy in {"m1-sgd": 0.6, "m2-kfac": 0.7, "m1-sgd_kfac": 0.75}.items():
    write_run(opened, f"{name}-seed0", (accuracy,) * EPOCHS)
  text = report.write(opened.directory)[0].read_text()
  assert line_of(text, "model", "SGD", "K-FAC")
  assert line_of(text, "m1", "60.00 / 60.50") == ["m1", "60.00 / 60.50", "- / -"]
  assert line_of(text, "m2", "- / -") == ["m2", "- / -", "70.00 / -"]
  matrix = text[text.index("| m1: norm of") :]
  assert matrix.splitlines()[0] == "| m1: norm of \\ direction of | K-FAC | SGD |"
  assert line_of(matrix.split("| m2")[0], "SGD") == ["SGD", "75.00 / 75.47", "- / -"]


def test_where_it_is_from(opened):
  write_run(opened, "m1-sgd-seed0", (0.6,) * EPOCHS)
  write_run(opened, "m1-sgd-seed1", (0.6,) * EPOCHS, commit=None, ended="2026-01-03T01:00:00+00:00")
  text = report.write(opened.directory)[0].read_text()
  assert text.startswith("# Title\n\nA note.\n")
  assert "- code: commit 0123456789ab; unknown; mixer_jax 0.1.0, jax 0.9.1" in text
  assert "- device: 1 x gpu (H200)" in text
  assert "cifar10: 50000 training images (train), 10000 test images (test), 10 classes" in text
  assert "- time: 2026-01-01T00:00:00+00:00 to 2026-01-03T01:00:00+00:00" in text
  assert "num_epochs=4" in text and "optimizer.magnitude.name=kfac" in text
  assert "seed=" not in text and "data.dir" not in text


def test_figures_are_drawn_of_what_there_is(opened):
  assert len(report.write(opened.directory)) == 1
  for name in ("m1-sgd-seed0", "m1-sgd-seed1", "m2-sgd_kfac-seed0", "m2-kfac_sgd-seed0"):
    write_run(opened, name, (0.1, 0.2, 0.3, 0.4))
  files = report.write(opened.directory)
  assert [f.name for f in files] == ["study.md", "epochs.png", "time.png", "step_norms_m2.png"]
  for picture in files[1:]:
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20  # more than an empty frame
    assert f"({picture.name})" in files[0].read_text()


def test_a_band_is_mean_and_range_as_far_as_all_seeds_go():
  mean, low, high = study_figures.band([[1.0, 2.0, 9.0], [3.0, 5.0]])
  np.testing.assert_array_equal((mean, low, high), [[2.0, 3.5], [1.0, 2.0], [3.0, 5.0]])


def test_tuning_shows_every_trial(tmp_path):
  settings = [{"optimizer.learning_rate": rate} for rate in (0.1, 0.2)]
  study = Study(
    title="t",
    config=config,
    axes={"model": ("m1",), "optimizer": ("sgd", "adam")},
    tuning=Tuning({"sgd": settings, "adam": settings}),
  )
  opened = record.open_study(tmp_path, study, "file.py", [])
  write_run(opened, "tune-m1-sgd-0", (0.1, 0.5, 0.9, 0.3))  # the best epoch is not what counts
  write_run(opened, "tune-m1-sgd-1", (0.1, 0.2, 0.3, 0.4))
  text = report.write(tmp_path)[0].read_text()
  chosen = ["m1 sgd", "optimizer.learning_rate=0.2", "chosen", "40.00", "40.00"]
  assert line_of(text, *chosen[:2]) == chosen
  other = ["m1 sgd", "optimizer.learning_rate=0.1", "", "30.00", "90.00"]
  assert line_of(text, *other[:2]) == other
  assert line_of(text, "m1 adam", "not decided")
  assert line_of(text, "m1", "SGD", "0 of 3")  # validation figures stand in no other table


def test_a_directory_without_a_study_is_refused(tmp_path):
  with pytest.raises(UserError, match=r"holds no study \(no study.json in it\)"):
    report.write(tmp_path)
