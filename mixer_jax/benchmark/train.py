"""Speed of training: rates, utilisation, memory, time to the first step, cost of the input."""

import itertools
import statistics
import time
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import config as config_lib
from mixer_jax import experiment, flops, models, optim, steps
from mixer_jax.benchmark import fixed, optimizers
from mixer_jax.benchmark import input as input_benchmark
from mixer_jax.benchmark.timing import fits, planned_bytes, take_turns
from mixer_jax.errors import UserError

# What can be measured without a config of its own.
OPTIMIZERS = tuple(name for name in optim.NAMES if name != "graft")
# Sides of the matrices that utilisation is compared with, per backend.
_PRODUCT_SIZES = {"cpu": 2048}


class Row(NamedTuple):
  """What training takes on one device.

  Attributes:
    model: by name.
    optimizer: by name; "kfac" is averaged over `optimizers.PERIODS`.
    batch_size: images of a step.
    peak_bytes: arguments, results and temporaries of the program, as XLA plans them.
    first_step: seconds to trace, compile and run the program once.
    step: median seconds of a step on a batch that is on the device; 0.0: nothing
      was run, because the plan does not fit into the memory of the device.
    utilisation: operations of the model, three times those of the forward pass, a
      second, over those of a square matrix product; median over the rounds.
    input_ratio: steps a second with real data over those with the batch on the
      device; median over the rounds.
  """

  model: str
  optimizer: str
  batch_size: int
  peak_bytes: int
  first_step: float = 0.0
  step: float = 0.0
  utilisation: float = 0.0
  input_ratio: float = 0.0


def measure(
  names: Sequence[str], optimizer_names: Sequence[str], batch_size: int, dtype: str, rounds: int
) -> Iterator[Row]:
  """Measures training on the bundled images, one model and optimizer after the other.

  Args:
    names: models by name.
    optimizer_names: of `OPTIMIZERS`.
    batch_size: images of a step.
    dtype: of the computation and of the matrix product it is compared with.
    rounds: how often each candidate is timed after a warm-up.

  Raises:
    UserError: an unknown model or optimizer, before anything is measured.
  """
  check(names, optimizer_names)
  return (
    _measure(experiment.build(config_of(model, optimizer, batch_size, dtype)), rounds)
    for model, optimizer in itertools.product(names, optimizer_names)
  )


def check(names: Sequence[str], optimizer_names: Sequence[str]) -> None:
  """Raises a UserError if there is no model, or no optimizer of `OPTIMIZERS`, of a name."""
  for name in names:
    models.fields(name)
  for name in optimizer_names:
    if name not in OPTIMIZERS:
      raise UserError(f"--optimizers has {name!r}; allowed: {', '.join(OPTIMIZERS)}")


def config_of(model: str, optimizer: str, batch_size: int, dtype: str, **fields: Any) -> Any:
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


def _measure(run: experiment.Experiment, rounds: int) -> Row:
  config, totals = run.config, fixed.no_totals(run)
  trainer = steps.EpochTrainer(run)
  stream, window = input_benchmark.windows(trainer), trainer.window
  first = next(stream)
  shapes = steps.state_shapes(run)
  start = time.perf_counter()
  real_steps = steps.make_train_steps(run).lower(shapes, totals, *first).compile()
  compiling = time.perf_counter() - start
  plan = planned_bytes(real_steps.memory_analysis())
  row = Row(config.model.name, config.optimizer.name, config.batch_size, plan)
  state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
  if not fits(plan + state_bytes):  # two states are trained in turn
    return row

  batch, fixed_steps = fixed.batch(run), fixed.make_steps(run)
  states = {name: steps.init_state(run) for name in ("real", "fixed")}

  def advance(name: str, program: Callable, *args: Any) -> None:
    states[name], done = program(states[name], totals, *args)
    jax.block_until_ready(done)

  def fixed_window(counts: np.ndarray) -> Callable[[], None]:
    return lambda: advance("fixed", fixed_steps, batch, jnp.asarray(counts, jnp.int32))

  start = time.perf_counter()
  advance("real", real_steps, *first)
  first_step = compiling + time.perf_counter() - start
  # The same updates as those with real data, whose first window has been run.
  counts = (i * window + np.arange(window) for i in itertools.count(1))
  model_flops = window * step_flops(run)
  product, product_flops = _square_product(config.model.dtype, model_flops)
  candidates = {
    "product": product,
    "real": lambda: advance("real", real_steps, *next(stream)),
    "fixed": lambda: fixed_window(next(counts))(),
  }
  if config.optimizer.name == "kfac":
    kinds = optimizers.KFAC_KINDS.items()
    candidates |= {kind: fixed_window(np.full(window, count)) for kind, count in kinds}
  times = take_turns(candidates, rounds)
  averaged = optimizers.over_the_periods(times) if "kfac plain" in times else times["fixed"]
  product_rates = [product_flops / s for s in times["product"]]
  model_rates = [model_flops / s for s in averaged]
  return row._replace(
    first_step=first_step,
    step=statistics.median(averaged) / window,
    utilisation=input_benchmark.ratio(model_rates, product_rates),
    input_ratio=input_benchmark.ratio(times["fixed"], times["real"]),
  )


def step_flops(run: experiment.Experiment) -> int:
  """Operations of the model in a step: a backward pass is two forward passes."""
  problem = run.problem
  predict = lambda params, batch: problem.predict(params, batch)[0]
  return 3 * 2 * flops.multiply_adds(predict, problem.params, problem.batch)


def _square_product(dtype: str, operations: int) -> tuple[Callable[[], None], int]:
  """A chain of products of large square matrices, and its operations: about as many."""
  size = _PRODUCT_SIZES.get(jax.default_backend(), 8192)
  each = 2 * size**3
  repeats = max(1, round(operations / each))
  x = jax.random.normal(jax.random.key(0), (size, size), dtype) / size**0.5

  @jax.jit
  def chain(x):
    return jax.lax.scan(lambda y, _: (y @ x, None), x, length=repeats)[0]

  return lambda: jax.block_until_ready(chain(x)), repeats * each


HEADER = (
  "| model | optimizer | steps/s | images/s | utilisation | memory (MiB) | first step (s)"
  " | real / fixed data |\n| :-- | :-- | --: | --: | --: | --: | --: | --: |"
)


def line(row: Row) -> str:
  """A row of the table in Markdown."""
  start = f"| `{row.model}` | {row.optimizer} |"
  memory = f"{row.peak_bytes / 2**20:.0f}"
  if not row.step:
    return f"{start} does not fit | - | - | {memory} | - | - |"
  return (
    f"{start} {1 / row.step:.3g} | {row.batch_size / row.step:.1f} | {row.utilisation:.0%}"
    f" | {memory} | {row.first_step:.1f} | {row.input_ratio:.3f} |"
  )
