"""Lengths of the two sides of a grafted step, by kind of layer.

The K-FAC study explains its Table 4 by the implicit step size; these are the
numbers that the explanation is about.
"""

import re
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import optim
from mixer_jax.optim.blocks import path_name

SIDES = ("magnitude", "direction")
GROUPS = ("stem", "token_mixing", "channel_mixing", "norms", "head")

# The first pattern found in a parameter's path; the rest of a block mixes channels.
_PATTERNS = (
  ("stem", r"^(stem|class_token)/"),
  ("head", r"^head/"),
  ("norms", r"(norm\d?|LayerNorm_\d+|layer_scale_\d)/(scale|bias)$"),
  ("token_mixing", r"/(token_mixing|cross_patch\w*|spatial_gating|tiny_attention)/"),
)


def group(path: str) -> str:
  """The kind of layer, one of `GROUPS`, that a parameter belongs to.

  Args:
    path: as "MixerBlock_0/token_mixing/Dense_0/kernel".
  """
  return next((name for name, p in _PATTERNS if re.search(p, path)), "channel_mixing")


def squares(opt_state: Any) -> dict[str, jax.Array]:
  """Squared lengths of both sides of the last step (traceable).

  Args:
    opt_state: of the run's optimizer.

  Returns:
    "norm/SIDE/GROUP" to a float32 scalar, the sum of squares over all parameters
    of the group; empty if the optimizer is not `optim.graft`.
  """
  if not isinstance(opt_state, optim.GraftState):
    return {}
  sums: dict[str, jax.Array] = {}
  for side, norms in zip(SIDES, opt_state.norms):
    for path, norm in jax.tree_util.tree_leaves_with_path(norms):
      key = f"norm/{side}/{group(path_name(path))}"
      sums[key] = sums.get(key, 0.0) + jnp.square(norm)
  return sums


def joined(windows: Sequence[dict[str, jax.Array]]) -> dict[str, np.ndarray]:
  """What `squares` gave for each step, [steps] arrays, as one of all windows."""
  keys = windows[0] if windows else ()
  return {key: np.concatenate([np.asarray(w[key]) for w in windows]) for key in keys}


def root_mean(windows: Sequence[dict[str, jax.Array]]) -> dict[str, float]:
  """Root mean square over the steps of an epoch.

  Args:
    windows: what `squares` gave for each step, [steps] arrays; NaN of a step that
      was skipped, which does not count.
  """
  mean = lambda x: np.nanmean(x, dtype=np.float64)
  return {key: float(np.sqrt(mean(x))) for key, x in joined(windows).items()}
