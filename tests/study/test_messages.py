"""Mistakes in a study, its overrides and its files: each message names the thing."""

import json

import pytest

from mixer_jax.errors import UserError
from mixer_jax.study import Published, Study, Tuning, plan, record
from tests.study.grid import GRID, errors, tiny

RATE = [{"optimizer.learning_rate": 0.1}]
TUNING = Tuning({"sgd": RATE, "adam": RATE})
RATES = {"sgd": 0.1}


def missing(model, optimizer):
  RATES[optimizer]
  return tiny(model, optimizer)


def two_tasks(model, optimizer):
  return tiny(model, optimizer) if model == "m1" else errors(optimizer)


@pytest.mark.parametrize(
  "fields, assignments, named",
  [
    (dict(seeds=(0, 0)), [], "'m1-sgd-seed0'"),
    (dict(axes={"model": ("m/1",), "optimizer": ("sgd",)}), [], "'m/1-sgd-seed0'"),
    (dict(published={("m1", "lion"): Published(1.0)}), [], "'lion'"),
    (dict(notes="A note."), [], "notes 'A note.'"),
    (dict(published_at="first"), [], "published_at 'first'"),
    (dict(lines=("learning_rate",)), [], "'learning_rate'"),
    (dict(target_of="lion"), [], "target_of 'lion'"),
    (dict(tuning=Tuning({"lion": RATE})), [], "'lion'"),
    (dict(tuning=Tuning({"sgd": RATE, "adam": 2 * RATE})), [], "'adam': 2"),
    (dict(tuning=Tuning(TUNING.candidates, shared=("size",))), [], "'size'"),
    (dict(config=lambda model, optimizer: RATES[optimizer]), [], "the run m1-sgd-seed0"),
    (dict(config=missing), [], "the run m1-adam-seed0"),
    (dict(config=two_tasks), [], "image_classification and tests.study.grid:Errors"),
    ({}, ["num_epochs=2", "epochs=3"], "epochs=3"),
    ({}, ["num_epochs=few"], "num_epochs.*few"),
    ({}, ["num_epochs"], "'num_epochs'"),
    ({}, ["m3:num_epochs=3"], "m3:num_epochs=3"),
    ({}, ["num_epochs=0"], "run m1-sgd-seed0: num_epochs is 0"),
    ({}, ["seed=7"], "the seed"),
    (dict(tuning=TUNING), ["optimizer.learning_rate=1.0"], "optimizer.learning_rate"),
    (dict(tuning=TUNING), ["data.train_split=train"], "data.train_split"),
  ],
)
def test_a_study_that_cannot_be_planned(fields, assignments, named, tmp_path):
  with pytest.raises(UserError, match=named):
    record.open_study(tmp_path, Study(**GRID | fields), "f.py", assignments)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "name, text, named",
  [
    ("none.py", None, "none.py"),
    ("file.py", "study = None", "get_study"),
    ("file.py", "get_study = lambda: 3", "get_study.* int"),
    ("a:b.py", "get_study = lambda: 1 / 0", "':'"),  # runs are started by --config=FILE:RUN
    ("file.py", "get_study = lambda: 1 / 0", "get_study: ZeroDivisionError"),
  ],
)
def test_a_file_that_holds_no_study(name, text, named, tmp_path):
  if text:
    (tmp_path / name).write_text(text)
  with pytest.raises(UserError, match=named):
    plan.load(str(tmp_path / name))


@pytest.fixture
def opened(tmp_path):
  found = record.open_study(tmp_path, Study(**GRID), "f.py", [])
  found.path(found.runs[0]).mkdir()
  return found


@pytest.mark.parametrize("text", ["", "{", "[]", '{"runs": [{}]}'])
@pytest.mark.parametrize("name", ["study.json", "m1-sgd-seed0/outcome.json"])
def test_a_spoiled_file(opened, name, text):
  path = opened.directory / name
  path.write_text(text)
  with pytest.raises(UserError, match=str(path)):
    record.load(opened.directory).state(opened.runs[0])


def test_a_finished_run_without_its_last_metrics(opened):
  run = opened.runs[0]
  metrics = opened.path(run) / "metrics.jsonl"
  rows = [json.dumps({"step": step, "epoch": step / 10, "seconds": 1.0}) for step in (10, 20)]
  metrics.write_text("\n".join(rows) + "\n")
  opened.finish(run)
  assert opened.state(run) == ("done", "epoch 2 of 3", "")
  metrics.write_text(rows[0] + "\n")
  with pytest.raises(UserError, match=f"{metrics} ends at step 10"):
    opened.state(run)


def test_a_run_that_the_study_does_not_have(tmp_path):
  for call in (Study(**GRID).run_config, Study(**GRID).select):
    with pytest.raises(UserError, match="'m3-sgd-seed0'"):
      call("m3-sgd-seed0")
  with pytest.raises(UserError, match="study.json"):
    record.load(tmp_path)
