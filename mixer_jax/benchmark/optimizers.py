"""What a step of each optimizer takes, ours and kfac-jax's own."""

import dataclasses
import functools
import statistics
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

from mixer_jax import config as config_lib
from mixer_jax import steps
from mixer_jax.benchmark import fixed
from mixer_jax.benchmark.timing import peak_bytes, take_turns
from mixer_jax.experiment import Experiment

PERIODS = dict(factor_period=10, inverse_period=100)
# An update count at which K-FAC takes a step of this kind.
KFAC_KINDS = {"kfac inverses": 0, "kfac factors": 10, "kfac plain": 1}
_THEIR_STEPS = 5  # the inverse period of `kfac_jax.Optimizer`


class Cost(NamedTuple):
  """What a step of an optimizer takes.

  Attributes:
    seconds: median time of a step.
    ratio: to an SGD step, the median over rounds.
    peak_bytes: arguments, results and temporaries of its largest program.
  """

  seconds: float
  ratio: float
  peak_bytes: int


def measure(run: Experiment, rounds: int) -> dict[str, Cost]:
  """Times the steps of each optimizer on one fixed batch.

  K-FAC's three kinds of steps (plain, with factors, with factors and inverses)
  are timed apart and averaged with the weights of its periods.

  Args:
    run: gives the model, data and batch; its optimizer is replaced.
    rounds: steps timed of each kind.

  Returns:
    The cost of "sgd", "adam", "kfac", its kinds "kfac plain", "kfac factors" and
    "kfac inverses", and "kfac_jax.Optimizer" (its defaults, averaged over its
    inverse period of 5).
  """
  from mixer_jax.benchmark import peers

  batch, totals = fixed.batch(run), fixed.no_totals(run)
  candidates, peaks = {}, {}
  for name in ("sgd", "adam", "kfac"):
    config = run.config.copy_and_resolve_references()
    config.optimizer = optimizer_config(name)
    kinds = _kinds(dataclasses.replace(run, config=config), name, totals, batch)
    peak = peak_bytes(kinds[min(kinds)])
    candidates |= kinds
    peaks |= dict.fromkeys([*kinds, name], peak)
  their_step = peers.kfac_jax_step(run, batch)
  peaks["kfac_jax.Optimizer"] = peak_bytes(lambda: [their_step() for _ in range(_THEIR_STEPS)])
  candidates["kfac_jax.Optimizer"] = lambda: [their_step() for _ in range(_THEIR_STEPS)]
  times = take_turns(candidates, rounds)
  times["kfac_jax.Optimizer"] = [s / _THEIR_STEPS for s in times["kfac_jax.Optimizer"]]
  times["kfac"] = over_the_periods(times)
  return {
    name: Cost(
      statistics.median(seconds),
      statistics.median(own / sgd for own, sgd in zip(seconds, times["sgd"])),
      peaks[name],
    )
    for name, seconds in times.items()
  }


def optimizer_config(name: str) -> Any:
  """The config of an optimizer as it is measured."""
  return config_lib.optimizer(name, learning_rate=1e-4, **(PERIODS if name == "kfac" else {}))


def over_the_periods(times: dict[str, list[float]]) -> list[float]:
  """Seconds of an average K-FAC step in each round, from those of `KFAC_KINDS`."""
  return [
    plain
    + (factors - plain) / PERIODS["factor_period"]
    + (inverses - factors) / PERIODS["inverse_period"]
    for plain, factors, inverses in zip(
      times["kfac plain"], times["kfac factors"], times["kfac inverses"]
    )
  ]


def _kinds(run, name, totals, batch) -> dict[str, Callable[[], None]]:
  """The kinds of steps of one optimizer, told apart by the update count."""
  state, program = steps.init_state(run), fixed.make_steps(run)

  def step(count: int) -> None:
    nonlocal state
    state, done = program(state, totals, batch, jnp.full(1, count, jnp.int32))
    jax.block_until_ready(done)

  kinds = KFAC_KINDS if name == "kfac" else {name: 1}
  return {kind: functools.partial(step, count) for kind, count in kinds.items()}
