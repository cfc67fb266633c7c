"""Numbers in the state of an optimizer, for a row of metrics."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mixer_jax.optim import GraftState, InTurnState, QuasiNewtonState
from mixer_jax.optim.adaptive_damping import LevenbergMarquardtState
from mixer_jax.optim.gauss_newton import GaussNewtonState
from mixer_jax.optim.graft import SIDES
from mixer_jax.optim.hessian_free import HessianFreeState
from mixer_jax.optim.quadratic import ByModelState
from mixer_jax.optimizers.schedules import Schedule

# Fields of states that rows show, and their names there.
_CHOSEN = {
  LevenbergMarquardtState: {"damping": "damping"},
  GaussNewtonState: {"damping": "damping"},
  HessianFreeState: {"damping": "damping", "iterations": "iterations"},
  QuasiNewtonState: {"step_size": "step_size", "failed": "failed_searches"},
}


def given(opt_state: Any, multiplier: Schedule) -> dict[str, float]:
  """The learning rates and dampings of the last update, by name; of a grafted pair, by "SIDE.name".

  They are in the state of `build.build`, so that runs which differ in these alone have one program. Of
  optimizers in turn they are those of the one whose turn it was.
  """
  kinds, found = (GraftState, InTurnState, optax.InjectStatefulHyperparamsState), {}
  for part in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds)):
    if isinstance(part, GraftState):
      for side in SIDES:
        own = given(getattr(part, side), multiplier)
        found |= {f"{side}.{name}": x for name, x in own.items()}
    elif isinstance(part, InTurnState):
      found |= given(part.states[int(part.turn)], multiplier)
    elif isinstance(part, kinds):
      rate = part.hyperparams["learning_rate"] * multiplier(jnp.maximum(part.count - 1, 0))
      found |= part.hyperparams | {"learning_rate": rate}
  return {name: float(x) for name, x in found.items()}


def chosen(opt_state: Any) -> dict[str, float]:
  """The numbers that an optimizer chose for itself, by name; {}: it chose none.

  "damping" is that of the next update; "step_rate" and "step_momentum" are the coefficients of the
  last one, before the learning rate; "iterations" those of conjugate gradients; "step_size" the last
  step of a line search, and "failed_searches" how many in a row found no lower loss.
  """
  kinds, found = (ByModelState, InTurnState, *_CHOSEN), {}
  for part in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds)):
    if isinstance(part, InTurnState):
      found |= chosen(part.states[int(part.turn)])
    elif isinstance(part, ByModelState):
      found |= dict(zip(("step_rate", "step_momentum"), part.coefficients))
    elif isinstance(part, kinds):
      inner = chosen(part.inner) if hasattr(part, "inner") else {}
      own = _CHOSEN[type(part)].items()
      found |= inner | {name: getattr(part, field) for field, name in own}
  return {name: float(x) for name, x in found.items()}
