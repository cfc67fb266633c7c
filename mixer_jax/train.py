"""The training loop: one program for every task, optimizer and device count."""

import contextlib
import functools
import itertools
import pathlib
import time
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from tqdm import tqdm

from mixer_jax import (
  check,
  checkpoint,
  experiment,
  fine_tuning,
  optim,
  provenance,
  sharding,
  step_norms,
  workdir,
)
from mixer_jax.checkpoint import Progress
from mixer_jax.data import batches
from mixer_jax.errors import UserError
from mixer_jax.evaluate import Evaluator
from mixer_jax.experiment import Experiment
from mixer_jax.report import console, curves

# A loop on the device hides the cost of a call; on a CPU, too, it is faster.
_STEPS_PER_DISPATCH = 16
# A file of this name in a run's directory ends it with a checkpoint after the epoch.
STOP = "stop"


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
  """The state before step 0, on every device of the mesh.

  Args:
    run: the experiment.
    params: where to start; None: fresh ones, drawn with the run's seed.
  """

  def init(seed, params):
    params_key, run_key = jax.random.split(jax.random.key(seed))
    params = run.task.init(params_key) if params is None else params
    key_data = jax.random.key_data(run_key)
    return TrainState(jnp.zeros((), jnp.int32), params, run.tx.init(params), key_data)

  return jax.jit(init, out_shardings=sharding.replicated(run.mesh))(run.config.seed, params)


def step_keys(state: TrainState) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The keys of a step: augmentation, dropout, targets sampled for K-FAC."""
  key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), state.step)
  return tuple(jax.random.split(key, 3))


def update(run: Experiment, state: TrainState, totals: Any, batch: Any) -> tuple[TrainState, Any]:
  """One step of the optimizer on a batch (traceable).

  Args:
    run: the experiment.
    state: before the step.
    totals: metrics so far, to which those of the batch are added.
    batch: as `run.task.batch` makes it.
  """
  _, dropout_key, target_key = step_keys(state)
  loss, accum_steps = run.task.loss, run.config.accum_steps
  grads, metrics = _gradients(loss, accum_steps, state.params, batch, dropout_key)
  updates, opt_state = run.tx.update(
    grads, state.opt_state, state.params, batch=batch, rng=target_key
  )
  params = optax.apply_updates(state.params, updates)
  return TrainState(state.step + 1, params, opt_state, state.key_data), totals.merge(metrics)


def make_train_steps(run: Experiment):
  """The program of training.

  Returns:
    A jitted function of the state, metrics so far, images [n, h, w, 3] uint8,
    labels [n] and indices [steps, batch_size] to the state after these steps,
    and (metrics, `step_norms.squares` of each step). It donates the state.
  """
  batched = sharding.batched(run.mesh)

  def step(images, labels, carry, indices):
    state, totals = carry
    augment_key, _, _ = step_keys(state)
    pixels, classes = (
      jax.lax.with_sharding_constraint(x[indices], batched) for x in (images, labels)
    )
    batch = run.task.batch(augment_key, pixels, classes, train=True)
    state, totals = update(run, state, totals, batch)
    return (state, totals), step_norms.squares(state.opt_state)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=sharding.replicated(run.mesh))
  def train_steps(state, totals, images, labels, indices):
    steps = functools.partial(step, images, labels)
    (state, totals), squares = jax.lax.scan(steps, (state, totals), indices)
    return state, (totals, squares)

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


class EpochTrainer:
  """Feeds the epochs of a run through the compiled program."""

  def __init__(self, run: Experiment):
    self._run = run
    self._everywhere = sharding.replicated(run.mesh)
    self.feed = batches.Feed(run.dataset.train, self._everywhere)
    self._program = None
    wanted = run.config.steps_per_dispatch or _STEPS_PER_DISPATCH
    # Windows of one size, so that one program serves the whole epoch.
    total = run.steps_per_epoch
    self.window = max(w for w in range(1, min(wanted, total) + 1) if total % w == 0)

  def __call__(self, state: TrainState, epoch: int) -> tuple[TrainState, dict[str, float], float]:
    """Trains one epoch.

    Returns:
      The state, the epoch's metrics, and its seconds without compilation.
    """
    run, config = self._run, self._run.config
    size = len(run.dataset.train.labels)
    indices = batches.train_indices(config.seed, epoch, size, config.batch_size)
    totals = jax.device_put(run.task.train_metrics.empty(), self._everywhere)
    windows = self.feed.windows(indices, self.window)
    first = next(windows)
    if self._program is None:
      self._program = _compile(make_train_steps(run), state, totals, *first)
    start, squares = time.perf_counter(), []
    with tqdm(total=len(indices), desc=f"epoch {epoch}", unit="step", leave=False) as bar:
      for i, window in enumerate(itertools.chain([first], windows)):
        before = totals
        state, (totals, squared) = self._program(state, totals, *window)
        squares.append(squared)
        # Read the call before this one: the bar is true and the queue short.
        if i:
          bar.set_postfix(loss=f"{before.compute()['loss']:.3f}", refresh=False)
          bar.update(self.window)
      metrics = {name: float(value) for name, value in totals.compute().items()}
    return state, metrics | step_norms.root_mean(squares), time.perf_counter() - start


def _compile(function, *args):
  start = time.perf_counter()
  program = function.lower(*args).compile()
  print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
  return program


def train(config: ml_collections.ConfigDict, path: str | None) -> pathlib.Path:
  """Trains, or resumes, the run that a config describes.

  Args:
    config: see `mixer_jax.config`.
    path: the run's directory; None makes a fresh one under `runs/`.

  Returns:
    The run's directory: config.json, metrics.jsonl, checkpoints/, tensorboard/
    and curves.png.

  Raises:
    UserError: something that the user can mend.
  """
  console.print_devices()
  check.check(config)
  config, weights = fine_tuning.adopt(config, workdir.stored_config(path))
  run = experiment.build(config)
  params = weights and weights.fit(run.param_shapes, config.resize_tokens)
  _ = run.tx  # an unusable optimizer is refused before the directory exists
  directory = workdir.create(path)
  with contextlib.closing(checkpoint.Checkpoints(directory)) as saved:
    workdir.store_config(directory, config, started=saved.latest() is not None)
    print(f"workdir {directory}: the same --config with --workdir={directory} resumes", flush=True)
    state, progress = _start(run, saved, params)
    if progress.epoch >= config.num_epochs:
      print(f"finished already: {console.summary(progress, config.target_accuracy)}")
      if not (directory / "curves.png").exists():  # killed before they were drawn
        curves.draw(directory)
      return directory
    console.print_model(run)
    with provenance.session(directory, run, progress.epoch):
      progress = _run_epochs(run, directory, saved, state, progress)
  figure = curves.draw(directory)
  done = "done" if progress.epoch == config.num_epochs else "stopped"
  print(f"{done}: {console.summary(progress, config.target_accuracy)}\ncurves in {figure}")
  return directory


def _start(
  run: Experiment, saved: checkpoint.Checkpoints, params: Any
) -> tuple[TrainState, Progress]:
  """The newest checkpoint's state, or one before step 0 (see `init_state`)."""
  step = saved.latest()
  if step is None:
    return init_state(run, params), Progress()
  shapes = checkpoint.template(
    jax.eval_shape(lambda: init_state(run)), sharding.replicated(run.mesh)
  )
  params, rest, progress = saved.restore(step, shapes.params, _without_params(shapes))
  print(f"resumed from step {step}, epoch {progress.epoch}", flush=True)
  return TrainState(params=params, **rest), progress


def _without_params(state: TrainState) -> dict[str, Any]:
  return {"step": state.step, "opt_state": state.opt_state, "key_data": state.key_data}


def _run_epochs(
  run: Experiment,
  directory: pathlib.Path,
  saved: checkpoint.Checkpoints,
  state: TrainState,
  progress: Progress,
) -> Progress:
  """Runs the remaining epochs, or those until `STOP`: train, evaluate, report, save."""
  config = run.config
  evaluator, trainer = Evaluator(run), EpochTrainer(run)
  writer = workdir.MetricWriter(directory, progress.epoch)
  for epoch in range(progress.epoch + 1, config.num_epochs + 1):
    state, metrics, seconds = trainer(state, epoch)
    step = epoch * run.steps_per_epoch
    _refuse_nonfinite(metrics["loss"], epoch, step, saved)
    test = evaluator(state.params)
    _refuse_nonfinite(test["loss"], epoch, step, saved)
    progress = progress.after(epoch, test["top1"], config.target_accuracy)
    row = _row(run, step, metrics, test, progress, seconds)
    writer.write(row)
    print(console.epoch_line(row, config.num_epochs), flush=True)
    stop = (directory / STOP).exists()
    due = epoch % config.checkpoint_epochs == 0 or epoch == config.num_epochs or stop
    if due or progress.best_epoch == epoch:
      saved.save(step, state.params, _without_params(state), progress, test["top1"])
    if stop:
      (directory / STOP).unlink()
      break
  writer.close()
  return progress


def _row(run, step, metrics, test, progress, seconds) -> dict[str, Any]:
  """What is written of an epoch; the names carry the split."""
  if run.dataset.num_classes < 100:
    test = {name: value for name, value in test.items() if name != "top5"}
  rate = optim.learning_rate(run.config.optimizer, run.multiplier)
  return {
    "epoch": progress.epoch,
    "step": step,
    **{f"train/{name}": value for name, value in metrics.items()},
    **{f"test/{name}": value for name, value in test.items()},
    "test/best_top1": progress.best_top1,
    "test/best_epoch": progress.best_epoch,
    "test/target_epoch": progress.target_epoch,
    "learning_rate": float(rate(step - 1)),
    "images_per_second": run.steps_per_epoch * run.config.batch_size / seconds,
    "seconds_per_epoch": seconds,
  }


def _refuse_nonfinite(loss: float, epoch: int, step: int, saved: checkpoint.Checkpoints) -> None:
  if not np.isfinite(loss):
    last = saved.latest()
    kept = f"the last good checkpoint is that of step {last}" if last else "no checkpoint is left"
    raise UserError(
      f"the loss is {loss} in epoch {epoch}, which ends at step {step}; {kept}. Try a lower"
      " optimizer.learning_rate or, with K-FAC, a higher optimizer.damping"
    )
