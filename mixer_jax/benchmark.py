"""Measures, in one run, what a figure is compared with and the figure itself.

  python -m mixer_jax.benchmark input --config=configs/quickstart.py

Machines are noisy: the candidates take turns, and ratios are of medians.
"""

import functools
import statistics
import time
from typing import Any, Callable

from absl import flags
import jax
import jax.numpy as jnp
from ml_collections import config_flags

from mixer_jax import cli, experiment, report, sharding, train
from mixer_jax.data import batches


def take_turns(candidates: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
  """Median seconds of each candidate, run in turn after one warm-up round."""
  seconds = {name: [] for name in candidates}
  for i in range(rounds + 1):
    for name, call in candidates.items():
      start = time.perf_counter()
      call()
      if i:
        seconds[name].append(time.perf_counter() - start)
  return {name: statistics.median(times) for name, times in seconds.items()}


def input_cost(run: experiment.Experiment, rounds: int) -> dict[str, float]:
  """Steps per second with real data, and on one fixed batch on the device.

  The fixed batch is augmented and normalised once, before the clock starts; the
  real data are gathered and augmented in every step and differ in every window.

  Args:
    run: the experiment; one window of its steps is timed at a time.
    rounds: windows timed of each.

  Returns:
    `real`, `fixed` (steps per second) and `ratio`, real over fixed.
  """
  config, everywhere = run.config, sharding.replicated(run.mesh)
  trainer = train.EpochTrainer(run)
  train_steps = train.make_train_steps(run)
  totals = jax.device_put(run.task.train_metrics.empty(), everywhere)
  num_examples = len(run.dataset.train.labels)

  def windows():
    for epoch in range(1, 1_000_000):
      indices = batches.train_indices(config.seed, epoch, num_examples, config.batch_size)
      yield from trainer.feed.windows(indices, trainer.window)

  stream = windows()
  split = run.dataset.train
  batch = run.task.batch(
    jax.random.key(0),
    jnp.asarray(split.images[: config.batch_size]),
    jnp.asarray(split.labels[: config.batch_size]),
    train=True,
  )
  batch = jax.device_put(batch, sharding.batched(run.mesh))

  @functools.partial(jax.jit, donate_argnums=0)
  def fixed_steps(state, totals, batch):
    step = lambda carry, _: (train.update(run, *carry, batch), None)
    return jax.lax.scan(step, (state, totals), length=trainer.window)[0]

  states = {name: train.init_state(run) for name in ("real", "fixed")}

  def advance(name: str, program: Callable, *args: Any) -> None:
    states[name], done = program(states[name], totals, *args)
    jax.block_until_ready(done)

  seconds = take_turns(
    {
      "real": lambda: advance("real", train_steps, *next(stream)),
      "fixed": lambda: advance("fixed", fixed_steps, batch),
    },
    rounds,
  )
  rates = {name: trainer.window / s for name, s in seconds.items()}
  return rates | {"ratio": rates["real"] / rates["fixed"]}


def _input(argv: list[str]) -> None:
  del argv
  config = cli.checked_config(flags.FLAGS.config)
  report.print_devices()
  rates = input_cost(experiment.build(config), flags.FLAGS.rounds)
  print(f"{config.model.name}, {config.optimizer.name}, batch {config.batch_size}")
  print(f"real data    {rates['real']:.2f} steps/s")
  print(f"fixed batch  {rates['fixed']:.2f} steps/s")
  print(f"ratio        {rates['ratio']:.3f}")


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", None, "Config file.")
  flags.DEFINE_integer("rounds", 10, "Timed rounds.", lower_bound=1)
  cli.run_commands({"input": _input})
