"""Calls of one and of many steps are compared over the same steps."""

import pytest

from benchmarks import dispatch, steps
from mixer_jax import experiment


@pytest.mark.slow
def test_every_candidate_makes_the_same_steps(tiny_config, monkeypatch):
  tiny_config.model.num_blocks = 1
  real, made = steps.Fixed, {}

  def kept(run, batch, length):
    made[length] = real(run, batch, length)
    return made[length]

  monkeypatch.setattr(steps, "Fixed", kept)
  monkeypatch.setattr(dispatch, "SIZES", (1, 4))
  found = dispatch.measure(experiment.build(tiny_config), rounds=1)
  # A warm-up and a round of 4 each.
  assert {length: int(program.state.step) for length, program in made.items()} == {1: 8, 4: 8}
  assert all(seconds > 0.0 and ratio > 0.0 for seconds, ratio in found.values())
  assert found[1][1] == 1.0
