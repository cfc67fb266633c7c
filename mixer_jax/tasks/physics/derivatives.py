"""Derivatives that residuals need, of functions of a point. JAX's own may be used, too."""

from typing import Callable

import jax
from jax.experimental import jet
import jax.numpy as jnp
import numpy as np

Function = Callable[[jax.Array], jax.Array]


def partial(f: Function, *axes: int) -> Function:
  """The partial derivative along these axes in turn: `partial(u, 0, 1)` is u_xy."""
  for axis in axes:
    f = lambda x, f=f, axis=axis: jax.jvp(f, (x,), (_unit(x, axis),))[1]
  return f


def _unit(x: jax.Array, axis: int) -> jax.Array:
  return jnp.asarray(np.eye(x.size)[axis], x.dtype)


def powers(f: Function, x: jax.Array, axis: int, order: int) -> list[jax.Array]:
  """f and its derivatives along an axis up to an order, [order + 1], in one pass.

  A Taylor series is carried through the function (Bettencourt et al., 2019, Taylor-Mode Automatic
  Differentiation for Higher-Order Derivatives in JAX), so the work grows as the order squared.
  """
  series = [_unit(x, axis), *(jnp.zeros_like(x) for _ in range(order - 1))]
  value, found = jet.jet(f, (x,), (series,))
  return [value, *found]


def laplacian(f: Function, x: jax.Array, axes: int | None = None) -> jax.Array:
  """The sum of second derivatives along the first axes (None: all) at a point [dim]."""

  def second(e):
    return jax.jvp(lambda y: jax.jvp(f, (y,), (e,))[1], (x,), (e,))[1]

  return jax.vmap(second)(jnp.eye(x.size, dtype=x.dtype)[:axes]).sum(0)


def gradient(f: Function, x: jax.Array, axes: int | None = None) -> jax.Array:
  """The derivatives of f, [] or [k], along the first axes (None: all) at a point: [axes, ...]."""
  slope = lambda e: jax.jvp(f, (x,), (e,))[1]
  return jax.vmap(slope)(jnp.eye(x.size, dtype=x.dtype)[:axes])
