"""The inverse matrices of Broyden's class, with and without scaling.

With the step s, the change of the gradient y and the inverse H = B^-1 before, in the notation of
Urban, Stefanou and Pons, 2024, https://arxiv.org/abs/2405.04230:

  H <- (H - H y y^T H / y^T H y + phi y^T H y v v^T) / tau + s s^T / y^T s,
  v = s / y^T s - H y / y^T H y.

phi = tau = 1 is BFGS. The scaled methods are those of Al-Baali, Spedicato and Maggioni, 2014,
Optimization Methods and Software 29(5); see `scaling`. Urban et al.'s code has several of each: these
are its SSBFGS_AB and SSBroyden2, with its scaling of the first matrix.
"""

from typing import Any, NamedTuple

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

METHODS = ("ssbroyden", "ssbfgs", "bfgs")


class Pair(NamedTuple):
  """A step s and what it taught.

  Attributes:
    step: s, like the parameters.
    change: y, by how much the gradient changed.
    gradient: g at the beginning.
    multiplier: the a of B s = -a g, a scalar.
  """

  step: Any
  change: Any
  gradient: Any
  multiplier: jax.Array


class InverseMemory(NamedTuple):
  """The memory of `ssbroyden`.

  Attributes:
    inverse: H, [parameters, parameters]; before the first pair it is not used.
    pairs: number of pairs that H is made of, an int32 scalar.
  """

  inverse: jax.Array
  pairs: jax.Array


def init(size: int, dtype: Any) -> InverseMemory:
  """The memory without a pair."""
  return InverseMemory(jnp.eye(size, dtype=dtype), jnp.zeros((), jnp.int32))


def direction(memory: InverseMemory, gradient: Any, params: Any) -> tuple[Any, InverseMemory]:
  """H g like the gradient, g / max(1, |g|) before the first pair, and the memory."""
  del params
  flat, unravel = ravel_pytree(gradient)
  first = flat / jnp.maximum(1, jnp.linalg.norm(flat))
  found = jnp.where(memory.pairs == 0, first, _product(memory.inverse, flat))
  return unravel(found), memory


def learned(memory: InverseMemory, pair: Pair, good: jax.Array, method: str) -> InverseMemory:
  """The memory after one more pair; it has no pair if this one is not good.

  The first pair updates the identity, scaled so that y^T H y is as large as y^T s, or as theta
  wants it.
  """
  s, y, g = (ravel_pytree(tree)[0] for tree in (pair.step, pair.change, pair.gradient))
  first = memory.pairs == 0
  inverse = jnp.where(first, jnp.eye(s.size, dtype=s.dtype), memory.inverse)
  product, curvature = _product(inverse, y), y @ s
  h = y @ product / curvature
  b = jnp.where(first, s @ s, -pair.multiplier * (s @ g)) / curvature
  tau, phi = scaling(method, b, h, s.size, first)
  both = s[:, None] * product + product[:, None] * s
  new = inverse / tau - phi / (tau * curvature) * both
  new += (1 + phi * h / tau) / curvature * s[:, None] * s
  new += (phi - 1) / (tau * h * curvature) * product[:, None] * product
  good &= jnp.isfinite(tau) & jnp.isfinite(phi) & (tau > 0)
  return InverseMemory(
    jnp.where(good, new, memory.inverse), jnp.where(good, memory.pairs + 1, 0).astype(jnp.int32)
  )


def scaling(
  method: str, b: jax.Array, h: jax.Array, size: int, first: Any
) -> tuple[jax.Array, jax.Array]:
  """tau and phi of a method for b = s^T B s / y^T s and h = y^T H y / y^T s.

  With a = b h - 1 and c = sqrt(a / (1 + a)), phi = (1 - theta) / (1 + a theta) and

    ssbfgs     theta = 0, tau = min(1, 1 / b);
    ssbroyden  rho = min(1, h (1 - c)), theta = max((rho - 1) / a, min(1 / rho, (1 - b) / b)),
               sigma = 1 + a theta and, with r = sigma^(1 / (1 - size)),
               tau = min(1, 1 / b) min(r, 1 / theta) if theta > 0, else min(min(1, 1 / b) r, sigma).

  The first pair has tau = h / (1 + a theta) (Nocedal and Wright, Equation 6.20, for theta = 0).
  """
  # Rounding may make a zero or negative, and rho - 1 is divided by it.
  a = jnp.maximum(b * h - 1, jnp.finfo(b.dtype).eps)
  less, theta = jnp.minimum(1, 1 / b), jnp.zeros_like(b)
  if method == "ssbroyden":
    # h (1 - c) = 1 / (b (1 + c)), without the cancellation.
    rho = jnp.minimum(1, 1 / (b * (1 + jnp.sqrt(a / (1 + a)))))
    theta = jnp.maximum((rho - 1) / a, jnp.minimum(1 / rho, (1 - b) / b))
  sigma = 1 + a * theta
  root = sigma ** (-1 / max(size - 1, 1))
  positive = less * jnp.minimum(root, 1 / jnp.where(theta > 0, theta, 1))
  scaled = jnp.where(theta > 0, positive, jnp.minimum(less * root, sigma))
  tau = {"bfgs": jnp.ones_like(b), "ssbfgs": less, "ssbroyden": scaled}[method]
  return jnp.where(first, h / sigma, tau), (1 - theta) / sigma


def _product(matrix: jax.Array, vector: jax.Array) -> jax.Array:
  return jnp.matmul(matrix, vector, precision="highest")
