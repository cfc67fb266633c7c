"""How many steps a call of the compiled program should make."""

import statistics
from typing import Callable

import jax

from mixer_jax import steps
from mixer_jax.benchmark import fixed
from mixer_jax.benchmark.timing import take_turns
from mixer_jax.experiment import Experiment

# Steps in a call. Each divides the last, which is what is timed.
SIZES = (1, 4, 16)


def measure(run: Experiment, rounds: int) -> dict[int, tuple[float, float]]:
  """Times the same steps on one batch, in calls of one step and in longer ones.

  The host waits for the last call alone, as in training.

  Args:
    run: the experiment. The states of all candidates live at the same time.
    rounds: how often each candidate is timed after a warm-up.

  Returns:
    By the number of steps in a call: median seconds of a step, and these over those
    of calls of one step, median of the ratios of each round.
  """
  seconds = take_turns({size: _caller(run, size) for size in SIZES}, rounds)
  return {
    size: (
      statistics.median(own) / SIZES[-1],
      statistics.median(s / alone for s, alone in zip(own, seconds[SIZES[0]], strict=True)),
    )
    for size, own in seconds.items()
  }


def _caller(run: Experiment, size: int) -> Callable[[], None]:
  program, batch, totals = fixed.make_steps(run, size), fixed.batch(run), fixed.no_totals(run)
  state = steps.init_state(run)

  def call():
    nonlocal state
    for _ in range(SIZES[-1] // size):
      state, done = program(state, totals, batch, None)
    jax.block_until_ready(done)

  return call
