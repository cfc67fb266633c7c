"""K-FAC's norm constraint: the length of a step in the metric of the curvature."""

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import optim
from tests.optim.small_net import close, curvature, first, loss, problem
from tests.optim.two_layers import matrix


def bounded(of, limit, rate):
  return optim.constrain_norm(optim.scale_by_kfac(of), of, limit, rate)


def test_the_norm_constraint_leaves_plain_gradients_alone():
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  of = curvature(params, batch, unpreconditioned="^two/")
  free = first(optim.scale_by_kfac(of), params, batch)
  bound = first(bounded(of, 1e-6, 0.1), params, batch)
  inner = np.sum(matrix(free["one"]) * matrix(grads["one"]))
  close(bound["two"], grads["two"], rtol=1e-6)
  close(bound["one"], jax.tree.map(lambda v: v * np.sqrt(1e-6 / (0.01 * inner)), free["one"]), 1e-5)


def test_a_constraint_of_zero_makes_no_step_at_any_rate():
  """At the first rate of a warm-up, 0, too."""
  params, batch = problem()
  tx = bounded(curvature(params, batch), 0.0, 0.0)
  close(first(tx, params, batch), jax.tree.map(jnp.zeros_like, params), 0)


def test_the_norm_constraint_holds_at_any_rate():
  """The step, rate times update, is as long at rates whose squares leave float32."""
  params, batch = problem()
  steps, of = [], curvature(params, batch)
  for rate in (1e3, 1e30):
    tx = bounded(of, 1e-2, rate)
    steps.append(jax.tree.map(lambda v, rate=rate: rate * v, first(tx, params, batch)))
  close(*steps, rtol=1e-4)
  assert max(np.abs(x).max() for x in jax.tree.leaves(steps)) > 1e-3
  schedule = lambda count: -1e3  # a step up the loss
  ascending = bounded(of, 1e-2, schedule)
  turned = jax.tree.map(lambda v: -1e3 * v, first(ascending, params, batch))
  close(turned, jax.tree.map(jnp.negative, steps[0]), rtol=1e-6)
