"""A model's blocks one after the other: unrolled or scanned, rematerialised or not.

Unrolled, each block has a subtree of the parameters to itself, "MixerBlock_0", "MixerBlock_1" and
so on, as in the public weights. Scanned, they share one, "MixerBlocks", whose arrays have a leading
axis over the blocks: the program then holds one block and a loop, and does not grow with the depth.
`stacked` and `unrolled` map trees from one layout to the other.
"""

import dataclasses
import re
from typing import Any, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

# Blocks that a model has many of, all equal: they can be scanned.
SCANNABLE = ("MixerBlock", "ResMlpBlock", "GmlpBlock", "TransformerBlock", "GalerkinBlock")

_ONE = re.compile(rf"({'|'.join(SCANNABLE)})_(\d+)")
_ALL = re.compile(rf"({'|'.join(SCANNABLE)})s")


def fields_of(model: nn.Module, block: type[nn.Module]) -> dict[str, Any]:
  """The fields of a class of blocks that a model has as well, with the model's values."""
  names = [f.name for f in dataclasses.fields(block) if f.name not in ("parent", "name")]
  return {name: getattr(model, name) for name in names if hasattr(model, name)}


def apply(
  model: Any,
  block: type,
  x: jax.Array,
  *shared: Any,
  train: bool,
  drop_rates: list[float] | None = None,
  **own: Any,
) -> jax.Array | list[jax.Array]:
  """Applies equal blocks to x, in the compact method of a model.

  Returns the result of the last block or, for a model with `feature_blocks`, the list of the
  results of these blocks.

  The model's `remat` keeps only each block's input for the backward pass, which computes the rest
  again (Chen et al., 2016, https://arxiv.org/abs/1604.06174). Its `scan_blocks` loops over one
  program of a block; each still starts from random numbers of its own, by the rules of its own
  shapes.

  Args:
    model: the calling module; gives blocks its fields of the same names.
    block: class of the blocks, one of `SCANNABLE`.
    x: tokens, [batch, tokens, channels]; each block returns the same shape.
    *shared: further arguments of all blocks, after x.
    train: whether to drop.
    drop_rates: of stochastic depth, one for each block; None: the model's rate for all.
    **own: fields of the blocks that the model does not have.
  """
  fields, remat, scan = fields_of(model, block) | own, model.remat, model.scan_blocks
  drop_rates = [model.stochastic_depth] * model.num_blocks if drop_rates is None else drop_rates

  def call(module: nn.Module, x: jax.Array, rate: Any) -> jax.Array:
    run = lambda module, x: module(x, *shared, drop_rate=rate, train=train)
    # Inside a loop nothing can be merged with the forward pass, outside it must be kept from it.
    return nn.remat(run, prevent_cse=not scan)(module, x) if remat else run(module, x)

  name, chosen = block.__name__, getattr(model, "feature_blocks", ())
  drops = any(drop_rates)  # a known rate of zero needs no random numbers

  def step(module, x, rate):
    x = call(module, x, rate if drops else 0.0)
    return x, x if chosen else None

  each = []
  if scan and drop_rates:
    axes = dict(variable_axes={"params": 0, "intermediates": 0}, length=len(drop_rates))
    loop = nn.scan(step, split_rngs={"params": True, "dropout": True}, **axes)
    x, each = loop(block(**fields, name=f"{name}s"), x, jnp.asarray(drop_rates, jnp.float32))
  else:
    for i, rate in enumerate(drop_rates):
      x = call(block(**fields, name=f"{name}_{i}"), x, rate)
      each.append(x)
  return [each[i] for i in chosen] if chosen else x


def apart(model: Any) -> Any:
  """The model with its blocks one by one, none of them computed again in the backward pass."""
  layout = [name for name in ("scan_blocks", "remat") if hasattr(model, name)]
  return model.clone(parent=None, **dict.fromkeys(layout, False))


def unrolled(tree: Any) -> Any:
  """Takes stacked blocks apart: "MixerBlocks" becomes "MixerBlock_0", "MixerBlock_1" and so on.

  The parameters of a model with `scan_blocks=True` are stacked; public files have one subtree a
  block.

  Args:
    tree: parameters, or a tree with such trees in it, as the state of an optimizer, of arrays of
      NumPy or JAX (for shapes, use `jax.eval_shape`). It may have no stacked blocks.

  Returns:
    The tree with one subtree for each block.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import models

    params = {"MixerBlocks": {"LayerNorm_0": {"scale": jnp.ones((2, 8))}}}
    assert list(models.unrolled(params)) == ["MixerBlock_0", "MixerBlock_1"]
    ```
  """
  return _where(_ALL, _unroll, tree)


def stacked(tree: Any) -> Any:
  """Stacks blocks that stand one by one, the inverse of `unrolled`.

  Args:
    tree: a tree as `unrolled` returns it.

  Returns:
    The tree with the blocks of a kind in one subtree, whose arrays have a leading axis of blocks.

  Raises:
    KeyError: the number of a block is missing.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import models

    block = {"LayerNorm_0": {"scale": jnp.ones(8)}}
    tree = models.stacked({"MixerBlock_0": block, "MixerBlock_1": block})
    assert tree["MixerBlocks"]["LayerNorm_0"]["scale"].shape == (2, 8)
    ```
  """
  return _where(_ONE, _stack, tree)


def _where(pattern: re.Pattern, change: Any, tree: Any) -> Any:
  """Changes the dictionaries of a tree that have such a key."""
  found = lambda x: isinstance(x, Mapping) and any(pattern.fullmatch(str(key)) for key in x)
  return jax.tree.map(lambda x: change(x) if found(x) else x, tree, is_leaf=found)


def _unroll(params: Mapping[str, Any]) -> dict[str, Any]:
  result = {}
  for key, value in params.items():
    if match := _ALL.fullmatch(key):
      for i in range(len(jax.tree.leaves(value)[0])):
        result[f"{match[1]}_{i}"] = jax.tree.map(lambda x, i=i: x[i], value)
    else:
      result[key] = value
  return result


def _stack(params: Mapping[str, Any]) -> dict[str, Any]:
  result = {key: value for key, value in params.items() if not _ONE.fullmatch(key)}
  names = [match[1] for key in params if (match := _ONE.fullmatch(key))]
  for name in set(names):
    members = [params[f"{name}_{i}"] for i in range(names.count(name))]
    stack = lambda *arrays: (np if isinstance(arrays[0], np.ndarray) else jnp).stack(arrays)
    result[f"{name}s"] = jax.tree.map(stack, *members)
  return result
