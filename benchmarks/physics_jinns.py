"""jinns on the problems of `physics_peers`, by `jinns.solve` as its notebooks use it."""

import itertools
from typing import Any

import equinox as eqx
import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import jinns
from jinns.data import PDENonStatioBatch, PDEStatioBatch
from jinns.solver import GetJinnsVariableName
import jinns.validation
import numpy as np

from benchmarks import physics_peers, physics_problems

MOST = 200_000  # updates; time ends a run


def run(options: Any, record: Any, optimizer: str) -> None:
  jax.config.update("jax_enable_x64", True)
  problem = record.problem
  kind = "PDEStatio" if problem.name == "poisson" else "PDENonStatio"
  u, params = _net(options, kind)
  loss = _loss(problem.name, u, params)
  points = _batch(problem)

  class Points(jinns.data._AbstractDataGenerator.AbstractDataGenerator):
    """The same points each time."""

    batch: Any
    rar_parameters: None = None

    def get_batch(self):
      return self, self.batch

  class Watch(jinns.validation.AbstractValidationModule):
    """Evaluates where it is due, and ends the run when time is up."""

    call_every: int = 1

    def __call__(self, params):
      layers = [(x.weight.T, x.bias) for x in params.nn_params.layers if hasattr(x, "weight")]
      due = io_callback(lambda _: np.bool_(record.due()), _BOOL, layers[-1][1])
      value = jax.lax.cond(due, lambda: loss(params, points)[0], lambda: jnp.zeros(()))
      over = io_callback(_told, _BOOL, due, value, layers)
      return self, over, value, jnp.array(False)

  def _told(due, value, layers):
    layers = jax.tree.map(np.asarray, layers)
    values = lambda x: physics_peers.tanh_net(layers, x)
    return np.bool_(due and record.row(values, lambda: value))

  tx, extra = _optimizers()[optimizer]
  jinns.solve(
    n_iter=MOST,
    init_params=params,
    data=Points(points),
    loss=loss,
    optimizer=tx,
    validation=Watch(),
    verbose=False,
    extra_optax_args_and_kwargs=extra,
  )


_BOOL = jax.ShapeDtypeStruct((), np.bool_)


def _net(options: Any, kind: str) -> tuple[Any, Any]:
  sizes = [2, *options.hidden, 1]
  layers = [(eqx.nn.Linear, a, b) for a, b in itertools.pairwise(sizes)]
  listed = [x for layer in layers for x in (layer, (jax.nn.tanh,))][:-1]
  u, start = jinns.nn.PINN_MLP.create(key=jax.random.key(0), eqx_list=tuple(listed), eq_type=kind)
  wanted = physics_peers.layers_of(options)
  arrays = [jnp.asarray(x) for kernel, bias in wanted for x in (kernel.T, bias)]
  place = lambda net: [x for layer in net.layers[::2] for x in (layer.weight, layer.bias)]
  start = eqx.tree_at(place, start, arrays)
  nu = {"nu": jnp.array(physics_problems.VISCOSITY)}
  return u, jinns.parameters.Params(nn_params=start, eq_params=nu)


def _loss(name: str, u: Any, params: Any) -> Any:
  """With the weights that make jinns's sum over sides the mean of all boundary points."""

  class Poisson(jinns.loss.PDEStatio):
    def equation(self, x, u, params):
      force = 2 * jnp.pi**2 * jnp.prod(jnp.sin(jnp.pi * x))
      return jnp.atleast_1d(jinns.loss.laplacian_rev(x, u, params) + force)

  common = dict(u=u, params=params, boundary_condition=jinns.loss.Dirichlet())
  if name == "poisson":
    weights = jinns.loss.LossWeightsPDEStatio(dyn_loss=1.0, boundary_loss=0.25)
    return jinns.loss.LossPDEStatio(dynamic_loss=Poisson(), loss_weights=weights, **common)
  weights = jinns.loss.LossWeightsPDENonStatio(
    dyn_loss=1.0, boundary_loss=0.5, initial_condition=1.0
  )
  return jinns.loss.LossPDENonStatio(
    dynamic_loss=jinns.loss.BurgersEquation(),
    initial_condition_fun=lambda x: -jnp.sin(jnp.pi * x[0]),
    loss_weights=weights,
    **common,
  )


def _batch(problem: Any) -> Any:
  """Sides are the last axis: [points of a side, 2, sides]."""
  sides = np.stack(np.split(problem.points["boundary"], 4 if problem.name == "poisson" else 2), -1)
  parts = dict(
    domain_batch=jnp.asarray(problem.points["interior"]), border_batch=jnp.asarray(sides)
  )
  if problem.name == "poisson":
    return PDEStatioBatch(**parts)
  return PDENonStatioBatch(initial_batch=jnp.asarray(problem.points["initial"][:, 1:]), **parts)


def callback_value_fn(params, batch, loss):
  return loss.evaluate(params, batch)[0]


def callback_grad_fn(params, batch, loss):
  return loss.ponderate_and_sum_gradient(loss.values_and_grads(params, batch)[1])


def _optimizers() -> dict[str, Any]:
  """Each with the extra arguments that jinns's notebooks give it."""
  variables = dict(value="train_loss_value", grad_pt="grads", batch="batch", loss="loss")
  extra = {key: GetJinnsVariableName(name) for key, name in variables.items()}
  extra |= dict(value_fn=callback_value_fn, grad_fn=callback_grad_fn)
  return {
    "natural_gradient": (jinns.optimizers.vanilla_ngd(), None),
    "ssbroyden": (jinns.optimizers.scale_by_SSBroyden_family(), extra),
  }
