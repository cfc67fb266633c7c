"""Time and memory of compiling training steps, with blocks one by one and scanned."""

import itertools
import time
from typing import Any, Callable, NamedTuple

import jax
import ml_collections
import numpy as np

from benchmarks import tables, train
from benchmarks.timing import planned_bytes
from mixer_jax import experiment
from mixer_jax.runtime import compilation, devices
from mixer_jax.training import step as step_lib
from mixer_jax.training.state import state_shapes

FORMS = {"one by one": {}, "scanned": {"scan_blocks": True}}


class Row(NamedTuple):
  """The compilation of a model's training step."""

  model: str  # by name
  optimizer: str  # by name
  blocks: str  # of `FORMS`
  trace: float  # seconds to trace and lower the step
  compile: float  # seconds that XLA then takes
  init: float  # seconds for both with the program that draws the parameters
  # seconds of all processors for all this, which other processes on the machine do not make longer
  processor: float
  peak_bytes: int  # arguments, results and temporaries of the step, as XLA plans them


def measure(config: ml_collections.ConfigDict, form: str) -> Row:
  """Compiles a step of a resident set; nothing is run or kept.

  Args:
    config: of the run.
    form: of `FORMS`, the one that the config has.
  """
  run = experiment.build(config)
  examples = run.datasets["train"].arrays()
  ids = np.zeros((1, config.batch_size), np.int32)
  begin = time.process_time()
  _, *init = _compiled(lambda: jax.jit(run.task.init).lower(jax.random.key(0)))
  program, trace, compiling = _compiled(
    lambda: step_lib.make_train_steps(run).lower(state_shapes(run), examples, ids)
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


TITLES = (
  *("model", "optimizer", "blocks", "trace (s)", "compile (s)", "init (s)", "processor (s)"),
  "memory (MiB)",
)


def cells(row: Row) -> list[str]:
  """A row of the table."""
  seconds = (row.trace, row.compile, row.init, row.processor)
  numbers = [*(f"{s:.1f}" for s in seconds), tables.mebibytes(row.peak_bytes)]
  return [f"`{row.model}`", row.optimizer, row.blocks, *numbers]


def main(options: Any) -> None:
  names = options.models or ["mixer_b16", "mixer_l16", "mixer_h14"]
  batch_size = options.batch_size or 2  # it matters little
  compilation.keep_in("")  # a program found on a disk is not compiled
  devices.print_line()
  print(f"batch {batch_size}, {options.dtype}\n")
  rows = (
    measure(train.config_of(model, optimizer, batch_size, options.dtype, **FORMS[form]), form)
    for model, optimizer, form in itertools.product(names, options.optimizers, FORMS)
  )
  tables.show(TITLES, map(cells, rows), texts=3)
