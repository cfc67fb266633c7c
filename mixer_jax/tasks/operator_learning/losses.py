"""Relative errors of functions on uniform grids."""

import jax
import jax.numpy as jnp

_LEAST = 1e-36  # added to mean squares of functions in units of about their largest value
# All slopes of a function may be 0: added to theirs, on the unit interval, is this share of its
# mean square. Those of 100 sin(2 pi x) beside a mean of 1e5 are twenty times as large.
_LEAST_SLOPES = 1e-6


def relative_l2(errors: jax.Array, targets: jax.Array) -> jax.Array:
  """|e| / |u| of each function, [batch], by root mean squares; e and u are [batch, *grid]."""
  errors, targets = (x * _unit(targets) for x in (errors, targets))
  return jnp.sqrt(_ratio(_mean_square(errors), _mean_square(targets)))


def relative_h1(errors: jax.Array, targets: jax.Array, periodic: bool) -> jax.Array:
  """|grad e| / |grad u| of each function, [batch], by central differences."""
  errors, targets = (x * _unit(targets) for x in (errors, targets))
  wrong, right = (sum(map(_mean_square, slopes(x, periodic))) for x in (errors, targets))
  least = _LEAST_SLOPES / (targets.shape[1] - (not periodic)) ** 2  # in their units
  return jnp.sqrt(_ratio(wrong, right + least * _mean_square(targets)))


def slopes(functions: jax.Array, periodic: bool) -> list[jax.Array]:
  """Central differences along each axis of [batch, *grid], on the unit interval or square.

  They are derivatives times the length of the first axis's cells, whatever those of the other
  are. Without a period each is [batch, *grid - 2], at inner points alone.
  """
  found, axes = [], range(1, functions.ndim)
  inner = (slice(None), *(slice(1, -1) for _ in axes))
  cells = [points if periodic else points - 1 for points in functions.shape[1:]]
  for axis, number in zip(axes, cells):
    difference = (jnp.roll(functions, -1, axis) - jnp.roll(functions, 1, axis)) / 2
    found.append((difference if periodic else difference[inner]) * (number / cells[0]))
  return found


def scales(targets: jax.Array) -> jax.Array:
  """1 / |u| of each function, [batch], which makes its error relative."""
  unit = _unit(targets)
  return unit.reshape(len(unit)) * jax.lax.rsqrt(_mean_square(unit * targets) + _LEAST)


def _unit(targets: jax.Array) -> jax.Array:
  """A power of two for each function, [batch, 1, ...], that brings its largest value to 1/2 or more.

  Squares of values of any unit are finite then, and no digit changes.
  """
  peak = jnp.max(jnp.abs(targets), axis=tuple(range(1, targets.ndim)), keepdims=True)
  exponent = jnp.clip(jnp.frexp(jax.lax.stop_gradient(peak))[1], -126, 126)
  return jnp.ldexp(jnp.ones_like(peak), -exponent)


def _mean_square(x: jax.Array) -> jax.Array:
  return jnp.mean(jnp.square(x), axis=tuple(range(1, x.ndim)))


def _ratio(squares: jax.Array, of: jax.Array) -> jax.Array:
  """A quotient whose root has a finite gradient at 0, too."""
  return squares / (of + _LEAST) + 1e-20
