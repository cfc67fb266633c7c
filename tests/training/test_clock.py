"""The clock is the step: evaluations and checkpoints by steps and by epochs, and stops between."""

import json
import types

import pytest

from mixer_jax import experiment
from mixer_jax.training import loop
from mixer_jax.training.checkpoint import Checkpoints
from tests import children
from tests.conftest import waves


@pytest.mark.parametrize(
  "fields, evaluated, saved",
  [
    (dict(num_epochs=2), [8, 16], [8, 16]),
    (dict(num_epochs=2, eval_epochs=0.5, checkpoint_epochs=2.0), [4, 8, 12, 16], [16]),
    (dict(num_epochs=1, eval_epochs=2.0), [8], [8]),
    (dict(num_steps=7, eval_steps=3, checkpoint_steps=2), [3, 6, 7], [2, 4, 6, 7]),
    (dict(num_steps=20, eval_steps=10, checkpoint_epochs=1.0), [10, 20], [8, 16, 20]),
  ],
)
def test_evaluations_and_checkpoints(fields, evaluated, saved):
  clock = experiment.build(waves(**fields)).clock
  steps = range(1, clock.num_steps + 1)
  assert [step for step in steps if clock.evaluates(step)] == evaluated
  assert [step for step in steps if clock.saves(step)] == saved
  assert clock.epoch(12) == 1.5


def test_experiments_of_a_config_that_changes_between_them():
  config, runs = waves(), []
  for config.num_epochs in (1, 2, 3):
    runs.append(experiment.build(config))
  assert [run.clock.num_steps for run in runs] == [8, 16, 24]


def keep_all(path):
  """In a child: notes the step of every checkpoint."""
  save = Checkpoints.save

  def save_and_note(self, step, *args, **kwargs):
    with open(path, "a") as file:
      file.write(f"{step}\n")
    save(self, step, *args, **kwargs)

  Checkpoints.save = save_and_note


@pytest.mark.thorough
def test_a_run_by_steps_is_stopped_between_and_goes_on(tmp_path):
  """Steps 5, 10, 12 are evaluated, 4, 8, 12 saved; a better evaluation is saved, too."""
  config = waves("adam", num_steps=12, eval_steps=5, checkpoint_steps=4)
  whole, parts, notes = tmp_path / "whole", tmp_path / "parts", tmp_path / "notes"
  children.trained(config, whole, keep_all, (str(notes),))
  rows = children.rows(whole)
  assert [(row["step"], row["epoch"]) for row in rows] == [(5, 0.625), (10, 1.25), (12, 1.5)]
  assert [row["test/best_step"] for row in rows] == [5, 10, 12]  # it learns
  assert notes.read_text().split() == ["4", "5", "8", "10", "12"]
  config.steps_per_dispatch = 3  # the gcd of 4, 5 and 12 allows but one
  stopped = children.Child(config, parts, children.signal_at, (7,))
  while stopped.wait() == 143:
    if children.latest(parts) >= 11:
      break
    stopped = children.Child(config, parts, children.signal_at, (children.latest(parts) + 2,))
  assert stopped.wait() in (0, 143), stopped.err
  children.trained(config, parts)
  children.assert_same_run(config, parts, whole)


@pytest.mark.thorough
def test_windows_end_at_evaluations_and_checkpoints(tmp_path):
  """Stopped in windows of one step, a run goes on in windows of four, and the reverse."""
  whole = tmp_path / "whole"
  children.trained(waves(steps_per_dispatch=1), whole)
  for before, after in ((1, 4), (4, 1)):
    path = tmp_path / f"{before}-{after}"
    stopped = children.Child(waves(steps_per_dispatch=before), path, children.signal_at, (10,))
    assert stopped.wait() == 143, stopped.err
    assert children.latest(path) == {1: 10, 4: 12}[before]
    children.trained(waves(steps_per_dispatch=after), path)
    for x, y in zip(children.rows(whole), children.rows(path), strict=True):
      assert x == pytest.approx(y, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("there, step, told", [(0, 9, 8), (4, 12, 12), (8, 9, 0), (0, 3, 0)])
def test_lost_rows_of_evaluations_are_told(there, step, told, tmp_path, capsys):
  run = types.SimpleNamespace(clock=experiment.Clock(5, 12, 4, 1))
  rows = [{"step": at, "epoch": at / 5, "seconds": 1.0} for at in range(4, there + 1, 4)]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  loop._tell_lost(run, tmp_path, step)
  found = f"rows of {(told - there) // 4} evaluations are lost, steps {there + 4} to {told}"
  assert (f"metrics.jsonl: {found}" in capsys.readouterr().out) == bool(told)
