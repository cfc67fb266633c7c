"""Sums over the rows of a layer: its inputs a and the gradients d with respect to its outputs."""

from typing import Any

import jax
import jax.numpy as jnp

from mixer_jax.optim import kfac_jax_blocks, layer_views


def of_dense(view: layer_views.Dense, x: jax.Array, dy: jax.Array, own: Any) -> dict[str, Any]:
  """Sums over rows of a a^T, d d^T and 1; the bias is one more input, always 1."""
  a, d = view.inputs(x), view.outputs(dy)
  lead, d = d.shape[0], d.reshape(-1, d.shape[-1])
  counts = _counts(d, own, lead)
  if view.ids:
    # The second moment of one-hot rows is diagonal: how often each occurs.
    inputs = jnp.zeros_like(own["inputs"]).at[a.reshape(-1)].add(counts)
    _, outputs = kfac_jax_blocks.second_moments(d[:, :1], d, (1,), own["outputs"].shape)
    squares = _squares(None, d, own, a.reshape(-1), counts)
    return {"inputs": inputs, "outputs": outputs, "rows": _number(counts, own)} | squares
  a = a.reshape(-1, a.shape[-1])
  if "weights" in own:
    a = a * counts[:, None].astype(a.dtype)
  if view.bias:
    a = jnp.concatenate([a, counts[:, None].astype(a.dtype)], axis=1)
  if view.transposed:
    a, d = d, a
  moments = kfac_jax_blocks.second_moments(a, d, own["inputs"].shape, own["outputs"].shape)
  sums = {"inputs": moments[0], "outputs": moments[1], "rows": _number(counts, own)}
  return sums | _squares(a, d, own)


def _squares(
  a: Any, d: jax.Array, own: Any, ids: Any = None, counts: Any = None
) -> dict[str, jax.Array]:
  """The squares of each example's gradient a^T d in the eigenbasis, added up over examples."""
  if "squares" not in own:
    return {}
  turn = lambda x, side: x @ own["basis"][side] if side in own["basis"] else x
  d = turn(d.astype(jnp.float32), "outputs")
  if ids is not None:  # the words of an example count apart
    return {"squares": jnp.zeros_like(own["squares"]).at[ids].add(counts[:, None] * d**2)}
  a = turn(a.astype(jnp.float32), "inputs")
  examples = own["examples"].shape[-2]
  if examples == len(d):
    return {"squares": (a**2).T @ d**2}
  by_example = [x.reshape(examples, -1, x.shape[-1]) for x in (a, d)]
  add = lambda total, pair: (total + (pair[0].T @ pair[1]) ** 2, None)
  return {"squares": jax.lax.scan(add, jnp.zeros_like(own["squares"]), by_example)[0]}


def _number(counts: jax.Array, own: Any) -> jax.Array:
  """The number of rows; in a checked `shard_map` of the type that its companion has."""
  return counts.sum() + 0 * own["rows"]


def _counts(d: jax.Array, own: Any, lead: int) -> jax.Array:
  """1 for each row that counts, 0 for padding, float32; `lead` is the rows' leading size.

  Where the rows begin with the examples, an example's rows count if the example has any weight.
  Where its tokens have weights of their own, or the examples are elsewhere (then `weights` is a
  number), a row counts if an output that counts depends on it: its gradient is not 0.
  """
  if "weights" not in own:
    return jnp.ones(len(d), jnp.float32)
  weights, reached = own["weights"], (d != 0).any(axis=-1).astype(jnp.float32)
  if "mapped" in own:
    return reached
  if not weights.ndim or len(d) % len(weights):
    return jnp.where(reached.any(), reached, (weights != 0).any().astype(jnp.float32))
  examples = len(weights)
  of_example = jnp.repeat(weights.reshape(examples, -1).any(axis=1), len(d) // examples)
  of_example = of_example.astype(jnp.float32)
  # Rows in another order of the examples, as sorted ones: then rows of examples without weight are
  # reached, but no more examples than have weight. Through batch statistics all are reached.
  found, wanted = (x.reshape(examples, -1).any(axis=1) for x in (reached, of_example))
  disordered = (found & ~wanted).any() & (found.sum() <= wanted.sum())
  of_example = jnp.where(disordered, reached, of_example)
  if lead == examples and weights.ndim == 1:
    return of_example
  # Below a head of zeros no row is reached: then tokens count as such, and rows over other axes
  # as their examples. One row an example is a step of a loop over tokens, maybe of padding alone.
  if len(d) == weights.size:
    otherwise = (weights.reshape(-1) != 0).astype(jnp.float32)
  else:
    otherwise = of_example if len(d) > examples else jnp.zeros(len(d), jnp.float32)
  counts = jnp.where(reached.any(), reached, otherwise)
  return of_example * counts if lead == examples else counts


def of_norm(x: jax.Array, dy: jax.Array, own: Any) -> dict[str, Any]:
  """Sums over examples of the squares of each one's gradient, of a normalisation's parameters."""
  shapes = {name: own[name].shape for name in ("scale", "bias") if name in own}
  if "mapped" in own:  # one example
    x, dy = x[None], dy[None]
  return kfac_jax_blocks.squares_of_sums(x, dy, shapes)
