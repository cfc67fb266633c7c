"""Random keys whose draws are a function of the seed alone, whatever JAX's settings are.

`jax.random.key` follows `jax_default_prng_impl`, and the bits of its keys `jax_threefry_partitionable`.
These keys have one implementation of their own, with the bits of JAX's default. A draw still has to
name its type: without one `jax_enable_x64` doubles its bits. `jax.random.poisson` takes JAX's
own keys alone: `jax.random.wrap_key_data(jax.random.key_data(key), impl="threefry2x32")`.
"""

import math

import jax
from jax.extend import random as extend
import jax.numpy as jnp
import numpy as np


def key(seed: int) -> jax.Array:
  """The typed key of a seed of up to 64 bits."""
  return wrap(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32))


def wrap(data: jax.Array) -> jax.Array:
  """The typed keys of their words `jax.random.key_data`, uint32 [..., 2]."""
  return jax.random.wrap_key_data(data, impl=_THREEFRY)


def _hashed(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Two words for each place of an array, hashes of its number in the array."""
  number = jnp.zeros(shape, jnp.uint32)
  for axis in range(len(shape)):  # no reshape: devices share the axes of an array
    step = np.uint32(math.prod(shape[axis + 1 :]))
    number += step * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
  return tuple(extend.threefry2x32_p.bind(key[0], key[1], jnp.zeros_like(number), number))


def _bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
  high, low = _hashed(key, shape)
  if width == 64:
    return high.astype(jnp.uint64) << np.uint64(32) | low.astype(jnp.uint64)
  return (high ^ low).astype(f"uint{width}")


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return jnp.stack(_hashed(key, shape), axis=-1)


def _seed(seed: jax.Array) -> jax.Array:
  return jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)])


def _fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
  return jnp.stack(extend.threefry2x32_p.bind(key[0], key[1], *_seed(data)))


_THREEFRY = extend.define_prng_impl(
  key_shape=(2,),
  seed=_seed,
  split=_split,
  random_bits=_bits,
  fold_in=_fold_in,
  name="mixer_jax_threefry",
  tag="mixer",
)
