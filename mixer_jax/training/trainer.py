"""Training from any step to the next evaluation or checkpoint, fed window by window."""

import dataclasses
import math
import time
from typing import Any, Callable, Iterator

import jax
from tqdm import tqdm

from mixer_jax.data import buckets, feed
from mixer_jax.experiment import Experiment
from mixer_jax.optimizers import numbers
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.runtime import processes
from mixer_jax.tasks import metrics as metrics_lib
from mixer_jax.training import nonfinite
from mixer_jax.training import step as step_lib
from mixer_jax.training.state import TrainState, without_metrics


def steps_per_dispatch(mesh: jax.sharding.Mesh) -> int:
  """Steps per call where the config does not say: on a CPU calls are cheap and loops are slow."""
  return 1 if mesh.devices.flat[0].platform == "cpu" else 16


def window(run: Experiment, hosts: int) -> int:
  """Steps in a call: a divisor of the steps between evaluations and checkpoints.

  `hosts` share the reading of a batch.
  """
  clock, order, train = run.clock, run.order, run.datasets["train"]
  if isinstance(order, buckets.BucketOrder):
    return 1  # batches of several sizes do not stack
  default = feed.fitting(train, steps_per_dispatch(run.mesh), order.batch_size // hosts)
  wanted = run.config.steps_per_dispatch or default
  together = math.gcd(clock.eval_every, clock.checkpoint_every, clock.num_steps)
  return max(w for w in range(1, min(wanted, together) + 1) if together % w == 0)


class Trainer:
  """Feeds the steps of a run, from a state on, through the compiled program.

  Attributes:
    run: the experiment.
    state: after the last step made.
    step: its number, known without waiting for the device.
    seconds: of training since the last evaluation, without compilation.
    window: steps in a call, see `window`.
  """

  def __init__(self, run: Experiment, state: TrainState, seconds: float = 0.0):
    self.run = run
    self._programs: dict[Any, Callable] = {}  # by shapes of data
    self._order = run.order
    batched = mesh_lib.batched(run.mesh)
    self._feed = feed.Feed(run.datasets["train"], self._order, batched, run.config.seed)
    self.window = window(run, jax.process_count())
    self.reset(state, seconds)

  def reset(self, state: TrainState, seconds: float) -> None:
    self.state, self.step, self.seconds = state, int(state.step), seconds
    self._watch = nonfinite.Watch(self.run, int(state.failed))
    if (restores := int(state.restores)) != self._order.restores:
      self._order = dataclasses.replace(self._order, restores=restores)
      self._feed.reorder(self._order)
    self._windows = self._feed.windows(self._planned(self.step))

  def _planned(self, step: int) -> Iterator[tuple[int, int]]:
    """Yields the first step and the number of steps of each call; a call ends at a multiple of the window."""
    while step < self.run.clock.num_steps:
      count = self.window - step % self.window
      yield step, count
      step += count

  def advance(self, stop: Callable[[], bool] = lambda: False) -> None:
    """Trains to the next evaluation or checkpoint, or until `stop` says so between two calls.

    Raises `nonfinite.Nonfinite` for a step that was not finite, if the config does not skip it.
    """
    clock, begin = self.run.clock, self.step
    next_of = lambda every: begin - begin % every + every
    end = min(clock.num_steps, next_of(clock.eval_every), next_of(clock.checkpoint_every))
    start, compiling = time.perf_counter(), 0.0
    hidden = None if processes.is_first() else True  # tqdm takes None as: hide but on a terminal
    shown = dict(desc="step", unit="step", leave=False, disable=hidden)
    with tqdm(total=end, initial=begin, **shown) as bar:
      while self.step < end:
        args = (self.state, *next(self._windows))
        sizes = tuple(x.shape for x in jax.tree.leaves(args[1:3]))  # of examples and rows
        if sizes not in self._programs:
          print("compiling a step ... ", end="", flush=True)
          before, program = time.perf_counter(), step_lib.make_train_steps(self.run)
          self._programs[sizes] = program.lower(*args).compile()
          compiling += (took := time.perf_counter() - before)
          print(f"compiled in {took:.1f} s", flush=True)
        self.state, checks = self._programs[sizes](*args)
        self._watch.add(self.step, checks)
        count = len(checks)
        self.step += count
        bar.update(count)
        if self.step < end and stop():
          break
      self._watch.read()
    self.seconds += time.perf_counter() - start - compiling

  def report(self) -> dict[str, float]:
    """The row of training metrics since the last report (see docs/running.md); new sums begin.

    Steps skipped and restores are those of the whole run, the learning rate that of the last step.
    """
    run, state, config, every = self.run, self.state, self.run.config, self.run.clock.eval_every
    row = {"step": self.step, "epoch": run.clock.epoch(self.step)}
    means = metrics_lib.values(state.metrics)
    row |= {f"train/{name}": value for name, value in means.items() if value > -math.inf}
    row |= {"train/skipped": int(state.skipped)} if config.on_nonfinite == "skip" else {}
    row |= {"restores": int(state.restores)} if config.on_nonfinite == "restore" else {}
    steps = range((self.step - 1) // every * every, self.step)
    given = numbers.given(state.opt_state, run.multiplier)
    row["learning_rate"] = next(x for name, x in given.items() if "learning_rate" in name)
    row |= numbers.chosen(state.opt_state)
    row["examples_per_second"] = self._order.examples(steps) / max(self.seconds, 1e-9)
    row["seconds"] = self.seconds
    self.state, self.seconds = without_metrics(run, state), 0.0
    return row
