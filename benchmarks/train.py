"""Speed of training: rates, utilisation, memory, time to the first step, cost of the input."""

import functools
import itertools
import statistics
import time
from typing import Any, Callable, NamedTuple, Sequence

import jax
import ml_collections

from benchmarks import flops, optimizers, steps, tables
from benchmarks.timing import fits, ratio, take_turns
from mixer_jax import config as config_lib
from mixer_jax import experiment, models
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.optimizers import OPTIMIZERS
from mixer_jax.runtime import devices
from mixer_jax.training.state import state_shapes

# Side of the matrices whose product utilisation is compared with.
_PRODUCT_SIZE, _PRODUCT_SIZE_ON_CPU = 8192, 2048


class Row(NamedTuple):
  """Training on one device. None was not measured: the plan does not fit into the memory."""

  model: str  # by name
  optimizer: str  # by name; its kinds of steps are averaged, see `optimizers.kinds`
  batch_size: int  # images of a step
  peak_bytes: int  # arguments, results and temporaries of the program, as XLA plans them
  first_step: float | None = None  # seconds to trace, compile and run the program once
  step: float | None = None  # median seconds of a step on a batch that is on the device
  # operations of the model, three times those of the forward pass, a second, over those of a square
  # matrix product; median over the rounds
  utilisation: float | None = None
  # steps a second with real data over those with the batch on the device; median over the rounds
  input_ratio: float | None = None


def check(names: Sequence[str], optimizer_names: Sequence[str]) -> None:
  """Checks names before anything is measured.

  Raises:
    UserError: there is no model or optimizer of a name.
  """
  for name in names:
    models.fields(name)
  for name in optimizer_names:
    if name not in OPTIMIZERS:
      raise UserError(f"--optimizers has {name!r}; allowed: {', '.join(OPTIMIZERS)}")


def config_of(
  model: str, optimizer: str, batch_size: int, dtype: str, **fields: Any
) -> ml_collections.ConfigDict:
  """The bundled images at the model's size, on one device; `fields` of the model."""
  config = config_lib.default()
  config.batch_size = batch_size
  config.mesh.data = 1
  config.model = config_lib.model(model, dtype=dtype, **fields)
  config.optimizer = optimizers.optimizer_config(optimizer)
  side = models.image_size(model)
  if side > 32:
    config.data.update(image_size=side, resize=side * 8 // 7, pad=0)  # 256 for 224
  return config


def measure(run: Experiment, rounds: int) -> Row:
  """Measures training; two states are trained in turn.

  Args:
    run: the experiment, on one device.
    rounds: how often each candidate is timed after a warm-up.
  """
  config, real = run.config, steps.Real(run)
  row = Row(config.model.name, config.optimizer.name, config.batch_size, real.peak_bytes)
  state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state_shapes(run)))
  if not fits(real.peak_bytes + state_bytes):
    return row
  real.start()
  fixed = steps.Fixed(run, steps.batch(run), real.length).start()
  start = time.perf_counter()
  real()
  first_step = real.compile_seconds + time.perf_counter() - start
  fixed()  # the same updates as those with real data, from here on
  model_flops = real.length * step_flops(run)
  product, product_flops = square_product(config.model.dtype or "float32", model_flops)
  candidates = {"product": product, "real": real, "fixed": fixed}
  shares = optimizers.kinds(config.optimizer)
  if len(shares) > 1:
    candidates |= {kind: functools.partial(fixed, count) for kind, (count, _) in shares.items()}
  times = take_turns(candidates, rounds)
  averaged = optimizers.average(times, shares) if len(shares) > 1 else times["fixed"]
  return row._replace(
    first_step=first_step,
    step=statistics.median(averaged) / real.length,
    utilisation=model_flops / product_flops * ratio(times["product"], averaged),
    input_ratio=ratio(times["fixed"], times["real"]),
  )


def step_flops(run: Experiment) -> int:
  """Operations of the model in a step: a backward pass is two forward passes."""
  problem = run.problem
  predict = lambda params, batch: problem.predict(params, batch)[0]
  return 3 * 2 * flops.multiply_adds(predict, problem.params, problem.batch)


def square_product(dtype: str, operations: int) -> tuple[Callable[[], Any], int]:
  """A chain of products of large square matrices of a dtype, and its operations.

  They are about as many as asked for, and those of one product at least. The call waits for the
  device.
  """
  size = _PRODUCT_SIZE_ON_CPU if jax.default_backend() == "cpu" else _PRODUCT_SIZE
  each = 2 * size**3
  repeats = max(1, round(operations / each))
  x = jax.random.normal(jax.random.key(0), (size, size), dtype) / size**0.5

  @jax.jit
  def chain(x):
    return jax.lax.scan(lambda y, _: (y @ x, None), x, length=repeats)[0]

  return lambda: jax.block_until_ready(chain(x)), repeats * each


TITLES = (
  *("model", "optimizer", "steps/s", "images/s", "utilisation", "memory (MiB)"),
  *("first step (s)", "real / fixed data"),
)


def cells(row: Row) -> list[str]:
  """A row of the table."""
  rate = row.step and 1 / row.step
  return [
    f"`{row.model}`",
    row.optimizer,
    tables.number(rate, ".3g"),
    tables.number(rate and rate * row.batch_size, ".1f"),
    tables.number(row.utilisation, ".0%"),
    tables.mebibytes(row.peak_bytes),
    tables.number(row.first_step, ".1f"),
    tables.number(row.input_ratio, ".3f"),
  ]


def main(options: Any) -> None:
  names = options.models or ["mixer_s4", "mixer_s16", "mixer_b4", "mixer_b16"]
  batch_size = options.batch_size or 64
  devices.print_line()
  print(f"batch {batch_size}, {options.dtype}, {options.rounds} rounds; -: does not fit\n")
  pairs = itertools.product(names, options.optimizers)
  configs = (config_of(model, name, batch_size, options.dtype) for model, name in pairs)
  rows = (measure(experiment.build(config), options.rounds) for config in configs)
  tables.show(TITLES, map(cells, rows), texts=2)
