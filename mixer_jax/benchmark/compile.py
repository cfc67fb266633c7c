"""Time and memory of compiling training steps, with blocks one by one and scanned."""

import itertools
import time
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import jax
import numpy as np

from mixer_jax import experiment, steps
from mixer_jax.benchmark import fixed
from mixer_jax.benchmark import train as train_benchmark
from mixer_jax.benchmark.timing import planned_bytes

FORMS = {"one by one": {}, "scanned": {"scan_blocks": True}}


class Row(NamedTuple):
  """What it takes to compile the training step of a model.

  Attributes:
    model: by name.
    optimizer: by name.
    blocks: of `FORMS`.
    trace: seconds to trace and lower the step.
    compile: seconds that XLA then takes.
    init: seconds for both with the program that draws the parameters.
    processor: seconds of all processors for all this, which other processes on the
      machine do not make longer.
    peak_bytes: arguments, results and temporaries of the step, as XLA plans them.
  """

  model: str
  optimizer: str
  blocks: str
  trace: float
  compile: float
  init: float
  processor: float
  peak_bytes: int


def measure(
  names: Sequence[str], optimizer_names: Sequence[str], batch_size: int, dtype: str
) -> Iterator[Row]:
  """Compiles for the first device, one program after the other; nothing is run or kept.

  Args:
    names: models by name.
    optimizer_names: of `train.OPTIMIZERS`.
    batch_size: images of a step; it matters little.
    dtype: of the computation.

  Raises:
    UserError: an unknown model or optimizer, before anything is compiled.
  """
  train_benchmark.check(names, optimizer_names)
  return (
    _measure(train_benchmark.config_of(model, optimizer, batch_size, dtype, **FORMS[form]), form)
    for model, optimizer, form in itertools.product(names, optimizer_names, FORMS)
  )


def _measure(config: Any, form: str) -> Row:
  run = experiment.build(config)
  split, totals = run.dataset.train, fixed.no_totals(run)
  examples = (split.images, split.labels)
  ids = np.zeros((1, config.batch_size), np.int32)
  jax.block_until_ready(totals)
  begin = time.process_time()
  _, *init = _compiled(lambda: jax.jit(run.task.init).lower(jax.random.key(0)))
  program, trace, compiling = _compiled(
    lambda: steps.make_train_steps(run).lower(
      jax.eval_shape(lambda: steps.init_state(run)), totals, examples, ids
    )
  )
  processor = time.process_time() - begin
  peak = planned_bytes(program.memory_analysis())
  names = config.model.name, config.optimizer.name, form
  return Row(*names, trace, compiling, sum(init), processor, peak)


def _compiled(lower: Callable[[], Any]) -> tuple[Any, float, float]:
  """A program with the seconds to lower and to compile it."""
  start = time.perf_counter()
  lowered = lower()
  middle = time.perf_counter()
  program = lowered.compile()
  return program, middle - start, time.perf_counter() - middle


HEADER = (
  "| model | optimizer | blocks | trace (s) | compile (s) | init (s) | processor (s)"
  " | memory (MiB) |\n| :-- | :-- | :-- | --: | --: | --: | --: | --: |"
)


def line(row: Row) -> str:
  """A row of the table in Markdown."""
  return (
    f"| `{row.model}` | {row.optimizer} | {row.blocks} | {row.trace:.1f} | {row.compile:.1f}"
    f" | {row.init:.1f} | {row.processor:.1f} | {row.peak_bytes / 2**20:.0f} |"
  )
