"""Time and memory of a step of each optimizer, ours and kfac-jax's own."""

import collections
import dataclasses
import functools
import math
import statistics
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import jax
import ml_collections
import optax

from benchmarks import flops, steps
from benchmarks.timing import peak_bytes, ratio, take_turns
from mixer_jax import config as config_lib
from mixer_jax import experiment, optim, optimizers
from mixer_jax import options as options_lib
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.optim.curvature import library
from mixer_jax.runtime import cli, devices
from mixer_jax.study import plan

PERIODS = dict(factor_period=10, inverse_period=100)
_IN_BASIS = dict(factor_period=10, basis_period=100)
_PERIODS = {"kfac": PERIODS, "kfac_adam": _IN_BASIS, "kfac_muon": _IN_BASIS}
_PLAIN = {"plain": (1, 1.0)}  # the kinds of an optimizer that renews nothing
_THEIRS = "kfac_jax.Optimizer"
_THEIR_STEPS = 5  # the inverse period of `kfac_jax.Optimizer`


class Cost(NamedTuple):
  """The cost of a step of an optimizer."""

  seconds: float  # median time of a step
  ratio: float  # to an SGD step, the median over rounds
  peak_bytes: int  # arguments, results and temporaries of its largest program


def measure(run: Experiment, rounds: int, names: Sequence[str]) -> dict[str, Cost]:
  """Times the steps of each optimizer on one fixed batch.

  Args:
    run: gives the model, data and batch; its optimizer is replaced.
    rounds: steps timed of each kind.
    names: of optimizers; "sgd" among them, and perhaps "kfac_jax.Optimizer" (its defaults,
      averaged over its inverse period of 5).

  Returns:
    See `compare`; ratios are to "sgd".
  """
  runs = {}
  for name in names:
    if name != _THEIRS:
      config = run.config.copy_and_resolve_references()
      config.optimizer = optimizer_config(name)
      runs[name] = dataclasses.replace(run, config=config)
  return compare(runs, rounds, "sgd", theirs=_THEIRS in names)


def compare(
  runs: Mapping[str, Experiment], rounds: int, base: str, theirs: bool = False
) -> dict[str, Cost]:
  """Times the steps of experiments in turns, each on one fixed batch.

  The kinds of steps of an optimizer (plain, with factors, with factors and inverses) are timed
  apart and averaged with the weights of its periods.

  Args:
    runs: by name; those with the same data and shape of batches share one batch.
    rounds: steps timed of each kind.
    base: the name of the run that ratios are to.
    theirs: adds `kfac_jax.Optimizer` on the first run's model and batch.

  Returns:
    The cost of a step of each run and, as "NAME plain", "NAME factors" and "NAME inverses", of its
    kinds of steps.
  """
  first, batches, candidates, peaks, shares = next(iter(runs.values())), {}, {}, {}, {}
  before = {}
  for name, run in runs.items():
    data = str(run.batch_shapes), str(run.config.get("data"))
    batch = batches[data] if data in batches else batches.setdefault(data, steps.batch(run))
    step = steps.Fixed(run, batch).start()
    shares[name] = {f"{name} {kind}": own for kind, own in kinds(run.config.optimizer).items()}
    largest = peak_bytes(functools.partial(step, 0))
    for kind, (count, _) in shares[name].items():
      candidates[kind], peaks[kind] = functools.partial(step, count), largest
    first_kind, *_ = shares[name]
    before[first_kind] = candidates.get(f"{name} plain", candidates[first_kind])
  if theirs:
    their_step = kfac_jax_step(first, next(iter(batches.values())))
    candidates[_THEIRS] = lambda: [their_step() for _ in range(_THEIR_STEPS)]
    peaks[_THEIRS] = peak_bytes(candidates[_THEIRS])
    before[_THEIRS] = their_step
  times = take_turns(candidates, rounds, before)
  if theirs:
    times[_THEIRS] = [s / _THEIR_STEPS for s in times[_THEIRS]]
  for name, own in shares.items():
    times[name], peaks[name] = average(times, own), peaks[next(iter(own))]
    if len(own) == 1:
      del times[next(iter(own))]
  return {
    name: Cost(statistics.median(own), ratio(own, times[base]), peaks[name])
    for name, own in times.items()
  }


def optimizer_config(name: str) -> ml_collections.ConfigDict:
  """The config of an optimizer as it is measured."""
  return config_lib.optimizer(name, learning_rate=1e-4, **_PERIODS.get(name, {}))


def kinds(config: ml_collections.ConfigDict) -> dict[str, tuple[int, float]]:
  """To each kind of an optimizer's steps an update count that makes one, and its share of steps.

  A pair of grafted optimizers has the kinds of the one that renews anything.

  Raises:
    UserError: both do, with different periods.
  """
  if config.name == "graft":
    sides = [kinds(config.magnitude), kinds(config.direction)]
    periodic = [side for side in sides if side != _PLAIN] or sides
    if periodic[0] != periodic[-1]:
      raise UserError(
        "both sides of a graft renew factors, with different periods; make them equal"
      )
    return periodic[0]
  known = options_lib.of(optimizers.OPTIMIZERS[config.name])
  last = next((name for name in ("inverse_period", "basis_period") if name in known), None)
  if last is None:
    return _PLAIN
  value = lambda name: (
    options_lib.value(optimizers.OPTIMIZERS, config, name) if name in known else None
  )
  factors, inverses, choice = value("factor_period"), value(last), value("factor_damping_period")
  damping = value("damping_period") if value("adaptive_damping") else None

  def of(n):
    renewed = {(True, True): "inverses", (True, False): "factors", (False, False): "plain"}
    parts = [renewed.get((n % factors == 0, n % inverses == 0), "basis")]
    parts += ["with a choice of damping"] if choice and n % choice == 0 else []
    parts += ["with adapted damping"] if damping and (n + 1) % damping == 0 else []
    return " ".join(parts)

  periods = [n for n in (factors, inverses, choice, damping) if n]
  cycle = range(inverses, inverses + math.lcm(*periods))  # the first basis is no usual one
  found = {of(n): n for n in reversed(cycle)}
  shares = collections.Counter(map(of, cycle))
  return {kind: (n, shares[kind] / len(cycle)) for kind, n in sorted(found.items())}


def average(times: dict[str, list[float]], shares: dict[str, tuple[int, float]]) -> list[float]:
  """Seconds of an average step in each round, from those of its `kinds`."""
  rows = zip(*(times[kind] for kind in shares))
  return [sum(s * share for s, (_, share) in zip(row, shares.values())) for row in rows]


def kfac_jax_step(run: Experiment, batch: Any) -> Callable[[], None]:
  """A step of `kfac_jax.Optimizer` at its defaults on one batch, again and again.

  Args:
    run: gives the model and the loss, a cross-entropy.
    batch: see `steps.batch`.

  Returns:
    A function that takes one step and waits for it.
  """
  kfac_jax = library.blocks().kfac_jax
  problem = run.problem
  curvature = optim.Curvature(
    problem.predict, problem.params, problem.batch, in_axes=problem.in_axes
  )
  predict, enter, _ = curvature.tagged()

  def loss(matrices, batch):
    logits, labels = predict(matrices, batch), batch[0]["label"]
    kfac_jax.register_softmax_cross_entropy_loss(logits, labels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  optimizer = kfac_jax.Optimizer(
    jax.value_and_grad(loss),
    l2_reg=0.0,
    value_func_has_aux=False,
    multi_device=False,
    num_burnin_steps=0,  # it would want a stream of batches
  )
  key = jax.random.key(0)
  collections = dict(jax.jit(run.task.init)(key))
  params = collections.pop("params")
  params = enter(params)
  batch = (batch, collections)
  state = optimizer.init(params, key, batch)
  fixed = dict(learning_rate=1e-3, momentum=0.9, damping=1e-3)

  def step() -> None:
    nonlocal params, state
    params, state, stats = optimizer.step(params, state, key, batch=batch, **fixed)
    jax.block_until_ready(stats)

  return step


def main(options: Any) -> None:
  config = cli.checked_config(options.config)
  devices.print_line()
  run = experiment.build(config)
  blocks = optimizers.curvature_blocks(optimizers.group("kfac", 1e-3), run.problem)
  predicted = flops.step_costs(blocks, config.batch_size).ratio(*PERIODS.values())
  theirs = [_THEIRS] if _classifies(run) else []
  costs = measure(run, options.rounds, [*optimizers.OPTIMIZERS, *theirs])
  print(f"{steps.title(config)}, {config.model.get('dtype') or 'float32'}")
  _show(costs, "SGD")
  measured = costs["kfac"].ratio
  print(f"K-FAC predicted from FLOPs {predicted:.2f} x SGD; measured {measured:.2f}")
  if theirs:
    print(f"{_THEIRS} takes {costs[_THEIRS].ratio / measured:.2f} times K-FAC's step")
  else:
    print(f"{_THEIRS} is left out: it is measured on classifiers of images alone")


def _classifies(run: Experiment) -> bool:
  """Whether `kfac_jax_step` takes the task of a run."""
  return run.config.task == "image_classification" and run.task.likelihood == "categorical"


def of_study(options: Any) -> None:
  """Prints the costs of a step of runs of a study, in turns; ratios are to the first."""
  examples = {"study": "configs/studies/frontier.py", "run": "1x-cifar10-mini8-*-seed0"}
  for name, example in examples.items():
    if not getattr(options, name):
      raise UserError(f"--{name} is missing; for example --{name}={example}")
  study = plan.load(options.study)
  configs = {run.name: run.config for run in study.planned(options.set)}
  names = [run.name for run in study.select(options.run)]
  devices.print_line()
  runs = {name: experiment.build(config_lib.restored(configs[name])) for name in names}
  if options.kfac_jax and not _classifies(runs[names[0]]):
    raise UserError(f"--kfac_jax is given, and {names[0]} is no classifier of images")
  _show(compare(runs, options.rounds, names[0], theirs=options.kfac_jax), names[0])


def _show(costs: Mapping[str, Cost], base: str) -> None:
  width = max(20, *map(len, costs))
  for name, cost in costs.items():
    print(
      f"{name:{width}} {cost.seconds:9.4f} s/step  {cost.ratio:6.2f} x {base}"
      f"  {cost.peak_bytes / 2**20:9.0f} MiB"
    )
