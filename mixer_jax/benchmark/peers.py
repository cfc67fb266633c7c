"""Other people's optimizers on our models, to be measured against."""

from typing import Any, Callable

import jax
import optax

from mixer_jax.experiment import Experiment
from mixer_jax.no_tensorflow import without_tensorflow

with without_tensorflow():
  import kfac_jax

  from mixer_jax.optim import linen


def kfac_jax_step(run: Experiment, batch: Any) -> Callable[[], None]:
  """A step of `kfac_jax.Optimizer` at its defaults on one batch, again and again.

  Args:
    run: gives the model and the loss.
    batch: as `run.task.batch` makes it.

  Returns:
    A function that takes one step and waits for it.
  """

  problem = run.problem

  def loss(params, batch):
    with linen.registered_layers():
      logits, labels = problem.predict(params, batch)
    kfac_jax.register_softmax_cross_entropy_loss(logits, labels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  optimizer = kfac_jax.Optimizer(
    jax.value_and_grad(loss),
    l2_reg=0.0,
    value_func_has_aux=False,
    multi_device=False,
    num_burnin_steps=0,  # it would want a stream of batches
    layer_tag_to_block_ctor={
      variant: kfac_jax.RepeatedDenseKroneckerFactored for variant in ("dense", "patches")
    },
  )
  key = jax.random.key(0)
  params = jax.jit(run.task.init)(key)
  params = problem.layout.enter(params) if problem.layout else params
  state = optimizer.init(params, key, batch)
  fixed = dict(learning_rate=1e-3, momentum=0.9, damping=1e-3)

  def step() -> None:
    nonlocal params, state
    params, state, stats = optimizer.step(params, state, key, batch=batch, **fixed)
    jax.block_until_ready(stats)

  return step
