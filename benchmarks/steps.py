"""Training steps with real data, and on one batch that is on the device already."""

import contextlib
import functools
import itertools
import time
from typing import Any, Callable, Iterator

import jax
import numpy as np

from benchmarks.timing import planned_bytes
from mixer_jax.data import buckets, feed
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.training import step as step_lib
from mixer_jax.training import trainer
from mixer_jax.training.state import TrainState, init_state, state_shapes


def _feed(run: Experiment) -> feed.Feed:
  return feed.Feed(run.datasets["train"], run.order, mesh_lib.batched(run.mesh), run.config.seed)


def batches(run: Experiment) -> Iterator[Any]:
  """The training batches, step by step, prepared, on the devices."""
  sharding, source = mesh_lib.batched(run.mesh), _feed(run)

  @functools.partial(jax.jit, out_shardings=sharding)
  def prepare(key, examples, rows):
    rows = jax.tree.map(lambda x: x[0], rows)
    examples = run.order.cut(feed.take(examples, rows, sharding))
    return run.task.prepare(key, examples, train=True)

  with contextlib.closing(source):
    for i, window in enumerate(source.windows((step, 1) for step in itertools.count())):
      yield prepare(jax.random.key(i), *window)


def title(config: Any) -> str:
  """The model of a config, or its task where models have no names, and its batch."""
  return f"{config.model.get('name', config.task)}, batch {config.batch_size}"


def batch(run: Experiment) -> Any:
  """The first training batch, prepared, on the devices."""
  with contextlib.closing(batches(run)) as made:
    return next(made)


def plan(run: Experiment) -> int:
  """Bytes of arguments, results and temporaries of a step on one batch, as XLA plans them."""
  program = jax.jit(functools.partial(step_lib.update, run), donate_argnums=0)
  lowered = program.lower(state_shapes(run), run.batch_shapes)
  return planned_bytes(lowered.compile().memory_analysis())


class _Steps:
  """Calls of a program of training steps."""

  length: int  # steps in a call
  state: TrainState  # of training, after the last call

  def __init__(self, run: Experiment):
    self._run = run

  def start(self):
    """Makes the state before step 0, which takes memory; returns this object."""
    self.state = init_state(self._run)
    return self

  def _advance(self, program: Callable, *args: Any) -> jax.Array:
    self.state, checks = program(self.state, *args)
    return checks


class Real(_Steps):
  """Training on a run's own data, as long as in training.

  Attributes:
    compile_seconds: to trace and compile the program.
    peak_bytes: arguments, results and temporaries of the program, as XLA plans them.

  Raises:
    UserError: the run has batches of several shapes.
  """

  def __init__(self, run: Experiment):
    super().__init__(run)
    if isinstance(run.order, buckets.BucketOrder):
      raise UserError("batches have several shapes; allowed: one, as with data.batch_tokens=0")
    source = _feed(run)
    default = trainer.steps_per_dispatch(run.mesh)
    self.length = run.config.steps_per_dispatch or feed.fitting(
      run.datasets["train"], default, run.config.batch_size
    )
    windows = source.windows((step, self.length) for step in itertools.count(0, self.length))
    first = next(windows)
    self._windows = itertools.chain([first], windows)
    start = time.perf_counter()
    program = step_lib.make_train_steps(run).lower(state_shapes(run), *first)
    self._program = program.compile()
    self.compile_seconds = time.perf_counter() - start
    self.peak_bytes = planned_bytes(self._program.memory_analysis())

  def __call__(self, calls: int = 1) -> None:
    """Calls the program and waits for the device after the last call alone."""
    for _ in range(calls):
      checks = self._advance(self._program, *next(self._windows))
    jax.block_until_ready(checks)


def _at(opt_state: Any, count: jax.Array) -> Any:
  """The state with all counts of updates set; `optax.tree.set` leaves those inside of a state alone
  that has one itself, as optax's for injected rates."""
  is_count = lambda path: getattr(path[-1], "name", "") == "count"
  place = lambda path, x: count if is_count(path) else x
  return jax.tree_util.tree_map_with_path(place, opt_state)


class Fixed(_Steps):
  """Training on one batch again and again.

  Args:
    run: the experiment.
    batch: see `batch`.
    length: steps in a call of the program.
  """

  def __init__(self, run: Experiment, batch: Any, length: int = 1):
    super().__init__(run)
    self.length, self._batch, self._count = length, batch, 0
    stored = jax.tree.map(lambda x: x.sharding, state_shapes(run))
    out_shardings = stored, mesh_lib.replicated(run.mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=out_shardings)
    def program(state, batch, counts):
      def step(state, count):
        return step_lib.update(run, state.replace(opt_state=_at(state.opt_state, count)), batch)

      return step(state, counts[0]) if length == 1 else jax.lax.scan(step, state, counts)

    self._program = program

  def __call__(self, count: int | None = None, calls: int = 1) -> None:
    """Calls the program and waits for the device after the last call alone, as in training.

    Args:
      count: makes every step that update of the optimizer, which decides what K-FAC renews
        in it; None: the updates that follow those of the calls before.
      calls: of the program.
    """
    for _ in range(calls):
      if count is None:
        counts = np.arange(self._count, self._count + self.length, dtype=np.int32)
        self._count += self.length
      else:
        counts = np.full(self.length, count, np.int32)
      checks = self._advance(self._program, self._batch, counts)
    jax.block_until_ready(checks)
