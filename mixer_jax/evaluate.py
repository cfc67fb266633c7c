"""Exact metrics of a test split, in training and from a checkpoint.

python -m mixer_jax.evaluate --workdir=DIR [--checkpoint=best|latest|STEP]
"""

import functools
import math
from typing import Any, NamedTuple

from absl import flags
import jax

from mixer_jax import checkpoint, cli, compilation, experiment, sharding, workdir
from mixer_jax.data import batches
from mixer_jax.errors import UserError


class Evaluator:
  """Metrics over exactly the examples of the test split, each counted once.

  Args:
    run: the experiment whose test split is used.
  """

  def __init__(self, run: experiment.Experiment):
    split, task = run.dataset.test, run.task
    self._task = task
    self._everywhere = sharding.replicated(run.mesh)
    devices = run.mesh.size
    # A batch larger than the split would be padding.
    size = min(run.config.eval_batch_size, -(-len(split) // devices) * devices)
    batched = sharding.batched(run.mesh)
    ids, self._masks = batches.test_indices(len(split), size)
    self._feed = batches.Feed(split, lambda _: ids, batched)

    @functools.partial(jax.jit, out_shardings=self._everywhere)
    def add_batch(totals, params, examples, rows, mask):
      rows = jax.tree.map(lambda x: x[0], rows)
      images, labels = batches.take(examples, rows, batched)
      batch = task.batch(None, images, labels, train=False)
      return totals.merge(task.evaluate(sharding.gathered(run.mesh, params), batch, mask))

    self._add_batch = add_batch

  def __call__(self, params: Any) -> dict[str, float]:
    """Mean loss in nats, top1 and top5 in [0, 1]."""
    totals = sharding.place(self._task.test_metrics.empty(), self._everywhere)
    for window, mask in zip(self._feed.windows(1, 1), self._masks):
      totals = self._add_batch(totals, params, *window, mask)
    self._feed.close()
    return {name: float(value) for name, value in totals.compute().items()}


class Restored(NamedTuple):
  """A run with the parameters of one of its checkpoints.

  Attributes:
    run: ready to evaluate or predict, on the devices that there are now.
    params: the parameters.
    step: optimizer steps they were trained for.
    epoch: epochs finished by then.
  """

  run: experiment.Experiment
  params: Any
  step: int
  epoch: int


def restore(path: str, which: str = "best", data_dir: str | None = None) -> Restored:
  """Restores a checkpoint's parameters.

  Args:
    path: the run's directory.
    which: "best", "latest" or a step.
    data_dir: replaces the config's `data.dir`.

  Raises:
    UserError: no run, no such checkpoint, or no data.
  """
  directory = workdir.existing(path)
  config = workdir.load_config(directory)
  # What trained the run need not be what evaluates it.
  config.update(require_accelerator=False, accum_steps=1)
  mesh, available = config.mesh, jax.device_count()
  if mesh.data * mesh.model > available or (mesh.data == -1 and available % mesh.model):
    mesh.update(data=-1, model=1)
  devices = math.prod(sharding.mesh_shape(config))
  config.eval_batch_size = -(-config.eval_batch_size // devices) * devices
  config.batch_size = devices
  if data_dir is not None:
    config.data.dir = data_dir
  saved = checkpoint.Checkpoints(directory, read_only=True)
  step = saved.find(which)
  run = experiment.build(config)
  shapes = checkpoint.template(run.param_shapes, sharding.replicated(run.mesh))
  params, progress = saved.restore_params(step, shapes)
  return Restored(run, params, step, progress.epoch)


def evaluate(path: str, which: str, data_dir: str | None = None) -> dict[str, float]:
  """Restores a checkpoint's parameters and evaluates them.

  Returns:
    loss, top1 and top5, equal to what training logged for this step.

  Args and errors as for `restore`.
  """
  run, params, step, epoch = restore(path, which, data_dir)
  metrics = Evaluator(run)(params)
  print(
    f"{workdir.existing(path)} step {step} (epoch {epoch}) on {len(run.dataset.test)} test"
    f" images of {run.dataset.name}"
  )
  return metrics


def main(argv: list[str]) -> None:
  del argv
  options = flags.FLAGS
  if not options.workdir:
    raise UserError("--workdir is missing; it names the directory of a run")
  compilation.keep_in(options.compilation_cache)
  metrics = evaluate(options.workdir, options.checkpoint, options.data_dir)
  print(
    f"test top-1 {metrics['top1']:.4%}  top-5 {metrics['top5']:.4%}  loss {metrics['loss']:.6f}"
  )


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Directory of the run.")
  flags.DEFINE_string("checkpoint", "best", '"best", "latest" or a step.')
  flags.DEFINE_string("data_dir", None, "Where the data are now; default: as trained.")
  flags.DEFINE_string(
    "compilation_cache",
    None,
    "Directory of compiled programs, '' for none; see docs/compilation.md.",
  )
  cli.run(main)
