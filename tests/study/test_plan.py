"""The runs of a study, and the overrides and directories that it takes."""

import dataclasses
import itertools

import numpy as np
import pytest

from mixer_jax.errors import UserError
from mixer_jax.study import Published, Study, Tuning, between, halton, record
from tests.study.grid import GRID, errors, tiny


def test_names_follow_the_axes():
  runs = Study(**GRID, seeds=(0, 3)).runs()
  expected = itertools.product(("m1", "m2"), ("sgd", "adam"), (0, 3))
  assert [run.name for run in runs] == [f"{m}-{o}-seed{s}" for m, o, s in expected]


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(seeds=(0, 0)), "'m1-sgd-seed0'; allowed are distinct names"),
    (dict(axes={"model": ("m/1",), "optimizer": ("sgd",)}), "'m/1-sgd-seed0'; allowed"),
    (dict(published={("m1", "lion"): Published(1.0)}), "'m1', 'lion'.*which is no cell"),
    (dict(published={("m1", "sgd"): 60.5}), "value 60.5 of .* allowed: study.Published"),
    (dict(notes="A note."), "the notes 'A note.'; allowed: a list of texts"),
    (dict(source=None), "the source None; allowed: a text"),
    (dict(published_at="first"), "values of the 'first' evaluation; allowed: last, best"),
    (dict(lines=("learning_rate",)), "lines by 'learning_rate'; its axes: model, optimizer"),
    (dict(tuning=Tuning({"lion": [{}]})), "{'lion': 1} candidates .* each value of 'optimizer'"),
    (dict(tuning=Tuning({"sgd": [{}], "adam": [{}, {}]})), "allowed: equally many for each"),
    (dict(tuning=Tuning({"sgd": [], "adam": []})), "allowed: equally many for each"),
    (dict(seeds=()), "no runs; allowed: a value or more on each axis"),
    (dict(axes={"model": (), "optimizer": ("sgd",)}), "no runs; allowed: a value or more"),
  ],
)
def test_mistakes_of_a_study_are_named(fields, message):
  with pytest.raises(UserError, match=message):
    Study(**GRID | fields)


def test_runs_are_selected_by_patterns():
  study = Study(**GRID)
  names = [run.name for run in study.select("m2-*-seed1,m1-sgd-seed0,m2-sgd-*")]
  assert names == ["m2-sgd-seed1", "m2-adam-seed1", "m1-sgd-seed0", "m2-sgd-seed0", "m2-sgd-seed2"]
  with pytest.raises(UserError, match=r"no run of the study is named 'm3-\*'; --list shows them"):
    study.select("m1-*,m3-*")


@pytest.mark.parametrize(
  "assignment, message",
  [
    ("epochs=3", "override epochs=3: the config has no field epochs"),
    ("num_epochs=few", "override num_epochs=few: Could not override field"),
    ("num_epochs", "--set is 'num_epochs'; allowed: field=value or VALUE:field=value"),
    ("m3:num_epochs=3", "--set=m3:num_epochs=3 concerns no run"),
    ("num_epochs=0", "run m1-sgd-seed0: num_epochs is 0; allowed: 1 or more"),
  ],
)
def test_mistakes_of_an_override_are_named(assignment, message, tmp_path):
  with pytest.raises(UserError, match=message):
    record.open_study(tmp_path, Study(**GRID), "f.py", [assignment])
  assert not list(tmp_path.iterdir())


def test_a_mistake_of_the_config_function_is_a_line(tmp_path):
  rates = {"sgd": 0.1}
  study = Study(**GRID | {"config": lambda model, optimizer: rates[optimizer]})
  with pytest.raises(UserError, match="study's config of the run m1-sgd-seed0 fails: "):
    record.open_study(tmp_path, study, "f.py", [])
  good = lambda model, optimizer: (rates[optimizer], tiny(model, optimizer))[1]
  with pytest.raises(UserError, match="the run m1-adam-seed0 fails: 'adam'"):
    record.open_study(tmp_path, Study(**GRID | {"config": good}), "f.py", [])


def test_the_mistaken_one_of_several_overrides_is_named(tmp_path):
  with pytest.raises(UserError, match="override epochs=3: the config has no field epochs"):
    record.open_study(tmp_path, Study(**GRID), "f.py", ["num_epochs=2", "epochs=3"])


def test_a_study_has_one_task(tmp_path):
  config = lambda model, optimizer: tiny(model, optimizer) if model == "m1" else errors(optimizer)
  with pytest.raises(
    UserError, match="runs of image_classification and tests.*allowed: tasks with one"
  ):
    record.open_study(tmp_path, Study(**GRID | dict(config=config)), "f.py", [])


def test_overrides_reach_all_runs_or_the_runs_of_a_value(tmp_path):
  opened = record.open_study(
    tmp_path, Study(**GRID), "f.py", ["num_epochs=7", "m2:optimizer.learning_rate=0.5"]
  )
  for run in opened.runs:
    config = opened.config(run)
    assert config.num_epochs == 7
    assert config.optimizer.learning_rate == (0.5 if run.cell[0] == "m2" else 0.1)


def test_runs_may_share_the_config_that_their_function_returns(tmp_path):
  shared = tiny("m1", "sgd")

  def config(model, optimizer):
    shared.optimizer = tiny(model, optimizer).optimizer
    return shared

  study = Study(**GRID | dict(config=config))
  opened = record.open_study(tmp_path, study, "f.py", ["adam:num_epochs=7"])
  epochs = {run.name: opened.config(run).num_epochs for run in opened.runs}
  assert all((n == 7) == ("adam" in name) for name, n in epochs.items())


def test_another_study_is_refused_by_its_differences(tmp_path):
  record.open_study(tmp_path, Study(**GRID), "f.py", [])
  opened = record.open_study(tmp_path, Study(**GRID), "f.py", ["num_epochs=7"])  # nothing was run
  opened.path(opened.runs[0]).mkdir()
  record.open_study(tmp_path, Study(**GRID), "f.py", ["num_epochs=7", "data.cache_dir=moved"])
  with pytest.raises(UserError, match="num_epochs was 7, is 3 in 12 of 12 runs. Take another"):
    record.open_study(tmp_path, Study(**GRID), "f.py", [])
  with pytest.raises(UserError, match="run m1-sgd-seed1 is gone; run m1-sgd-seed2 is gone;"):
    record.open_study(tmp_path, Study(**GRID, seeds=(0,)), "f.py", ["num_epochs=7"])


def test_a_study_may_grow_by_cells_and_seeds_but_not_by_tries(tmp_path):
  tries = lambda number, *names: Tuning({n: [{"seed": i} for i in range(number)] for n in names})
  opened = record.open_study(tmp_path, Study(**GRID, tuning=tries(2, "sgd", "adam")), "f.py", [])
  opened.path(opened.runs[0]).mkdir()
  axes = {**GRID["axes"], "optimizer": (*GRID["axes"]["optimizer"], "kfac")}
  grid = GRID | dict(axes=axes, seeds=(0, 1, 2, 3))
  grown = record.open_study(
    tmp_path, Study(**grid, tuning=tries(2, *axes["optimizer"])), "f.py", []
  )
  assert {run.name for run in opened.runs} < {run.name for run in grown.runs}
  assert any(run.cell[-1] == "kfac" and run.tunes for run in grown.runs)
  shared = Tuning(tries(2, *axes["optimizer"]).candidates, shared=("model",))
  with pytest.raises(UserError, match="run m2-sgd-seed0 is tuned by other runs|tune-m2.* is gone"):
    record.open_study(tmp_path, Study(**grid, tuning=shared), "f.py", [])
  with pytest.raises(UserError, match="run tune-m1-sgd-2 is new; run tune-m1-adam-2 is new"):
    record.open_study(tmp_path, Study(**grid, tuning=tries(3, *axes["optimizer"])), "f.py", [])


def test_a_record_is_read_as_it_was_written(tmp_path):
  published = {("m2", "adam"): Published(60.5, 38), ("m1", "sgd"): Published(1.25)}
  study = Study(
    **GRID, published=published, tuning=Tuning(dict(sgd=[{"seed": 5}], adam=[{"seed": 6}]))
  )
  record.open_study(tmp_path, study, "f.py", [])
  opened = record.load(tmp_path)
  fields = lambda runs: [(run.name, run.cell, run.seed, run.settings) for run in runs]
  assert fields(opened.runs) == fields(study.runs())
  assert opened.published == {"-".join(cell): row for cell, row in published.items()}
  assert (opened.axes, opened.lines) == (("model", "optimizer"), ("optimizer",))


def test_seeds_and_tries_may_be_numbers_of_numpy(tmp_path):
  both = zip(np.float32([0.5, 0.25]), np.int64([8, 16]))
  tried = [{"optimizer.learning_rate": rate, "batch_size": size} for rate, size in both]
  study = Study(
    **GRID, seeds=np.arange(2), tuning=Tuning(dict(sgd=tried, adam=tried), seed=np.int64(7))
  )
  record.open_study(tmp_path, study, "f.py", [])
  tries, runs = [], []
  for run in record.load(tmp_path).runs:
    (tries if run.tunes else runs).append(run)
  assert [run.settings["optimizer.learning_rate"] for run in tries] == [0.5, 0.25] * 4
  assert [run.config["batch_size"] for run in tries] == [8, 16] * 4
  assert [run.config["seed"] for run in runs] == [0, 1] * 4
  assert {run.config["seed"] for run in tries} == {7}


def test_an_axis_may_share_the_choice_of_its_first_value(tmp_path):
  axes = {"budget": ("1x", "2x"), "optimizer": ("sgd", "adam")}
  build = lambda budget, optimizer: GRID["config"](model="m1", optimizer=optimizer)
  tuning = Tuning(dict(sgd=[{"seed": 5}], adam=[{"seed": 6}]), shared=("budget",))
  study = Study(title="t", config=build, axes=axes, seeds=(0,), tuning=tuning)
  names = [run.name for run in study.runs()]
  finals = ["1x-sgd-seed0", "1x-adam-seed0", "2x-sgd-seed0", "2x-adam-seed0"]
  assert names == ["tune-1x-sgd-0", "tune-1x-adam-0", *finals]
  opened = record.open_study(tmp_path, study, "study.py", [])
  [last] = [run for run in opened.runs if run.name == "2x-adam-seed0"]
  assert last.tuned == ("1x", "adam")
  with pytest.raises(
    UserError, match="the study has tuning shared by 'size'; its axes: budget, optimizer"
  ):
    Study(title="t", config=build, axes=axes, tuning=dataclasses.replace(tuning, shared=("size",)))


@pytest.mark.parametrize("part, value", [(0, 1e-3), (0.5, 1e-2), (1, 0.1), (0.25, 0.0032)])
def test_numbers_between_by_logarithms_to_two_digits(part, value):
  assert between(1e-3, 0.1, part) == value


def test_a_number_between_stays_in_its_range():
  assert between(0.9, 0.999, 0.97) == 0.999 and between(0.0123, 1.0, 0.0) == 0.0123


def test_numbers_of_a_narrow_range_differ():
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


def test_tuning_may_not_come_later_nor_see_the_test_set(tmp_path):
  opened = record.open_study(tmp_path, Study(**GRID), "f.py", [])
  opened.path(opened.runs[0]).mkdir()
  tuning = Tuning({name: [{"optimizer.learning_rate": 0.1}] for name in ("sgd", "adam")})
  with pytest.raises(UserError, match="run m1-sgd-seed0 is tuned by other runs"):
    record.open_study(tmp_path, Study(**GRID, tuning=tuning), "f.py", [])
  seen = Tuning(tuning.candidates, hold_out={})
  for hold_out in ({}, {"data.test_split": "test[:]"}, {"data.validation_split": "test[:50%]"}):
    seen = Tuning(tuning.candidates, hold_out=hold_out)
    told = (
      "tune-m1-sgd-0 would be compared on data.*_split='test.*shares examples with the test set"
    )
    with pytest.raises(UserError, match=told):
      Study(**GRID, tuning=seen).planned([])


@pytest.mark.parametrize("parts", itertools.permutations(("late", "test")))
def test_each_test_set_of_a_shared_tuning_is_kept_apart(parts):
  def config(part, optimizer):
    made = tiny("m1", optimizer)
    made.data.test_split = {"late": "train[95%:]", "test": "test"}[part]
    return made

  tuning = Tuning({"sgd": [{"optimizer.learning_rate": 0.1}]}, shared=("part",))
  axes = {"part": parts, "optimizer": ("sgd",)}
  study = Study(**GRID | dict(config=config, axes=axes, tuning=tuning))
  with pytest.raises(UserError, match=r"shares examples with the test set 'train\[95%:\]'"):
    study.planned([])


def test_epochs_without_effect_are_told(caplog):
  def config(model, optimizer):
    made = tiny(model, optimizer)
    made.num_steps = 30
    return made

  Study(**GRID | dict(config=config)).planned(["num_epochs=5", "num_steps=0"])
  assert not caplog.records
  Study(**GRID | dict(config=config)).planned(["num_epochs=5"])
  [told] = caplog.messages  # once, of all runs
  assert told == "num_epochs=5 has no effect, as num_steps is 30; set num_steps=0"


def test_other_data_sets_of_a_shared_tuning_do_not_count():
  def config(part, optimizer):
    made = tiny("m1", optimizer)
    if part == "other":
      made.data.update(
        name="cifar100", dir="elsewhere", train_split="train[:90%]", test_split="train[90%:]"
      )
    return made

  tuning = Tuning({"sgd": [{"optimizer.learning_rate": 0.1}]}, shared=("part",))
  axes = {"part": ("own", "other", "third"), "optimizer": ("sgd",)}
  assert Study(**GRID | dict(config=config, axes=axes, tuning=tuning)).planned([])


def test_seeds_are_those_of_the_study():
  with pytest.raises(UserError, match="--set gives the seed; each run has its own, of"):
    Study(**GRID).planned(["seed=7"])
