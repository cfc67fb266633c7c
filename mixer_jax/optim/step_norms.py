"""Lengths of the two sides of a grafted step, by kind of layer.

The K-FAC study explains its Table 4 by the implicit step size; these numbers are the
subject of that explanation.
"""

import collections
from typing import Any, Callable

import jax
import jax.numpy as jnp

from mixer_jax.optim.curvature.blocks import path_name
from mixer_jax.optim.graft import GraftState

SIDES = ("magnitude", "direction")


def squares(opt_state: Any, kind: Callable[[str], str]) -> dict[str, jax.Array]:
  """Squared lengths of both sides of the last step (traceable), by "norm.SIDE.KIND".

  `kind` maps a parameter's path to the kind of its layer. Each value is a float32 scalar,
  the sum over all parameters of the kind; there are none if `optim.graft` is not in use.
  """
  sums: dict[str, jax.Array] = collections.defaultdict(lambda: jnp.zeros((), jnp.float32))
  if isinstance(opt_state, GraftState):
    for side, norms in zip(SIDES, opt_state.norms):
      for path, norm in jax.tree_util.tree_leaves_with_path(norms):
        sums[f"norm.{side}.{kind(path_name(path))}"] += jnp.square(norm)
  return dict(sums)
