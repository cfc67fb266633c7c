"""Mistakes of a caller that would be silently wrong or hard to read: each names its argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from tests.optim.small_net import curvature, loss, predict, problem

PARAMS, BATCH = problem()
KEY = jax.random.key(0)
GIVEN = dict(batch=BATCH, rng=KEY)
OF = curvature(PARAMS, BATCH)
FACTORLESS = optim.Likelihood(lambda key, y: y, lambda y, t: y - t)
SGD = optim.sgd(0.1)


def updated(tx, *told, **given):
  """An update with these arguments alone."""
  return tx.update(PARAMS, tx.init(PARAMS), *told, **given)


def of(**options):
  return functools.partial(curvature, PARAMS, BATCH, **options)


def several(weights, tokens=False):
  """EK-FAC with moments of batches, of two outputs with likelihoods of these weights."""

  def both(params, batch):
    y = predict(params, batch)[0]
    return {"a": y, "b": jnp.stack([y, y], axis=1) if tokens else 2 * y}

  likelihood = {name: (w, "categorical") for name, w in zip("ab", weights)}
  made = optim.Curvature(both, PARAMS, BATCH, likelihood=likelihood)
  return updated(optim.scale_by_ekfac(made), PARAMS, **GIVEN)


def split_over_explicit_axes():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  optim.soap(0.1).init({"wide": jax.device_put(jnp.ones((8, 2)), spread)})


def masked_without_all_parameters():
  labels = {"one": "a", "two": "b"}
  parts = {"a": optim.scale_by_kfac(OF), "b": optax.identity()}
  updated(optax.multi_transform(parts, labels), PARAMS, **GIVEN)


def part(tx):
  """An update of one of two layers whose state is of both."""
  return tx.update({"one": PARAMS["one"]}, tx.init(PARAMS), PARAMS, **GIVEN)


FACTORED_QR = dict(damping_type="factored", decomposition=optim.Decomposition("qr"))
MISTAKES = {
  # Curvature
  "estimation.*mc": of(estimation="mc"),
  "expand": of(token_averaging="none"),
  "mesh and axis_name": of(axis_name="data", mesh=jax.make_mesh((1,), ("data",))),
  "unpreconditioned.*layers_2": of(unpreconditioned="layers_2"),
  "axis_name is 'data'": lambda: updated(optim.kfac(0.1, of(axis_name="data")()), PARAMS, **GIVEN),
  # Arguments of an update, and trees of other parameters
  "params": lambda: updated(optim.scale_by_kfac(OF), **GIVEN),
  "batch": lambda: updated(optim.scale_by_kfac(OF), PARAMS, rng=KEY),
  "rng": lambda: updated(optim.scale_by_kfac(OF), PARAMS, batch=BATCH),
  "model_params": masked_without_all_parameters,
  "params/one": lambda: optim.kfac(0.1, OF).init({"params": PARAMS}),
  "two": lambda: part(optim.kfac_adam(0.1, OF)),
  "needs the parameters": lambda: updated(optim.in_turn([SGD], [])),
  "value_fn=lambda params: loss": lambda: updated(optim.lbfgs(), PARAMS),
  "the loss as a function": lambda: updated(
    optim.levenberg_marquardt(SGD, OF, 0.1), PARAMS, batch=BATCH
  ),
  "line_search|value_fn": lambda: updated(
    optim.gauss_newton(OF, line_search=True), PARAMS, **GIVEN
  ),
  # Options that exclude each other, and names
  "damping_type.*tikhonov": lambda: optim.scale_by_kfac(OF, damping_type="tikhonov"),
  "refresh.*damping_type": lambda: optim.scale_by_kfac(OF, **FACTORED_QR),
  "multiple of.*factor_period": lambda: optim.scale_by_ekfac(
    OF, moments="examples", inverse_period=15
  ),
  "outputs of equally many rows": lambda: several((1.0, 1.0), tokens=True),
  "one weight for the likelihoods": lambda: several((0.5, 2.0)),
  "no matrix is left for Muon": lambda: optim.muon(1.0, adam_paths="kernel").init(PARAMS),
  "no parameter is left": lambda: optim.scale_by_kfac_muon(
    of(unpreconditioned="^one/")(), adam_paths="^two/"
  ),
  "'dfp'; allowed: ssbroyden": lambda: optim.ssbroyden(method="dfp"),
  "20,100 parameters": lambda: optim.ssbroyden().init({"w": np.zeros((201, 100), np.float32)}),
  "scope is 'layer'": lambda: optim.graft(SGD, SGD, scope="layer"),
  "2 optimizers": lambda: optim.in_turn([SGD, SGD], [3, 5]),
  "that rise": lambda: optim.in_turn([SGD] * 3, [4, 4]),
  "static_args": lambda: optax.inject_hyperparams(optim.soap)(0.1).init(PARAMS),
  "wide is split": split_over_explicit_axes,
  # Gauss-Newton
  "residuals.*hessian_free": lambda: updated(optim.gauss_newton(OF, max_rows=10), PARAMS, **GIVEN),
  "targets": lambda: updated(
    optim.gauss_newton(optim.Curvature(lambda p, b: predict(p, b)[0], PARAMS, BATCH)),
    *(PARAMS,),
    **GIVEN,
  ),
  "factor": lambda: optim.hessian_free(
    optim.Curvature(predict, PARAMS, BATCH, likelihood=FACTORLESS)
  ),
  # Gradients of examples
  "chunk is 0": lambda: optim.per_example_grads(loss, PARAMS, BATCH, chunk=0),
  "all need one length": lambda: optim.per_example_grads(
    loss, PARAMS, BATCH | {"y": BATCH["y"][:3]}
  ),
}


@pytest.mark.parametrize("named", MISTAKES)
def test_a_mistake_is_named(named):
  with pytest.raises(ValueError, match=f"(?s){named}"):
    MISTAKES[named]()
