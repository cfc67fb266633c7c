"""Calls of one and of many steps are compared over the same steps."""

from mixer_jax import experiment
from mixer_jax.benchmark import dispatch, fixed


def test_every_candidate_makes_the_same_steps(tiny_config, monkeypatch):
  real, made = fixed.make_steps, {}

  def counting(run, length):
    program = real(run, length)

    def counted(state, *args):
      new, done = program(state, *args)
      made[length] = int(new.step)
      return new, done

    return counted

  monkeypatch.setattr(fixed, "make_steps", counting)
  monkeypatch.setattr(dispatch, "SIZES", (1, 4))
  found = dispatch.measure(experiment.build(tiny_config), rounds=1)
  assert made == {1: 8, 4: 8}  # a warm-up and a round of 4 each
  assert all(seconds > 0.0 and ratio > 0.0 for seconds, ratio in found.values())
  assert found[1][1] == 1.0
