"""The best number of steps in a call of the compiled program."""

import functools
import statistics
from typing import Any

from benchmarks import steps
from benchmarks.timing import ratio, take_turns
from mixer_jax import experiment
from mixer_jax.experiment import Experiment
from mixer_jax.runtime import cli, devices

# Steps in a call. Each divides the last, the number of steps that is timed.
SIZES = (1, 4, 16)


def measure(run: Experiment, rounds: int) -> dict[int, tuple[float, float]]:
  """Times the same steps on one batch, in calls of one step and in longer ones.

  Args:
    run: the experiment. The states of all candidates live at the same time.
    rounds: how often each candidate is timed after a warm-up.

  Returns:
    By the number of steps in a call: median seconds of a step, and its ratio to calls of
    one step.
  """
  batch = steps.batch(run)
  candidates = {
    size: functools.partial(steps.Fixed(run, batch, size).start(), calls=SIZES[-1] // size)
    for size in SIZES
  }
  seconds = take_turns(candidates, rounds)
  return {
    size: (statistics.median(own) / SIZES[-1], ratio(own, seconds[SIZES[0]]))
    for size, own in seconds.items()
  }


def main(options: Any) -> None:
  config = cli.checked_config(options.config)
  devices.print_line()
  print(f"{steps.title(config)}, {config.optimizer.name}")
  for size, (seconds, over_one) in measure(experiment.build(config), options.rounds).items():
    print(f"{size:3} steps a call  {seconds:9.4f} s/step  {over_one:6.3f} x one step a call")
