"""Keys of the package: the bits of JAX's default, under whatever settings JAX has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.images import augment, mixing
from mixer_jax.images.image_data import ImageData
from mixer_jax.models.layers import Dropout, StochasticDepth
from mixer_jax.runtime import draws
from mixer_jax.tasks.masked_lm import masking
from tests.tasks.runs import SETTINGS


def drawn(key):
  """Draws of every kind, from keys that are split and folded."""
  data, each = jax.random.key_data, jax.vmap(lambda k: jax.random.normal(k, (2, 3), jnp.float32))
  return [
    data(jax.random.split(key, (2, 3))),
    *(data(jax.random.fold_in(key, i)) for i in (0, 7, 2**32 - 1)),
    *(jax.random.bits(key, (3, 4, 5), f"uint{width}") for width in (8, 16, 32)),
    each(jax.random.split(key, 4)),
    jax.random.bernoulli(jax.random.fold_in(key, 1), jnp.float32(0.3), (50,)),
    jax.random.randint(key, (50,), 0, 9, jnp.int32),
    jax.random.categorical(key, jnp.zeros((20, 4), jnp.float32)),
  ]


@pytest.mark.parametrize("seed", [0, 5, 2**31 - 1])
def test_the_bits_are_those_of_jaxs_default(seed):
  wanted = drawn(jax.random.key(seed, impl="threefry2x32"))
  jax.tree.map(np.testing.assert_array_equal, drawn(draws.key(seed)), wanted)


def test_no_seed_is_that_of_another_one_with_more_bits():
  keys = [draws.key(seed) for seed in (1, 2**32 + 1, 2**33 + 1)]
  assert len({jax.random.key_data(k).tobytes() for k in keys}) == 3


def changed():
  """Masks of words, flips, crops, a rectangle of noise, and what two kinds of dropout leave."""
  key, rng = draws.key(3), np.random.default_rng(0)
  images = rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
  x = augment.train_input(key, images, ImageData(image_size=8, resize=0, pad=2, flip=True))
  ids = rng.integers(5, 100, (7, 40)).astype(np.int32)
  masked = masking.mask(jax.random.split(key, 7), ids, ids > 20, 0.35, 4, 100)
  rngs = {"dropout": key}
  kept = Dropout(0.3, deterministic=False).apply({}, x, rngs=rngs)
  deep = StochasticDepth(rescale=True).apply({}, x, 0.3, train=True, rngs=rngs)
  return x, masked, mixing.erase(key, x, 0.5), kept, deep


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_are_the_same_under_any_setting(setting):
  wanted = jax.jit(changed)()
  with SETTINGS[setting]():
    found = jax.jit(changed)()
    both = drawn(draws.key(3))
  jax.tree.map(np.testing.assert_array_equal, found, wanted)
  jax.tree.map(np.testing.assert_array_equal, both, drawn(draws.key(3)))
