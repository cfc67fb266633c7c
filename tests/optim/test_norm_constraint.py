"""K-FAC's norm constraint: the length of a step in the metric of the curvature."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import optim
from tests.optim.small_net import close, first, loss, predict, problem
from tests.optim.two_layers import matrix


def test_norm_constraint_bounds_the_step():
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  bounds = dict(norm_constraint=1e-6, learning_rate=0.1)
  free = first(optim.scale_by_kfac(predict, params, batch), params, batch)
  bound = first(optim.scale_by_kfac(predict, params, batch, **bounds), params, batch)
  inner = sum(jnp.vdot(v, g) for v, g in zip(jax.tree.leaves(free), jax.tree.leaves(grads)))
  scale = np.sqrt(1e-6 / (0.1**2 * inner))
  assert scale < 1
  close(bound, jax.tree.map(lambda v: v * scale, free), rtol=1e-5)


def test_the_norm_constraint_leaves_plain_gradients_alone():
  params, batch = problem()
  grads = jax.grad(loss)(params, batch)
  make = functools.partial(optim.scale_by_kfac, predict, params, batch, plain="^two/")
  free = first(make(), params, batch)
  bound = first(make(norm_constraint=1e-6, learning_rate=0.1), params, batch)
  inner = np.sum(matrix(free["one"]) * matrix(grads["one"]))
  close(bound["two"], grads["two"], rtol=1e-6)
  close(bound["one"], jax.tree.map(lambda v: v * np.sqrt(1e-6 / (0.01 * inner)), free["one"]), 1e-5)


def test_a_constraint_of_zero_makes_no_step_at_any_rate():
  """At the first rate of a warm-up, 0, too."""
  params, batch = problem()
  for rate in (0.0, 0.1):
    tx = optim.scale_by_kfac(predict, params, batch, norm_constraint=0.0, learning_rate=rate)
    close(first(tx, params, batch), jax.tree.map(jnp.zeros_like, params), 0)


def test_the_norm_constraint_holds_at_any_rate():
  """The step, rate times update, is as long at rates whose squares leave float32."""
  params, batch = problem()
  steps = []
  for rate in (1e3, 1e30):
    tx = optim.scale_by_kfac(predict, params, batch, norm_constraint=1e-2, learning_rate=rate)
    steps.append(jax.tree.map(lambda v, rate=rate: rate * v, first(tx, params, batch)))
  close(*steps, rtol=1e-4)
  assert max(np.abs(x).max() for x in jax.tree.leaves(steps)) > 1e-3
  schedule = lambda count: -1e3  # a step up the loss
  ascending = optim.scale_by_kfac(
    predict, params, batch, norm_constraint=1e-2, learning_rate=schedule
  )
  turned = jax.tree.map(lambda v: -1e3 * v, first(ascending, params, batch))
  close(turned, jax.tree.map(jnp.negative, steps[0]), rtol=1e-6)
