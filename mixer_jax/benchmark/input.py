"""What real data cost a step."""

import itertools
import statistics
from typing import Any, Callable, Iterator

import jax

from mixer_jax import steps
from mixer_jax.benchmark import fixed
from mixer_jax.benchmark.timing import take_turns
from mixer_jax.data import batches
from mixer_jax.experiment import Experiment


def measure(run: Experiment, rounds: int) -> dict[str, float]:
  """Steps per second with real data, and on one fixed batch on the device.

  The fixed batch is augmented and normalised once, before the clock starts; the
  real data are gathered and augmented in every step and differ in every window.

  Args:
    run: the experiment; one window of its steps is timed at a time.
    rounds: windows timed of each.

  Returns:
    `real`, `fixed` (median steps per second) and `ratio`, the median over rounds
    of real over fixed.
  """
  trainer = steps.EpochTrainer(run)
  train_steps, fixed_steps = steps.make_train_steps(run), fixed.make_steps(run, trainer.window)
  stream, batch, totals = windows(trainer), fixed.batch(run), fixed.no_totals(run)
  states = {name: steps.init_state(run) for name in ("real", "fixed")}

  def advance(name: str, program: Callable, *args: Any) -> None:
    states[name], done = program(states[name], totals, *args)
    jax.block_until_ready(done)

  seconds = take_turns(
    {
      "real": lambda: advance("real", train_steps, *next(stream)),
      "fixed": lambda: advance("fixed", fixed_steps, batch, None),
    },
    rounds,
  )
  rates = {name: trainer.window / statistics.median(s) for name, s in seconds.items()}
  return rates | {"ratio": ratio(seconds["fixed"], seconds["real"])}


def windows(trainer: steps.EpochTrainer) -> Iterator[batches.Window]:
  """The windows of one epoch after the other, without end."""
  for epoch in itertools.count(1):
    yield from trainer.feed.windows(epoch, trainer.window)


def ratio(numerators: list[float], denominators: list[float]) -> float:
  """Median of ratios taken round by round: neighbours in time share the machine's mood."""
  return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))
