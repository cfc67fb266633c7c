"""Runs that end when they get no better."""

import pytest

from mixer_jax import experiment
from mixer_jax.training import loop
from tests import children
from tests.conftest import waves


def stuck(**fields):
  """Nothing moves: the first evaluation is the best."""
  return waves(num_epochs=9, **{"optimizer.learning_rate": 0.0}, **fields)


@pytest.mark.thorough
def test_a_run_ends_after_so_many_evaluations_and_stays_ended(tmp_path, capsys):
  config = stuck(patience=2, checkpoint_epochs=100.0)
  loop.train(config, str(tmp_path))
  assert [row["step"] for row in children.rows(tmp_path)] == [8, 16, 24]
  assert children.latest(tmp_path) == 24
  said = capsys.readouterr().out
  assert "ended by patience: no better test error in 2 evaluations" in said
  assert "done: 24 steps, 3 epochs" in said
  before = (tmp_path / "metrics.jsonl").read_bytes()
  loop.train(config, str(tmp_path))
  said = capsys.readouterr().out
  assert "done: 24 steps" in said and "ended by" not in said
  assert (tmp_path / "metrics.jsonl").read_bytes() == before
  assert len(list(loop.evaluations(experiment.build(config)))) == 3


@pytest.mark.thorough
def test_a_signal_in_between_changes_nothing(tmp_path):
  config = stuck(patience=2)
  stopped = children.Child(config, tmp_path / "run", children.signal_at, (18,))
  assert stopped.wait() == 143, stopped.err
  assert "done: 24 steps" in children.trained(config, tmp_path / "run").out


@pytest.mark.parametrize(
  "best, ends", [([8, 8, 8], True), ([8, 8], False), ([8, 8, 24], False), ([8, 16, 16], False)]
)
def test_patience_starts_anew_with_a_better_evaluation(best, ends):
  run = experiment.build(stuck(patience=2))
  rows = [{"step": 8 * i, "test/best_step": step} for i, step in enumerate(best, 1)]
  assert loop.ended(run, rows[-1]["step"], rows) == ends
  assert not loop.ended(run, 8, rows)  # later rows are of a run that went back


def test_a_run_ends_at_the_first_evaluation_after_its_seconds(tmp_path, capsys):
  config = waves(num_epochs=9, max_seconds=1e-6)
  loop.train(config, str(tmp_path))
  assert [row["step"] for row in children.rows(tmp_path)] == [8]
  assert "ended by max_seconds" in capsys.readouterr().out
  config.max_seconds = 0.0
  assert len(list(loop.evaluations(experiment.build(config)))) == 9
