"""A model's blocks one after the other: unrolled or scanned, rematerialised or not.

Unrolled, each block has a subtree of the parameters to itself, "MixerBlock_0",
"MixerBlock_1" and so on, as in the public weights. Scanned, they share one,
"MixerBlocks", whose arrays have a leading axis over the blocks: the program then
holds one block and a loop, and does not grow with the depth. `stacked` and
`unrolled` map trees from one layout to the other.
"""

import re
from typing import Any, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

# Those that a model has many of, all equal: they can be scanned.
SCANNABLE = ("MixerBlock", "ResMlpBlock", "GmlpBlock")

_ONE = re.compile(rf"({'|'.join(SCANNABLE)})_(\d+)")
_ALL = re.compile(rf"({'|'.join(SCANNABLE)})s")


def apply(
  block: type[nn.Module],
  fields: dict[str, Any],
  x: jax.Array,
  *shared: Any,
  drop_rates: Sequence[float],
  train: bool,
  remat: bool,
  scan: bool,
) -> jax.Array:
  """Applies equal blocks to x; to be called in the compact method of a model.

  Args:
    block: their class, one of `SCANNABLE`.
    fields: of each of them.
    x: what the first one takes, and each one returns: [batch, tokens, channels].
    *shared: what all of them take after x.
    drop_rates: of stochastic depth, one a block.
    train: whether dropout and stochastic depth act.
    remat: keep only each block's input for the backward pass, which computes the rest
      again (Chen et al., 2016, https://arxiv.org/abs/1604.06174).
    scan: loop over one program of a block. Each still starts from random numbers of
      its own, by the rules of its own shapes.

  Returns:
    What the last block returns.
  """

  def call(module: nn.Module, x: jax.Array, rate: Any) -> jax.Array:
    run = lambda module, x: module(x, *shared, drop_rate=rate, train=train)
    # Inside a loop nothing can be merged with the forward pass, outside it must be kept from it.
    return nn.remat(run, prevent_cse=not scan)(module, x) if remat else run(module, x)

  name = block.__name__
  if not scan or not drop_rates:
    for i, rate in enumerate(drop_rates):
      x = call(block(**fields, name=f"{name}_{i}"), x, rate)
    return x
  drops = any(drop_rates)  # a rate of zero that is known needs no random numbers
  step = lambda module, x, rate: (call(module, x, rate if drops else 0.0), None)
  loop = nn.scan(
    step,
    variable_axes={"params": 0, "intermediates": 0},
    split_rngs={"params": True, "dropout": True},
    length=len(drop_rates),
  )
  return loop(block(**fields, name=f"{name}s"), x, jnp.asarray(drop_rates))[0]


def unrolled(tree: Any) -> Any:
  """Stacked blocks as one subtree each, wherever they are in a tree.

  Args:
    tree: parameters, or a tree of such trees as the state of an optimizer; arrays of
      NumPy or JAX. For shapes, use `jax.eval_shape`.

  Returns:
    The tree with "MixerBlock_0", "MixerBlock_1" and so on for "MixerBlocks"; the same
    if there is none.
  """
  return _where(_ALL, _unroll, tree)


def stacked(tree: Any) -> Any:
  """The inverse of `unrolled`.

  Raises:
    KeyError: a block is missing.
  """
  return _where(_ONE, _stack, tree)


def _where(pattern: re.Pattern, change: Any, tree: Any) -> Any:
  """Changes the dictionaries of a tree that have such a key."""
  found = lambda x: isinstance(x, dict) and any(pattern.fullmatch(str(key)) for key in x)
  return jax.tree.map(lambda x: change(x) if found(x) else x, tree, is_leaf=found)


def _unroll(params: dict[str, Any]) -> dict[str, Any]:
  result = {}
  for key, value in params.items():
    if match := _ALL.fullmatch(key):
      for i in range(len(jax.tree.leaves(value)[0])):
        result[f"{match[1]}_{i}"] = jax.tree.map(lambda x, i=i: x[i], value)
    else:
      result[key] = value
  return result


def _stack(params: dict[str, Any]) -> dict[str, Any]:
  result = {key: value for key, value in params.items() if not _ONE.fullmatch(key)}
  names = [match[1] for key in params if (match := _ONE.fullmatch(key))]
  for name in set(names):
    members = [params[f"{name}_{i}"] for i in range(names.count(name))]
    result[f"{name}s"] = jax.tree.map(_stack_arrays, *members)
  return result


def _stack_arrays(*arrays: Any) -> Any:
  return (np if isinstance(arrays[0], np.ndarray) else jnp).stack(arrays)
