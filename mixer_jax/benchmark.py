"""Measures, in one run, what a figure is compared with and the figure itself.

  python -m mixer_jax.benchmark input --config=configs/quickstart.py
  python -m mixer_jax.benchmark optimizers --config=configs/quickstart.py

Machines are noisy: the candidates take turns, and medians are reported.
"""

import dataclasses
import functools
import statistics
import time
from typing import Any, Callable, NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
from ml_collections import config_flags
import optax

from mixer_jax import cli, experiment, flops, optim, sharding, train
from mixer_jax import config as config_lib
from mixer_jax.data import batches
from mixer_jax.report import console


def take_turns(candidates: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
  """Seconds of each candidate in each round, run in turn after a warm-up round."""
  seconds = {name: [] for name in candidates}
  for i in range(rounds + 1):
    for name, call in candidates.items():
      start = time.perf_counter()
      call()
      if i:
        seconds[name].append(time.perf_counter() - start)
  return seconds


def input_cost(run: experiment.Experiment, rounds: int) -> dict[str, float]:
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
  batch = fixed_batch(run)

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
  rates = {name: trainer.window / statistics.median(s) for name, s in seconds.items()}
  # Neighbours in time share the machine's mood: the ratio is taken round by round.
  ratio = statistics.median(f / r for f, r in zip(seconds["fixed"], seconds["real"]))
  return rates | {"ratio": ratio}


def fixed_batch(run: experiment.Experiment) -> Any:
  """An augmented batch on the devices."""
  split, size = run.dataset.train, run.config.batch_size
  images, labels = jnp.asarray(split.images[:size]), jnp.asarray(split.labels[:size])
  batch = run.task.batch(jax.random.key(0), images, labels, train=True)
  return jax.device_put(batch, sharding.batched(run.mesh))


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


_PERIODS = dict(factor_period=10, inverse_period=100)
_THEIR_STEPS = 5  # the inverse period of `kfac_jax.Optimizer`


def optimizer_costs(run: experiment.Experiment, rounds: int) -> dict[str, Cost]:
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
  from mixer_jax import peers

  batch = fixed_batch(run)
  totals = jax.device_put(run.task.train_metrics.empty(), sharding.replicated(run.mesh))
  candidates, peaks = {}, {}
  for name, options in (("sgd", {}), ("adam", {}), ("kfac", _PERIODS)):
    config = run.config.copy_and_resolve_references()
    config.optimizer = config_lib.optimizer(name, learning_rate=1e-4, **options)
    steps = _steps(dataclasses.replace(run, config=config), name, totals, batch)
    peak = peak_bytes(steps[min(steps)])
    candidates |= steps
    peaks |= dict.fromkeys([*steps, name], peak)
  their_step = peers.kfac_jax_step(run, batch)
  peaks["kfac_jax.Optimizer"] = peak_bytes(lambda: [their_step() for _ in range(_THEIR_STEPS)])
  candidates["kfac_jax.Optimizer"] = lambda: [their_step() for _ in range(_THEIR_STEPS)]
  times = take_turns(candidates, rounds)
  times["kfac_jax.Optimizer"] = [s / _THEIR_STEPS for s in times["kfac_jax.Optimizer"]]
  times["kfac"] = [
    plain
    + (factors - plain) / _PERIODS["factor_period"]
    + (inverses - factors) / _PERIODS["inverse_period"]
    for plain, factors, inverses in zip(
      times["kfac plain"], times["kfac factors"], times["kfac inverses"]
    )
  ]
  return {
    name: Cost(
      statistics.median(seconds),
      statistics.median(own / sgd for own, sgd in zip(seconds, times["sgd"])),
      peaks[name],
    )
    for name, seconds in times.items()
  }


def _steps(run, name, totals, batch) -> dict[str, Callable[[], None]]:
  """The kinds of steps of one optimizer, told apart by the update count."""
  state = train.init_state(run)

  @functools.partial(jax.jit, donate_argnums=0)
  def update(state, count):
    counted = optax.tree.set(state.opt_state, count=count)
    return train.update(run, state.replace(opt_state=counted), totals, batch)

  def step(count: int) -> None:
    nonlocal state
    state, done = update(state, jnp.asarray(count, jnp.int32))
    jax.block_until_ready(done)

  if name != "kfac":
    return {name: lambda: step(1)}
  kinds = {"kfac inverses": 0, "kfac factors": 10, "kfac plain": 1}
  return {kind: functools.partial(step, count) for kind, count in kinds.items()}


def peak_bytes(call: Callable[[], Any]) -> int:
  """Memory of the largest program that a first call compiles, as XLA plans it."""
  client = jax.devices()[0].client
  before = client.live_executables()  # held, so that no new one takes an old one's id
  known = {id(e) for e in before}
  call()
  plans = [e.get_compiled_memory_stats() for e in client.live_executables() if id(e) not in known]
  return max(
    p.argument_size_in_bytes + p.output_size_in_bytes - p.alias_size_in_bytes + p.temp_size_in_bytes
    for p in plans
  )


def _optimizers(argv: list[str]) -> None:
  del argv
  config = cli.checked_config(flags.FLAGS.config)
  console.print_devices()
  run = experiment.build(config)
  problem = run.problem
  blocks = optim.kfac_blocks(problem.predict, problem.params, problem.batch)
  predicted = flops.step_costs(blocks, config.batch_size).ratio(*_PERIODS.values())
  costs = optimizer_costs(run, flags.FLAGS.rounds)
  print(f"{config.model.name}, batch {config.batch_size}, {config.model.dtype or 'float32'}")
  for name, cost in costs.items():
    print(
      f"{name:20} {cost.seconds:9.4f} s/step  {cost.ratio:6.2f} x SGD"
      f"  {cost.peak_bytes / 2**20:9.0f} MiB"
    )
  measured, theirs = costs["kfac"].ratio, costs["kfac_jax.Optimizer"].ratio
  print(f"K-FAC predicted from FLOPs {predicted:.2f} x SGD; measured {measured:.2f}")
  print(f"kfac_jax.Optimizer takes {theirs / measured:.2f} times K-FAC's step")


def _input(argv: list[str]) -> None:
  del argv
  config = cli.checked_config(flags.FLAGS.config)
  console.print_devices()
  rates = input_cost(experiment.build(config), flags.FLAGS.rounds)
  print(f"{config.model.name}, {config.optimizer.name}, batch {config.batch_size}")
  print(f"real data    {rates['real']:.2f} steps/s")
  print(f"fixed batch  {rates['fixed']:.2f} steps/s")
  print(f"ratio        {rates['ratio']:.3f}")


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", None, "Config file.")
  flags.DEFINE_integer("rounds", 20, "Timed rounds of each candidate.", lower_bound=1)
  cli.run_commands({"input": _input, "optimizers": _optimizers})
