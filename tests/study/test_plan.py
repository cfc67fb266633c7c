"""What a study expands to, and which overrides and directories it takes."""

import itertools

import pytest

from mixer_jax.errors import UserError
from mixer_jax.study import Published, Study, Tuning, record
from tests.study.grid import GRID


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
    (dict(lines=("learning_rate",)), "lines by 'learning_rate'; its axes: model, optimizer"),
  ],
)
def test_mistakes_of_a_study_are_named(fields, message):
  with pytest.raises(UserError, match=message):
    Study(**GRID | fields)
  with pytest.raises(UserError, match="equally many for each optimizer"):
    Tuning({"sgd": [{}], "adam": [{}, {}]})


@pytest.mark.parametrize(
  "assignment, message",
  [
    ("epochs=3", "override epochs=3: the config has no field epochs"),
    ("num_epochs=few", "override num_epochs=few: .*invalid literal"),
    ("num_epochs", "--set is 'num_epochs'; allowed: field=value or VALUE:field=value"),
    ("m3:num_epochs=3", "--set=m3:num_epochs=3 concerns no run"),
    ("num_epochs=0", "run m1-sgd-seed0: num_epochs is 0; allowed: 1 or more"),
  ],
)
def test_mistakes_of_an_override_are_named(assignment, message, tmp_path):
  with pytest.raises(UserError, match=message):
    record.open_study(tmp_path, Study(**GRID), "f.py", [assignment])
  assert not list(tmp_path.iterdir())


def test_overrides_reach_all_runs_or_those_of_a_value(tmp_path):
  opened = record.open_study(
    tmp_path, Study(**GRID), "f.py", ["num_epochs=7", "m2:optimizer.learning_rate=0.5"]
  )
  for run in opened.runs:
    config = opened.config(run)
    assert config["num_epochs"] == 7
    assert config["optimizer"]["learning_rate"] == (0.5 if run.cell[0] == "m2" else 0.1)


def test_another_study_is_refused_by_its_differences(tmp_path):
  record.open_study(tmp_path, Study(**GRID), "f.py", [])
  opened = record.open_study(tmp_path, Study(**GRID), "f.py", ["num_epochs=7"])  # nothing was run
  opened.path(opened.runs[0]).mkdir()
  record.open_study(tmp_path, Study(**GRID), "f.py", ["num_epochs=7", "data.dir=moved"])
  with pytest.raises(UserError, match="num_epochs was 7, is 3 in 12 of 12 runs. Take another"):
    record.open_study(tmp_path, Study(**GRID), "f.py", [])
  with pytest.raises(UserError, match="run m1-sgd-seed1 is gone; run m1-sgd-seed2 is gone;"):
    record.open_study(tmp_path, Study(**GRID, seeds=(0,)), "f.py", ["num_epochs=7"])
