"""SIGKILL at random instants, also while a checkpoint is written; then as if nothing had been.

  python -m pytest -m slow -n 0 -s tests/training/test_kills.py

kills each optimizer's run at least 20 times and prints where the kills fell.
"""

import collections
import random
import time

import pytest

from tests import children
from tests.conftest import optimizer_of, waves

KILLS_A_RUN = 7


@pytest.mark.thorough
def test_a_run_that_is_killed_a_few_times_ends_as_if_it_had_not_been(tmp_path):
  kill_again_and_again(waves("adam", num_epochs=5), 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adam", "kfac", "graft"])
def test_a_mixer_that_is_killed_again_and_again(name, tiny_config, tmp_path):
  tiny_config.optimizer = optimizer_of(name)
  tiny_config.num_epochs, tiny_config.model.num_blocks = 5, 1
  kill_again_and_again(tiny_config, 20, tmp_path)


def kill_again_and_again(config, kills, tmp_path):
  whole = tmp_path / "whole"
  children.trained(config, whole)  # fills the cache of programs
  start = time.monotonic()
  children.trained(config, tmp_path / "again")
  life = time.monotonic() - start
  children.assert_same_run(config, whole, tmp_path / "again")

  rng, fell, runs = random.Random(0), collections.Counter(), 0
  while fell.total() < kills:
    runs += 1
    path = tmp_path / f"run{runs}"
    for number in range(min(KILLS_A_RUN, kills - fell.total())):
      if not (where := kill(config, path, rng, life, at_a_save=number % 2 == 1)):
        life *= 0.8  # the machine has become faster
        break
      fell[where] += 1
    children.trained(config, path)
    children.assert_same_run(config, whole, path)
  print(f"\n{config.optimizer.name}: {fell.total()} kills in {runs} runs: {dict(fell)}")


def kill(config, path, rng, life, at_a_save):
  """Starts the run, or goes on with it, and kills it.

  Args:
    config: of the run.
    path: of the run.
    rng: draws the instant.
    life: seconds of a process that is left alone.
    at_a_save: wait for a temporary directory of Orbax, and then no longer than a save
      takes; otherwise any instant of a process's life is as likely as any other.

  Returns:
    The place where it fell; None: the process had ended before.
  """
  before = unfinished(path)  # left by the kill before this one
  child = children.Child(config, path)
  if at_a_save:
    while child.alive and unfinished(path) <= before:
      time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.15))
  else:
    time.sleep(rng.uniform(0, life))
  if not child.alive:
    return None
  child.kill()
  if not unfinished(path) <= before:
    return "while a checkpoint was written"
  return "between checkpoints" if "compiled in" in child.out else "before the first step"


def unfinished(path):
  return {p.name for p in path.glob("checkpoints/*.orbax-checkpoint-tmp*")}
