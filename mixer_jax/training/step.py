"""One step of the optimizer, and the compiled program of some steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mixer_jax.data import feed
from mixer_jax.experiment import Experiment
from mixer_jax.optim.graft import squared_norms
from mixer_jax.runtime import draws
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.tasks import metrics as metrics_lib
from mixer_jax.training import nonfinite
from mixer_jax.training.state import TrainState, averages, state_shapes


def step_keys(state: TrainState) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The keys of a step: preparing examples, the loss, targets sampled for K-FAC."""
  key = jax.random.fold_in(draws.wrap(state.key_data), state.step)
  return tuple(jax.random.split(key, 3))


def update(run: Experiment, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
  """One step of the optimizer on a batch that `run.task.prepare` has made (traceable).

  Returns the state and `nonfinite.checks`. A step that fails them adds nothing to the metrics and,
  if `config.on_nonfinite` is "skip", leaves variables and optimizer state as they were.
  """
  _, loss_key, target_key = step_keys(state)
  whole = mesh_lib.gathered(run.mesh, state.variables)
  loss = functools.partial(_loss, run, batch=batch, key=loss_key)
  (value, grads), metrics, changed = loss(whole, gradient=True)
  collections = {k: whole[k] for k in run.variable_shapes if k != "params"}
  extra = dict(batch=(batch, collections), rng=target_key, model_params=whole["params"])
  # For optimizers that try a step out, by the same batch and draws; it costs others nothing.
  extra["value"] = value
  extra["value_fn"] = lambda params: loss({**whole, "params": params}, gradient=False)[0]
  updates, opt_state = run.optimizer.update(grads, state.opt_state, state.params, **extra)
  if run.config.layer_decay != 1:
    updates = jax.tree.map(jnp.multiply, updates, run.update_scales)
  params = optax.apply_updates(state.params, updates)
  variables = {**state.variables, **changed, "params": params}
  if decay := run.config.ema_decay:
    mix = lambda old, new: decay * old + (1 - decay) * new
    for name, new in averages(variables).items():
      variables[name] = jax.tree.map(mix, state.variables[name], new)
  checks = nonfinite.checks(metrics, variables, opt_state)
  passed = checks.all()
  for name, square in squared_norms(opt_state, run.task.layer_kind).items():
    metrics[name] = metrics_lib.RootMeanSquare(square, jnp.ones(()))
  if_passed = functools.partial(jax.tree.map, functools.partial(jnp.where, passed))
  kept = if_passed(metrics_lib.merge(state.metrics, metrics), state.metrics)
  if run.config.on_nonfinite == "skip":
    variables = if_passed(variables, state.variables)
    opt_state = if_passed(opt_state, state.opt_state)
  missed = 1 - passed.astype(jnp.int32)
  counts = dict(skipped=state.skipped + missed, failed=(state.failed + 1) * missed)
  state = state.replace(step=state.step + 1, metrics=kept, **counts)
  return state.replace(variables=variables, opt_state=opt_state), checks


def _loss(run: Experiment, variables: Any, batch: Any, key: jax.Array, gradient: bool):
  """Returns the mean loss (with its gradient, if asked for), metrics and changed collections.

  Each part of an accumulated batch counts by its weights.
  """
  parts, params = run.config.accum_steps, variables["params"]

  def mean_loss(params, variables, batch, key):
    loss, aux = run.task.loss({**variables, "params": params}, batch, key)
    weight = jax.lax.stop_gradient(loss.weight)
    # A model may compute averages in another precision than they are kept in.
    own = {name: variables[name] for name in aux.collections}
    leaves, structure = jax.tree.flatten(own)
    pairs = zip(jax.tree.leaves(dict(aux.collections)), leaves, strict=True)
    kept = structure.unflatten(jnp.asarray(new, old.dtype) for new, old in pairs)
    # The loss is in the log whether or not the task has it among its metrics.
    metrics = {"loss": jax.lax.stop_gradient(loss), **aux.metrics}
    aux = aux._replace(collections=kept, metrics=metrics)
    return (loss.total / weight if parts == 1 else loss.total), (weight, aux)

  def derived(*args):
    if not gradient:
      return mean_loss(*args)
    (value, aux), grads = jax.value_and_grad(mean_loss, has_aux=True)(*args)
    return (value, grads), aux

  if parts == 1:
    value, (_, aux) = derived(params, variables, batch, key)
    return value, dict(aux.metrics), aux.collections

  def add_part(carry, part):
    sums, weights, collections = carry
    value, (weight, aux) = derived(params, {**variables, **collections}, *part)
    sums = jax.tree.map(jnp.add, sums, value)
    return (sums, weights + weight, {**collections, **aux.collections}), dict(aux.metrics)

  # Part i takes every parts-th example, so all devices share each part.
  split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
  own = {k: variables[k] for k in run.variable_shapes if k != "params"}
  total, weight = (jnp.zeros((), x.dtype) for x in jax.tree.leaves(run.loss_shapes[0]))
  zeros = (total, jax.tree.map(jnp.zeros_like, params)) if gradient else total
  start, keys = (zeros, weight, own), jax.random.split(key, parts)
  (sums, weight, changed), each = jax.lax.scan(add_part, start, (split, keys))
  of_parts = (jax.tree.map(lambda x, i=i: x[i], each) for i in range(parts))
  metrics = functools.reduce(metrics_lib.merge, of_parts)
  return jax.tree.map(lambda x: x / weight, sums), metrics, changed


def make_train_steps(run: Experiment):
  """The jitted program of training, which donates the state.

  It takes a state, a window of batches (see `data.feed`), and returns the state after the
  window's steps and `nonfinite.checks` of each, [steps, 2].
  """
  order = run.order

  def step(examples, state, rows):
    examples = order.cut(feed.take(examples, rows, mesh_lib.batched(run.mesh)))
    return update(run, state, run.task.prepare(step_keys(state)[0], examples, train=True))

  stored = jax.tree.map(lambda x: x.sharding, state_shapes(run))
  out_shardings = stored, mesh_lib.replicated(run.mesh)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=out_shardings)
  def train_steps(state, examples, rows):
    steps = functools.partial(step, examples)
    if len(jax.tree.leaves(rows)[0]) == 1:  # a loop of one step is still a loop to XLA
      state, checks = steps(state, jax.tree.map(lambda x: x[0], rows))
      return state, checks[None]
    return jax.lax.scan(steps, state, rows)

  return train_steps
