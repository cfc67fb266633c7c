"""Checks what was found in a program: the gradient of each layer, from its rows, is autodiff's."""

from typing import Any

import jax
import jax.numpy as jnp

EXAMPLES = 2  # so many show whether examples mix


def errors(curvature: Any, params: Any, batch: Any) -> dict[str, jax.Array]:
  """The relative error of each layer's gradient sum a g^T, over all rows of all uses, by its name.

  The loss is the inner product of the outputs of a few examples with numbers drawn at random. Autodiff
  differentiates the function of all of them at once: where examples mix, the gradients differ.
  """
  small = curvature.first_examples(batch, EXAMPLES)

  def loss(params, small):
    leaves = jax.tree.leaves(curvature.outputs(params, small))
    return sum(jnp.vdot(y, _drawn(i, y)) for i, y in enumerate(leaves))

  def compared(params, small):
    exact = jax.grad(loss)(params, small)
    found = curvature.row_gradients(params, small, lambda y: _like_drawn(y))
    return {name: _error(found[name], own) for name, own in curvature.matrices(exact).items()}

  # It runs once: a program that is compiled sooner is better than a fast one.
  options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
  with jax.default_matmul_precision("highest"):
    try:
      return jax.jit(compared, compiler_options=options)(params, small)
    except Exception as e:
      e.add_note(
        f"This happened in a check of predict with the first {EXAMPLES} examples of the batch. Arrays that"
        " all examples share are named by in_axes, as for jax.vmap."
      )
      raise


def _drawn(i: int, y: jax.Array) -> jax.Array:
  return jax.random.normal(jax.random.key(i), y.shape, jnp.float32).astype(y.dtype)


def _like_drawn(outputs: Any) -> Any:
  leaves, structure = jax.tree.flatten(outputs)
  return structure.unflatten(_drawn(i, y) for i, y in enumerate(leaves))


def _error(found: jax.Array, exact: jax.Array) -> jax.Array:
  norm = jnp.linalg.norm
  size = jnp.maximum(norm(exact), norm(found))
  return jnp.where(size > 0, norm(found - exact) / jnp.where(size > 0, size, 1.0), 0.0)
