"""Weights of the terms of a loss that make their gradients equally long.

Wang, Teng and Perdikaris, 2021, https://arxiv.org/abs/2001.04536, in the form of Wang et al., 2023,
https://arxiv.org/abs/2308.08468, Section 5.2: every `period` steps the weight of a term becomes
decay times itself plus 1 - decay times (the sum over terms of |gradient|) / |its gradient|.
"""

from typing import Any, Callable, Mapping

import jax
import jax.numpy as jnp
import optax

COLLECTION = "balance"
_TINY = 1e-30


def start(names: Any, dtype: Any) -> dict[str, Any]:
  """The collection at the start: the number of steps and equal weights."""
  ones = {name: jnp.ones((), dtype) for name in names}
  return {"count": jnp.zeros((), jnp.int32), "weights": ones}


def renewed(
  state: Mapping[str, Any],
  params: Any,
  means: Callable[[Any], Mapping[str, jax.Array]],
  period: int,
  decay: float,
) -> dict[str, Any]:
  """The state after a step; `means` maps parameters to the terms of the loss, not balanced."""
  params = jax.lax.stop_gradient(params)

  def weights():
    norms = {
      name: optax.tree.norm(jax.grad(lambda p, name=name: means(p)[name])(params))
      for name in state["weights"]
    }
    total = sum(norms.values())
    mix = lambda old, norm: decay * old + (1 - decay) * total / jnp.maximum(norm, _TINY)
    return {name: mix(old, norms[name]) for name, old in state["weights"].items()}

  due = state["count"] % period == 0
  kept = jax.lax.cond(due, weights, lambda: dict(state["weights"]))
  return {"count": state["count"] + 1, "weights": kept}
