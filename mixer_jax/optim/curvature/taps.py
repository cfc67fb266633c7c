"""What a tap adds up in the backward pass: sums over rows a of inputs and d of output gradients.

A program of one example is mapped over the examples by `jax.vmap`. The sums are over all of their
rows in one product, not one product for each example: a rule of `custom_vmap` takes the axis of
examples for more rows. It knows this axis by the token, the only array that is mapped with it in
every case; where an array is the same for all examples, as the seeds of tangents, it is repeated.
"""

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.optim import axes
from mixer_jax.optim.curvature import library
from mixer_jax.optim.curvature.layers import Place
from mixer_jax.optim.curvature.products import Product


class Rows(NamedTuple):
  """The rows of a use of a layer.

  Attributes:
    product: the arrangement of rows.
    place: the use's share of the matrix of the layer.
    with_bias: whether this use adds the layer's bias, which is an input that is always 1.
    sizes: inputs of the layer (with its bias) and outputs.
    counted: None: all rows count; "examples": those of examples whose token is not 0;
      "reached": of these, the rows whose gradient is not 0.
  """

  product: Product
  place: Place
  with_bias: bool
  sizes: tuple[int, int]
  counted: str | None


def tapped(
  statistics: Callable, operand: Any, result: jax.Array, own: Any, token: jax.Array
) -> Any:
  """The result, whose gradient also goes to the accumulators `own`.

  `statistics` maps (operands, gradients, own, tokens), each but `own` with an axis of examples in
  front, to the sums that are added to `own`.
  """

  @jax.custom_vjp
  def tap(operand, result, own, token):
    return _for_each(result, token)

  def forward(operand, result, own, token):
    return _for_each(result, token), (operand, own, token)

  def backward(residuals, gradient):
    operand, own, token = residuals
    sums = _summed(statistics, operand, gradient, own, token)
    sums = {name: axes.summed(x, own[name], (operand, gradient)) for name, x in sums.items()}
    return None, gradient, jax.tree.map(jnp.zeros_like, own) | sums, None

  tap.defvjp(forward, backward)
  return tap(operand, result, dict(own), token)


@jax.custom_batching.custom_vmap
def _for_each(x, token):
  """An array, as one of each example."""
  return x


@_for_each.def_vmap
def _(axis_size, in_batched, x, token):
  if in_batched[1] and not in_batched[0]:
    x = jnp.broadcast_to(x, (axis_size, *x.shape))
  return _for_each(x, token) if not in_batched[1] else x, True


def _summed(statistics, operand, gradient, own, token):
  def of_one(operand, gradient, own, token):
    alone = lambda x: jnp.expand_dims(x, 0)
    return statistics(alone(operand), alone(gradient), own, alone(token))

  sums = jax.custom_batching.custom_vmap(of_one)

  @sums.def_vmap
  def _(axis_size, in_batched, operand, gradient, own, token):
    if not in_batched[3]:
      at = [jax.tree.map(lambda b: 0 if b else None, b) for b in in_batched]
      mapped = jax.vmap(sums, at, axis_size=axis_size)(operand, gradient, own, token)
      return mapped, jax.tree.map(lambda _: True, mapped)
    repeat = lambda x, batched: x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
    each = repeat(operand, in_batched[0]), repeat(gradient, in_batched[1])
    if any(jax.tree.leaves(in_batched[2])):  # a branch that examples choose: sums for each
      at = (0, 0, jax.tree.map(lambda b: 0 if b else None, in_batched[2]), 0)
      result = jax.vmap(of_one, at)(*each, own, token)
      return result, jax.tree.map(lambda _: True, result)
    result = statistics(*each, own, token)
    return result, jax.tree.map(lambda _: False, result)

  return sums(operand, gradient, own, token)


def of_product(
  rows: Rows, operand: Any, gradient: jax.Array, own: Any, token: Any
) -> dict[str, Any]:
  """The sums of a a^T, d d^T and 1 over rows, and of the squares of EK-FAC, if `own` has them."""
  inputs = jax.vmap(rows.product.inputs)(operand)
  outputs = jax.vmap(rows.product.outputs)(gradient)
  counts = _counts(rows.counted, outputs, token)
  if rows.product.table:
    return _of_table(rows, inputs, outputs, counts, own)
  a = inputs if rows.counted is None else inputs * counts[..., None].astype(inputs.dtype)
  ones = counts if rows.counted or rows.with_bias else None
  a, d = _in_layer(rows, a, outputs, ones)
  blocks = own["rows"].ndim
  merged = _merge(a, blocks), _merge(d, blocks)
  moments = _over(blocks, library.blocks().second_moments)
  shape = lambda side: own[side].shape[blocks:]
  first, second = moments(*merged, shape("inputs"), shape("outputs"), own["rows"].dtype)
  sums = {"inputs": first, "outputs": second, "rows": _number(counts, own)}
  return sums | _squares(a, d, own)


def gradient(rows: Rows, operand: Any, gradient: jax.Array, own: Any, token: Any) -> dict[str, Any]:
  """The sum of a d^T over rows, the gradient of the layer's matrix; all rows count."""
  a, d = jax.vmap(rows.product.inputs)(operand), jax.vmap(rows.product.outputs)(gradient)
  if rows.product.table:
    return {"gradient": own["gradient"].at[a.reshape(-1)].add(d.reshape(-1, d.shape[-1]))}
  a, d = _in_layer(rows, a, d, jnp.ones((), a.dtype))
  a, d = _merge(a, own["blocks"].ndim), _merge(d, own["blocks"].ndim)
  return {"gradient": jnp.einsum("...ra,...rd->...ad", a, d), "blocks": 0 * own["blocks"]}


def rows(rows: Rows, operand: Any, gradient: jax.Array, own: Any, token: Any) -> dict[str, Any]:
  """The rows themselves, of both sides of the layer, [examples, *blocks, rows, d]."""
  del token
  a, d = jax.vmap(rows.product.inputs)(operand), jax.vmap(rows.product.outputs)(gradient)
  if rows.product.table:
    a = jax.nn.one_hot(a, rows.sizes[0], dtype=d.dtype)
  sides = zip(("inputs", "outputs"), _in_layer(rows, a, d, jnp.ones((), a.dtype)))
  return {side: x.astype(own[side].dtype) for side, x in sides}


def _in_layer(rows: Rows, a: jax.Array, d: jax.Array, ones: Any) -> tuple[jax.Array, jax.Array]:
  """Rows of the whole layer: sides swapped of a transposed use, zeros for what it does not have."""
  if rows.place.transposed:
    a, d = d, a
  d_in, d_out = rows.sizes
  a = _spread(a, rows.place.rows, d_in)
  if rows.with_bias:
    a = a.at[..., -1].set(ones.astype(a.dtype))
  return a, _spread(d, rows.place.columns, d_out)


def _spread(x: jax.Array, places: np.ndarray | None, size: int) -> jax.Array:
  """Rows with zeros in the places that they do not have, `size` long."""
  if places is not None:
    return jnp.zeros((*x.shape[:-1], size), x.dtype).at[..., places].set(x)
  missing = size - x.shape[-1]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _merge(x: jax.Array, blocks: int) -> jax.Array:
  """[examples, *blocks, rows, n] as [*blocks, examples * rows, n]."""
  x = jnp.moveaxis(x, 0, blocks)
  return x.reshape(*x.shape[:blocks], -1, x.shape[-1])


def _over(blocks: int, function: Callable) -> Callable:
  for _ in range(blocks):
    function = _mapped(function)
  return function


def _mapped(function: Callable) -> Callable:
  return lambda a, d, *rest: jax.vmap(lambda a, d: function(a, d, *rest))(a, d)


def _counts(counted: str | None, outputs: jax.Array, token: jax.Array) -> jax.Array:
  """1 for each row that counts, 0 for padding, float32 [examples, *blocks, rows]."""
  token = token.reshape(-1, *(1,) * (outputs.ndim - 2)).astype(jnp.float32)
  ones = jnp.broadcast_to(token, outputs.shape[:-1])
  if counted == "reached":
    return ones * (outputs != 0).any(axis=-1)
  return ones if counted else jnp.ones(outputs.shape[:-1], jnp.float32)


def _number(counts: jax.Array, own: Any) -> jax.Array:
  """The number of rows of each block; in a checked `shard_map` of the type of its accumulator."""
  blocks = own["rows"].ndim
  return counts.sum(axis=(0, *range(1 + blocks, counts.ndim))) + 0 * own["rows"]


def _of_table(rows, ids, outputs, counts, own):
  """The second moment of one-hot rows is diagonal: how often each occurs."""
  ids, counts = ids.reshape(-1), counts.reshape(-1)
  d = outputs.reshape(-1, outputs.shape[-1])
  inputs = jnp.zeros_like(own["inputs"]).at[ids].add(counts)
  shapes = (1,), own["outputs"].shape
  _, second = library.blocks().second_moments(d[:, :1], d, *shapes, own["rows"].dtype)
  sums = {"inputs": inputs, "outputs": second, "rows": counts.sum() + 0 * own["rows"]}
  if "squares" in own:  # the words of an example count apart
    turned = _turned(d, own, "outputs")
    sums["squares"] = jnp.zeros_like(own["squares"]).at[ids].add(counts[:, None] * turned**2)
  return sums


def _squares(a: jax.Array, d: jax.Array, own: Any) -> dict[str, jax.Array]:
  """The squares of each example's gradient a^T d in the eigenbasis, added up over examples."""
  if "squares" not in own:
    return {}
  a, d = _turned(a, own, "inputs"), _turned(d, own, "outputs")
  if a.shape[-2] == 1:
    a, d = a[..., 0, :], d[..., 0, :]
    return {"squares": jnp.einsum("e...a,e...d->...ad", a**2, d**2)}
  gradient = lambda a, d: jnp.einsum("...ra,...rd->...ad", a, d)
  add = lambda total, pair: (total + gradient(*pair) ** 2, None)
  return {"squares": jax.lax.scan(add, jnp.zeros_like(own["squares"]), (a, d))[0]}


def _turned(x: jax.Array, own: Any, side: str) -> jax.Array:
  x = x.astype(own["squares"].dtype)
  return x @ own["basis"][side] if side in own["basis"] else x


def of_elements(
  view: Any, shape: tuple[int, ...], scales: bool, stacked: tuple[int, ...] = ()
) -> Callable:
  """Statistics of a scale or shift: the squares of each example's gradient, added up.

  `view` reads the parameter, of that shape, as the equation sees it; inside of a scan over its first
  axes, `stacked`, the sums are those of one layer.
  """

  def statistics(operand, gradient, own, token):
    del token
    dtype = own["squares"].dtype
    like = jax.ShapeDtypeStruct(shape, dtype)
    back = jax.linear_transpose(view.read, like)

    def of_example(x, d):
      d = (x.astype(dtype) if scales else 1.0) * d
      return back(jnp.broadcast_to(d, (*stacked, *d.shape)))[0][(0,) * len(stacked)]

    squares = jax.vmap(of_example)(operand, gradient.astype(dtype)) ** 2
    return {"squares": squares.sum(axis=0)}

  return statistics
