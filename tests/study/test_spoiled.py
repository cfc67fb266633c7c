"""The files of a study, spoiled: each is named in one line."""

import json

import pytest

from mixer_jax.study import Published, Study, record
from tests.rundir.spoiled import NONSENSE, line_of
from tests.study.grid import GRID


@pytest.fixture
def opened(tmp_path):
  study = Study(**GRID, published={("m1", "sgd"): Published(60.5)})
  return record.open_study(tmp_path, study, "f.py", [])


@pytest.mark.parametrize("text", NONSENSE)
@pytest.mark.first(3)
def test_the_plan(opened, text):
  path = opened.directory / "study.json"
  path.write_text(text)
  assert str(path) in line_of(record.load, opened.directory)
  assert str(path) in line_of(record.open_study, opened.directory, Study(**GRID), "f.py", [])


def test_any_part_of_the_plan(opened):
  path = opened.directory / "study.json"
  good = path.read_text()

  def refused(change):
    plan = json.loads(good)
    change(plan)
    path.write_text(json.dumps(plan))
    return line_of(record.load, opened.directory)

  for part in json.loads(good):
    assert f"{path} is not the plan of a study" in refused(lambda plan: plan.pop(part))
    assert f"{path} is not the plan of a study" in refused(lambda plan: plan.update({part: 3}))
  for group, key in (("runs", 0), ("published", "m1-sgd")):
    for part in json.loads(good)[group][key]:
      assert f"{path} is not the plan" in refused(lambda plan: plan[group][key].pop(part))
      line = refused(lambda plan: plan[group][key].update({part: [[]]}))
      assert f"{path} is not the plan" in line
  line = refused(lambda plan: plan["runs"][0]["config"].update(batch_size="many"))
  assert "run m1-sgd-seed0: batch_size is 'many'" in line


@pytest.mark.parametrize("text", NONSENSE)
@pytest.mark.first(6)
def test_outcomes(opened, text):
  run = opened.runs[0]
  opened.path(run).mkdir()
  path = opened.path(run) / "outcome.json"
  path.write_text(text)
  assert str(path) in line_of(opened.state, run)


def test_a_finished_run_without_its_metrics(opened):
  run = opened.runs[0]
  opened.path(run).mkdir()
  metrics = opened.path(run) / "metrics.jsonl"
  rows = [json.dumps({"step": step, "epoch": step / 10, "seconds": 1.0}) for step in (10, 20)]
  metrics.write_text("\n".join(rows) + "\n")
  opened.finish(run)
  assert opened.state(run) == ("done", "epoch 2 of 3", "")
  metrics.write_text(rows[0] + "\n")
  assert f"{metrics} ends at step 10; the run was done at step 20" in line_of(opened.state, run)
  metrics.unlink()
  assert "ends at step 0" in line_of(opened.state, run)
