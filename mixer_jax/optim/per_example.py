"""Gradients of single examples, a few at a time."""

from __future__ import annotations  # `help` shows names, not what they stand for

import functools
from typing import Any, Callable, Iterator

import jax


def per_example_grads(
  loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, chunk: int = 32
) -> Iterator[Any]:
  """Iterates over the gradients of single examples' losses, a chunk at a time.

  The mean over all examples is the gradient of the mean loss, as long as the loss of one
  example does not depend on the others (as it does where BatchNorm trains). A chunk costs
  the memory of `chunk` gradients; the iterator keeps none that it has handed out. `loss` is
  compiled once for each size of a chunk and shape of an example: call with the same
  function, not with a new lambda each time.

  Args:
    loss: maps (params, batch) to a scalar. It gets batches of one example: arrays keep their
      leading axis, of length 1.
    params: a tree of float arrays.
    batch: a tree of arrays [n, ...]. A key for each example may be among them.
    chunk: most gradients at a time. The last chunk holds the remaining ones.

  Returns:
    An iterator of trees like `params`, with a leading axis of examples, in their order.

  Raises:
    ValueError: chunk is below 1, or the arrays of the batch differ in length.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    def loss(params, batch):
      return jnp.mean((batch @ params["w"]) ** 2)

    for grads in optim.per_example_grads(loss, {"w": jnp.ones(3)}, jnp.eye(3), chunk=2):
      print(grads["w"].shape)  # (2, 3), then (1, 3)
    ```
  """
  if chunk < 1:
    raise ValueError(f"chunk is {chunk}; allowed: 1 or more")
  lengths = {x.shape[0] if getattr(x, "shape", ()) else None for x in jax.tree.leaves(batch)}
  if len(lengths) != 1 or None in lengths:
    shapes = ", ".join(sorted({str(getattr(x, "shape", ())) for x in jax.tree.leaves(batch)}))
    raise ValueError(f"the batch has arrays of shapes {shapes or 'none'}; all need one length")
  return _chunks(loss, params, batch, *lengths, chunk)


def _chunks(loss, params, batch, length: int, chunk: int) -> Iterator[Any]:
  for start in range(0, length, chunk):
    yield _grads(loss, params, jax.tree.map(lambda x: x[start : start + chunk], batch))


@functools.partial(jax.jit, static_argnums=0)
def _grads(loss, params, examples):
  batches_of_one = jax.tree.map(lambda x: x[:, None], examples)
  return jax.vmap(jax.grad(loss), (None, 0))(params, batches_of_one)
