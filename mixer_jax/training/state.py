"""The state of training: everything that a step changes."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.optim.graft import squared_norms
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.tasks import freeze
from mixer_jax.tasks import metrics as metrics_lib
from mixer_jax.tasks import task as task_lib

# The collections that are averaged, see `config.ema_decay`, and the names of their averages. Batch
# statistics are among them: those of the last parameters would not fit averaged ones.
AVERAGES = {"params": "average", "batch_stats": "average_batch_stats"}


@flax.struct.dataclass
class TrainState:
  """A pytree of all arrays that a step changes; a checkpoint holds this and no more."""

  step: jax.Array  # steps so far, shape=(), dtype=int32
  # "params", float32 or float64, and collections that the optimizer does not train: the task's own and
  # moving averages (see `AVERAGES`).
  variables: dict[str, Any]
  opt_state: Any  # the optimizer's state, curvature factors included
  key_data: jax.Array  # of the run's random key, uint32; a step folds its number into it
  metrics: dict[str, Any]  # sums over the steps since the last evaluation, see `tasks.metrics`
  skipped: jax.Array  # steps so far that were not finite and left all else as it was, int32
  failed: jax.Array  # the same, in a row up to now
  restores: jax.Array  # how often the run went back, int32; it decides the order of examples

  @property
  def params(self) -> Any:
    return self.variables["params"]


def evaluation_variables(variables: dict[str, Any]) -> dict[str, Any]:
  """Returns the variables that are evaluated: averages replace their originals, frozen ones are joined."""
  rest = {k: v for k, v in variables.items() if k not in AVERAGES.values()}
  rest |= {own: variables[name] for own, name in AVERAGES.items() if name in variables}
  return dict(freeze.joined(rest))


def averages(variables: dict[str, Any]) -> dict[str, Any]:
  """Returns the collections of averages as a run begins with them."""
  return {name: variables[own] for own, name in AVERAGES.items() if own in variables}


def init_state(run: Experiment, variables: Any = None) -> TrainState:
  """Returns the state before step 0, of given variables on the host or of fresh ones."""
  init = functools.partial(_init, run)
  keys = task_lib.seed_keys(run.config.seed)
  where = mesh_lib.stored(run.mesh, jax.eval_shape(init, keys, variables))
  return jax.jit(init, out_shardings=where)(keys, variables)


def state_shapes(run: Experiment) -> TrainState:
  """Shapes of the state with their shardings, to restore onto."""
  keys = task_lib.seed_keys(run.config.seed)
  shapes = jax.eval_shape(functools.partial(_init, run), keys, None)
  placed = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
  return jax.tree.map(placed, shapes, mesh_lib.stored(run.mesh, shapes))


def _init(run: Experiment, keys: tuple[jax.Array, jax.Array], variables: Any) -> TrainState:
  init_key, run_key = keys
  variables = dict(run.task.init(init_key) if variables is None else variables)
  if taken := sorted(variables.keys() & AVERAGES.values()):
    task = run.config.task
    raise UserError(f"task {task} has a collection {taken[0]!r}, a name of the train state")
  if run.config.ema_decay:
    variables |= averages(variables)
  opt_state = run.optimizer.init(variables["params"])
  loss, aux = run.loss_shapes
  norms = jax.eval_shape(lambda: squared_norms(opt_state, run.task.layer_kind))
  shapes = {"loss": loss, **aux.metrics} | {
    name: metrics_lib.RootMeanSquare.empty() for name in norms
  }
  zero, key_data = jnp.zeros((), jnp.int32), jax.random.key_data(run_key)
  metrics = metrics_lib.empty(shapes)
  return TrainState(zero, variables, opt_state, key_data, metrics, zero, zero, zero)


def without_metrics(run: Experiment, state: TrainState) -> TrainState:
  """The state with sums of metrics that start anew."""
  empty = metrics_lib.empty(state.metrics)
  return state.replace(metrics=mesh_lib.place(empty, mesh_lib.replicated(run.mesh)))
