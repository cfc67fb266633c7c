"""Steps of the optimizer: their state, the compiled program, the loop over an epoch."""

import functools
import itertools
import time
from typing import Any, Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from mixer_jax import divergence, sharding, step_norms
from mixer_jax.data import batches
from mixer_jax.experiment import Experiment


@flax.struct.dataclass
class TrainState:
  """Everything that a step changes, a pytree of plain arrays.

  Attributes:
    step: updates so far, shape=(), dtype=int32.
    params: the parameters, float32.
    opt_state: the optimizer's state, curvature factors included.
    key_data: of the run's random key, uint32; a step folds its number into it.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  key_data: jax.Array


def init_state(run: Experiment, params: Any = None) -> TrainState:
  """The state before step 0, on the mesh as `sharding.stored` has it.

  Args:
    run: the experiment.
    params: where to start; None: fresh ones, drawn with the run's seed.
  """
  init, params = functools.partial(_init, run), jax.device_get(params)
  where = sharding.stored(run.mesh, jax.eval_shape(init, run.config.seed, params))
  return jax.jit(init, out_shardings=where)(run.config.seed, params)


def state_shapes(run: Experiment) -> TrainState:
  """Shapes of the state with their shardings, to restore onto."""
  shapes = jax.eval_shape(functools.partial(_init, run), run.config.seed, None)
  return jax.tree.map(
    lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
    shapes,
    sharding.stored(run.mesh, shapes),
  )


def _init(run: Experiment, seed: Any, params: Any) -> TrainState:
  params_key, run_key = jax.random.split(jax.random.key(seed))
  params = run.task.init(params_key) if params is None else params
  key_data = jax.random.key_data(run_key)
  return TrainState(jnp.zeros((), jnp.int32), params, run.tx.init(params), key_data)


def step_keys(state: TrainState) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The keys of a step: augmentation, dropout, targets sampled for K-FAC."""
  key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), state.step)
  return tuple(jax.random.split(key, 3))


def update(
  run: Experiment, state: TrainState, totals: Any, batch: Any
) -> tuple[TrainState, Any, jax.Array]:
  """One step of the optimizer on a batch (traceable).

  Args:
    run: the experiment.
    state: before the step.
    totals: metrics so far, to which those of the batch are added.
    batch: as `run.task.batch` makes it.

  Returns:
    The state, the totals and `divergence.checks`. A step that fails them adds
    nothing to the totals and, if `config.on_nonfinite` is "skip", leaves
    parameters and optimizer state, its counts included, as they were.
  """
  _, dropout_key, target_key = step_keys(state)
  loss, accum_steps = run.task.loss, run.config.accum_steps
  whole = sharding.gathered(run.mesh, state.params)
  grads, metrics = _gradients(loss, accum_steps, whole, batch, dropout_key)
  updates, opt_state = run.tx.update(
    grads, state.opt_state, state.params, batch=batch, rng=target_key, model_params=whole
  )
  params = optax.apply_updates(state.params, updates)
  checks = divergence.checks(metrics, params, opt_state)
  totals = divergence.where(checks.all(), totals.merge(metrics), totals)
  if run.config.on_nonfinite == "skip":
    old = (state.params, state.opt_state)
    params, opt_state = divergence.where(checks.all(), (params, opt_state), old)
  return TrainState(state.step + 1, params, opt_state, state.key_data), totals, checks


def make_train_steps(run: Experiment):
  """The program of training.

  Returns:
    A jitted function of the state, metrics so far and a `batches.Window` to the
    state after its steps, and (metrics, `step_norms.squares` and
    `divergence.checks` of each step). It
    donates the state.
  """
  batched = sharding.batched(run.mesh)

  def step(examples, carry, rows):
    state, totals = carry
    augment_key, _, _ = step_keys(state)
    images, labels = batches.take(examples, rows, batched)
    batch = run.task.batch(augment_key, images, labels, train=True)
    state, totals, checks = update(run, state, totals, batch)
    squares = step_norms.squares(state.opt_state)
    if run.config.on_nonfinite == "skip":  # then they are those of the step before
      squares = jax.tree.map(lambda x: jnp.where(checks.all(), x, jnp.nan), squares)
    return (state, totals), (squares, checks)

  everywhere = sharding.replicated(run.mesh)
  stored = jax.tree.map(lambda x: x.sharding, state_shapes(run))

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=(stored, everywhere))
  def train_steps(state, totals, examples, rows):
    steps = functools.partial(step, examples)
    if len(jax.tree.leaves(rows)[0]) == 1:  # a loop of one step is still a loop to XLA
      (state, totals), each = steps((state, totals), jax.tree.map(lambda x: x[0], rows))
      return state, (totals, *jax.tree.map(lambda x: x[None], each))
    (state, totals), each = jax.lax.scan(steps, (state, totals), rows)
    return state, (totals, *each)

  return train_steps


def _gradients(loss, accum_steps: int, params: Any, batch: Any, key: jax.Array):
  """Gradient and metrics of a batch, averaged over equal parts of it.

  Args:
    loss: maps (params, batch, key) to (scalar, metrics).
    accum_steps: number of parts; only one part's activations exist at a time.
    params: the parameters.
    batch: arrays [batch_size, ...].
    key: for dropout.
  """
  grad_fn = jax.grad(loss, has_aux=True)
  if accum_steps == 1:
    return grad_fn(params, batch, key)

  def add_part(sums, part):
    grads, metrics = grad_fn(params, *part)
    return jax.tree.map(jnp.add, sums, grads), metrics

  # Part i takes every accum_steps-th example, so all devices share each part.
  parts = jax.tree.map(lambda x: x.reshape(-1, accum_steps, *x.shape[1:]).swapaxes(0, 1), batch)
  keys = jax.random.split(key, accum_steps)
  sums, metrics = jax.lax.scan(add_part, jax.tree.map(jnp.zeros_like, params), (parts, keys))
  return jax.tree.map(lambda g: g / accum_steps, sums), metrics.reduce()


@flax.struct.dataclass
class Part:
  """What an epoch cut short has to hand on, beside the state, to end as if it had not been.

  Attributes:
    totals: metrics so far.
    squares: `step_norms.squares` of the steps so far, [steps] arrays.
    seconds: so far, without compilation, shape=().
  """

  totals: Any
  squares: dict[str, Any]
  seconds: Any


def part_shapes(run: Experiment, opt_state: Any, steps: int) -> Part:
  """Shapes of a `Part` of some steps.

  Args:
    run: the experiment.
    opt_state: the optimizer's state or its shapes.
    steps: of the epoch, so far.
  """
  squares = jax.eval_shape(step_norms.squares, opt_state)
  return Part(
    jax.eval_shape(run.task.train_metrics.empty),
    {key: jax.ShapeDtypeStruct((steps,), x.dtype) for key, x in squares.items()},
    jax.ShapeDtypeStruct((), jnp.float32),
  )


class Cut(Exception):
  """An epoch was asked to stop.

  Attributes:
    state: after its last step.
    part: what its other steps need.
  """

  def __init__(self, state: TrainState, part: Part):
    super().__init__()
    self.state, self.part = state, part


def steps_per_dispatch(mesh: jax.sharding.Mesh) -> int:
  """Steps in a call of the compiled program where the config leaves it open.

  A loop on the device hides the cost of a call. On a CPU a call costs next to
  nothing, and XLA's programs are slower inside a loop.
  """
  return 1 if mesh.devices.flat[0].platform == "cpu" else 16


class EpochTrainer:
  """Feeds the epochs of a run through the compiled program."""

  def __init__(self, run: Experiment):
    self._run = run
    self._everywhere = sharding.replicated(run.mesh)
    self._restores, where = 0, sharding.batched(run.mesh)
    self.feed = batches.Feed(run.dataset.train, self._ids(0), where, run.config.seed)
    self._programs = {}
    wanted = run.config.steps_per_dispatch or self.feed.fitting(steps_per_dispatch(run.mesh))
    # Windows of one size, so that one program serves the whole epoch.
    self.window = _largest_divisor(run.steps_per_epoch, wanted)

  def __call__(
    self,
    state: TrainState,
    epoch: int,
    part: Part | None = None,
    stop: Callable[[], bool] = lambda: False,
    restores: int = 0,
  ) -> tuple[TrainState, dict[str, float], float]:
    """Trains one epoch, or the rest of one.

    Args:
      state: before its first step, or where it was cut.
      epoch: its number, from 1.
      part: None, or what was handed on when it was cut.
      stop: asked between windows of steps, but not after the last.
      restores: see `batches.epoch_order`.

    Returns:
      The state, the epoch's metrics, and its seconds without compilation.

    Raises:
      Cut: `stop` said so; all steps so far have passed their checks.
      divergence.Nonfinite: a step did not, and the config does not skip it, or it
        has skipped too many.
    """
    run = self._run
    if part is None:
      empty = sharding.place(run.task.train_metrics.empty(), self._everywhere)
      part, done = Part(empty, {}, 0.0), 0
    else:
      done = int(state.step) - (epoch - 1) * run.steps_per_epoch
    in_all = run.steps_per_epoch
    totals, failed = part.totals, 0 if int(part.totals.loss.count) else done
    watch = divergence.Watch(run.config.on_nonfinite, epoch, in_all, failed)
    window = self._window(in_all - done)
    if restores != self._restores:
      self.feed.reorder(self._ids(restores))
      self._restores = restores
    windows = self.feed.windows(epoch, window, done)
    first = next(windows)
    if window not in self._programs:
      self._programs[window] = _compile(make_train_steps(run), state, totals, *first)
    start, squares = time.perf_counter() - float(part.seconds), [part.squares] * (done > 0)
    bar = tqdm(total=in_all, initial=done, desc=f"epoch {epoch}", unit="step", leave=False)
    with bar:
      for i, args in enumerate(itertools.chain([first], windows)):
        before, step = totals, (epoch - 1) * run.steps_per_epoch + done
        state, (totals, squared, checks) = self._programs[window](state, totals, *args)
        squares.append(squared)
        watch.add(step, checks)
        done += window
        if done < in_all and stop():
          watch.read(totals)
          seconds = np.float32(time.perf_counter() - start)
          raise Cut(state, Part(totals, step_norms.joined(squares), seconds))
        # Read the call before this one: the bar is true and the queue short.
        if i:
          watch.read(totals, ahead=1)
          bar.set_postfix(loss=f"{before.compute()['loss']:.3f}", refresh=False)
          bar.update(window)
      watch.read(totals)
      metrics = {name: float(value) for name, value in totals.compute().items()}
    if run.config.on_nonfinite == "skip":
      metrics["skipped"] = done - int(totals.loss.count) // run.config.batch_size
    return state, metrics | step_norms.root_mean(squares), time.perf_counter() - start

  def _ids(self, restores: int) -> Callable[[int], np.ndarray]:
    config = self._run.config
    sizes = dict(num_examples=len(self._run.dataset.train), batch_size=config.batch_size)
    return functools.partial(batches.train_indices, config.seed, restores=restores, **sizes)

  def _window(self, steps: int) -> int:
    """Steps in a call: not those of other epochs if one was cut between two of their calls."""
    return self.window if steps % self.window == 0 else _largest_divisor(steps, self.window)


def _largest_divisor(number: int, limit: int) -> int:
  return max(w for w in range(1, min(limit, number) + 1) if number % w == 0)


def _compile(function, *args):
  start = time.perf_counter()
  program = function.lower(*args).compile()
  print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
  return program
