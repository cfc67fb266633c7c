"""The runs of a study, and the overrides and directories that it takes."""

import itertools

import numpy as np
import pytest

from mixer_jax.errors import UserError
from mixer_jax.study import Published, Study, Tuning, between, halton, record
from tests.study.grid import GRID, tiny


def begin(path, assignments=(), **fields):
  return record.open_study(path, Study(**GRID | fields), "f.py", assignments)


def tries(number, *names, **fields):
  return Tuning({n: [{"model.num_blocks": i + 1} for i in range(number)] for n in names}, **fields)


def test_names_follow_the_axes_and_patterns_select_them():
  study = Study(**GRID, seeds=(0, 3))
  expected = itertools.product(("m1", "m2"), ("sgd", "adam"), (0, 3))
  assert [run.name for run in study.runs()] == [f"{m}-{o}-seed{s}" for m, o, s in expected]
  names = [run.name for run in study.select("m2-*-seed3,m1-sgd-seed0,m2-sgd-*")]
  assert names == ["m2-sgd-seed3", "m2-adam-seed3", "m1-sgd-seed0", "m2-sgd-seed0"]


def test_overrides_reach_all_runs_or_the_runs_of_a_value_whose_config_may_be_shared(tmp_path):
  shared = tiny("m1", "sgd")

  def config(model, optimizer):
    shared.optimizer = tiny(model, optimizer).optimizer
    return shared

  opened = begin(tmp_path, ["num_epochs=7", "m2:optimizer.learning_rate=0.5"], config=config)
  for run in opened.runs:
    config = opened.config(run)
    assert config.num_epochs == 7
    assert config.optimizer.learning_rate == (0.5 if run.cell[0] == "m2" else 0.1)


def test_another_study_is_refused_by_its_differences(tmp_path):
  begin(tmp_path)
  opened = begin(tmp_path, ["num_epochs=7"])  # nothing was run
  opened.path(opened.runs[0]).mkdir()
  begin(tmp_path, ["num_epochs=7", "data.cache_dir=moved"])
  with pytest.raises(UserError, match="num_epochs was 7, is 3 in 12 of 12 runs"):
    begin(tmp_path)
  with pytest.raises(UserError, match="run m1-sgd-seed1 is gone; run m1-sgd-seed2 is gone;"):
    begin(tmp_path, ["num_epochs=7"], seeds=(0,))
  late = tries(1, "sgd", "adam")
  with pytest.raises(UserError, match="run m1-sgd-seed0 is tuned by other runs"):
    begin(tmp_path, ["num_epochs=7"], tuning=late)


def test_a_study_may_grow_by_cells_and_seeds_but_not_by_tries(tmp_path):
  opened = begin(tmp_path, tuning=tries(2, "sgd", "adam"))
  opened.path(opened.runs[0]).mkdir()
  axes = {**GRID["axes"], "optimizer": ("sgd", "adam", "kfac")}
  grid = dict(axes=axes, seeds=(0, 1, 2, 3))
  grown = begin(tmp_path, **grid, tuning=tries(2, *axes["optimizer"]))
  assert {run.name for run in opened.runs} < {run.name for run in grown.runs}
  assert any(run.cell[-1] == "kfac" and run.tunes for run in grown.runs)
  shared = tries(2, *axes["optimizer"], shared=("model",))
  with pytest.raises(UserError, match="run m2-sgd-seed0 is tuned by other runs|tune-m2.* is gone"):
    begin(tmp_path, **grid, tuning=shared)
  with pytest.raises(UserError, match="run tune-m1-sgd-2 is new; run tune-m1-adam-2 is new"):
    begin(tmp_path, **grid, tuning=tries(3, *axes["optimizer"]))


def test_a_record_is_read_as_it_was_written(tmp_path):
  published = {("m2", "adam"): Published(60.5, 38), ("m1", "sgd"): Published(1.25)}
  study = Study(**GRID, published=published, tuning=tries(1, "sgd", "adam"))
  record.open_study(tmp_path, study, "f.py", [])
  opened = record.load(tmp_path)
  fields = lambda runs: [(run.name, run.cell, run.seed, run.settings) for run in runs]
  assert fields(opened.runs) == fields(study.runs())
  assert opened.published == {"-".join(cell): row for cell, row in published.items()}
  assert (opened.axes, opened.lines) == (("model", "optimizer"), ("optimizer",))


def test_seeds_and_tries_may_be_numbers_of_numpy(tmp_path):
  both = zip(np.float32([0.5, 0.25]), np.int64([8, 16]))
  tried = [{"optimizer.learning_rate": rate, "batch_size": size} for rate, size in both]
  tuning = Tuning(dict(sgd=tried, adam=tried), seed=np.int64(7))
  begin(tmp_path, seeds=np.arange(2), tuning=tuning)
  runs = record.load(tmp_path).runs
  tuned = [run for run in runs if run.tunes]
  assert [run.settings["optimizer.learning_rate"] for run in tuned] == [0.5, 0.25] * 4
  assert [run.config["batch_size"] for run in tuned] == [8, 16] * 4
  assert {run.config["seed"] for run in tuned} == {7}
  assert [run.config["seed"] for run in runs if not run.tunes] == [0, 1] * 4


def test_an_axis_may_share_the_choice_of_its_first_value(tmp_path):
  axes = {"budget": ("1x", "2x"), "optimizer": ("sgd", "adam")}
  build = lambda budget, optimizer: tiny("m1", optimizer)
  tuning = tries(1, "sgd", "adam", shared=("budget",))
  opened = begin(tmp_path, config=build, axes=axes, seeds=(0,), tuning=tuning)
  finals = ["1x-sgd-seed0", "1x-adam-seed0", "2x-sgd-seed0", "2x-adam-seed0"]
  assert [run.name for run in opened.runs] == ["tune-1x-sgd-0", "tune-1x-adam-0", *finals]
  assert opened.runs[-1].tuned == ("1x", "adam")


def test_numbers_between_by_logarithms():
  """To two digits, within the range, and to more where it is narrow."""
  for part, value in ((0, 1e-3), (0.5, 1e-2), (1, 0.1), (0.25, 0.0032)):
    assert between(1e-3, 0.1, part) == value
  assert between(0.9, 0.999, 0.97) == 0.999 and between(0.0123, 1.0, 0.0) == 0.0123
  assert len({between(0.99, 0.9999, i / 8) for i in range(8)}) == 8
  assert len({between(0.9, 0.99, i / 8) for i in range(8)}) == 8 and between(2.0, 2.0, 0.5) == 2.0


def test_a_halton_sequence_has_one_point_in_each_equal_part_of_a_range():
  """Of eight in base 2, and of nine in base 3: the axes' bases are the first primes."""
  ranges = {"learning_rate": (1e-3, 10.0), "damping": (1e-6, 1e-2)}
  tries = halton({"kfac": ranges, "sgd": ranges}, 9)
  assert tries["kfac"] == tries["sgd"]
  assert tries["kfac"][:4] == halton({"kfac": ranges}, 4)["kfac"]
  parts = lambda field, low: [np.log10(x[f"optimizer.{field}"] / low) / 4 for x in tries["kfac"]]
  rates, dampings = (parts(field, low) for field, (low, _) in ranges.items())
  assert sorted(int(8 * part) for part in rates[:8]) == list(range(8))
  assert sorted(int(9 * part) for part in dampings) == list(range(9))


@pytest.mark.parametrize(
  "hold_out", [{}, {"data.test_split": "test[:]"}, {"data.validation_split": "test[:50%]"}]
)
def test_tuning_may_not_see_the_test_set(hold_out):
  with pytest.raises(UserError, match="tune-m1-sgd-0 would be compared on data.*_split='test"):
    Study(**GRID, tuning=tries(1, "sgd", "adam", hold_out=hold_out)).planned([])


@pytest.mark.parametrize("parts", [("late", "test"), ("test", "late"), ("test", "other")])
def test_each_test_set_of_a_shared_tuning_is_kept_apart_in_one_data_set(parts):
  def config(part, optimizer):
    made = tiny("m1", optimizer)
    made.data.test_split = {"late": "train[95%:]", "test": "test", "other": "train[90%:]"}[part]
    if part == "other":
      made.data.update(name="cifar100", dir="elsewhere", train_split="train[:90%]")
    return made

  axes = {"part": parts, "optimizer": ("sgd",)}
  study = Study(**GRID | dict(config=config, axes=axes, tuning=tries(1, "sgd", shared=("part",))))
  if "other" in parts:
    assert study.planned([])
    return
  with pytest.raises(UserError, match=r"shares examples with the test set 'train\[95%:\]'"):
    study.planned([])


def test_epochs_without_effect_are_told_once(caplog):
  def config(model, optimizer):
    made = tiny(model, optimizer)
    made.num_steps = 30
    return made

  study = Study(**GRID | dict(config=config))
  study.planned(["num_epochs=5", "num_steps=0"])
  assert not caplog.records
  study.planned(["num_epochs=5"])
  assert ["num_epochs=5 has no effect" in text for text in caplog.messages] == [True]
