"""Random operations on the pixels of images: RandAugment, three-augment, colour jitter.

All take a key and images [batch, height, width, 3] uint8, and draw for each image.
"""

import functools
from typing import Mapping, Sequence

import jax
import jax.numpy as jnp

from mixer_jax.images import colour, warp
from mixer_jax.images.policy import Augment

# The operations of timm's RandAugment; four of those on colours have two scales, see `arguments`.
OPERATIONS = (
  *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd"),
  *("Color", "Contrast", "Brightness", "Sharpness"),
  *("ShearX", "ShearY", "TranslateX", "TranslateY"),
)
_NONE = len(OPERATIONS)


def rand_augment(key: jax.Array, images: jax.Array, how: Augment, fill: jax.Array) -> jax.Array:
  """RandAugment (Cubuk et al., 2020, https://arxiv.org/abs/1909.13719), with timm's scales.

  Each image gets `how.operations` operations, drawn with replacement, each with `how.probability`.
  timm's differs in this: its interpolation is bicubic in DeiT, here bilinear; and of two geometric
  operations in a row, here one interpolation makes both.

  Args:
    key: of the random choices.
    images: uint8 [batch, height, width, 3].
    how: the options of the policy.
    fill: the colour outside the image, uint8 [3].
  """
  kinds, values = draw(key, len(images), how, images.shape[1:3])
  return apply(images, kinds, values, fill)


def draw(
  key: jax.Array, batch: int, how: Augment, size: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
  """Indices of `OPERATIONS` (one more for none) and their arguments, [batch, how.operations]."""
  shape = (batch, how.operations)
  # One call for all: each is a long program to compile.
  which, use, noise, side = jnp.moveaxis(jax.random.uniform(key, (*shape, 4), jnp.float32), -1, 0)
  kinds, used = jnp.floor(which * _NONE).astype(jnp.int32), use < how.probability
  normal = jax.scipy.special.ndtri(jnp.maximum(noise, 2.0**-24))  # of 0 it is infinite
  level = how.magnitude + how.magnitude_noise * normal
  sign = jnp.where(side < 0.5, 1.0, -1.0)
  named = arguments(jnp.clip(level, 0, 10) / 10, sign, how.increasing, size)
  every = jnp.stack([named.get(name, jnp.zeros(shape)) for name in OPERATIONS], axis=-1)
  values = jnp.take_along_axis(every, kinds[..., None], axis=-1)[..., 0]
  return jnp.where(used, kinds, _NONE), values


def arguments(
  level: jax.Array, sign: jax.Array, increasing: bool, size: tuple[int, int]
) -> Mapping[str, jax.Array]:
  """The argument of each operation that takes one, for a level in [0, 1] and a sign of 1 or -1.

  Posterize, Solarize and the four blends have the plain scales of timm, or, if `increasing`, its
  scales PosterizeIncreasing and so on: stronger with the level. `size` is height and width.
  """
  height, width = size
  factor = 0.1 + 1.8 * level
  bits, threshold = jnp.floor(4 * level), jnp.floor(256 * level)
  if increasing:
    factor = jnp.maximum(1 + 0.9 * sign * level, 0.1)
    bits, threshold = 4 - bits, 256 - threshold
  moved = 0.45 * sign * level
  return {
    "Rotate": 30 * sign * level,
    "Posterize": bits,
    "Solarize": threshold,
    "SolarizeAdd": jnp.floor(110 * level),
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), factor),
    **dict.fromkeys(("ShearX", "ShearY"), 0.3 * sign * level),
    "TranslateX": moved * width,
    "TranslateY": moved * height,
  }


def _indices(of: tuple[str, ...], default: int) -> jax.Array:
  """For each of `OPERATIONS` its index in another tuple; the default for others, and for none."""
  return jnp.array([of.index(n) if n in of else default for n in (*OPERATIONS, "none")])


def apply(images: jax.Array, kinds: jax.Array, values: jax.Array, fill: jax.Array) -> jax.Array:
  """Operations [batch, n] one after the other on images, see `draw` and `rand_augment`."""
  odd = ((0, 0), (0, kinds.shape[1] % 2))
  kinds, values = jnp.pad(kinds, odd, constant_values=_NONE).T, jnp.pad(values, odd).T
  of_matrix = functools.partial(warp.matrix, height=images.shape[1], width=images.shape[2])
  matrices = jax.vmap(jax.vmap(of_matrix))(_indices(warp.GEOMETRY, -1)[kinds], values)
  colours = _indices(colour.COLOURS, 0)[kinds]
  pairs = jnp.moveaxis(matrices.reshape(-1, 2, *matrices.shape[1:]), 1, 2)
  # In a pair one is no change of colours, or neither is geometric: one warp between them will do.
  n = len(pairs)
  order = jnp.stack([jnp.arange(n) * 2, jnp.arange(n) * 2, jnp.arange(n) * 2 + 1], 1).reshape(-1)
  moves = jnp.arange(3 * n) % 3 == 1

  # A loop, because XLA would compute an image anew for each of its readers in the next stage:
  # that took three times as long, and barriers do not keep it from it.
  def stage(images, now):
    moves, i = now
    move = lambda x: jax.vmap(lambda image, a: warp.warp(image, a, fill))(x, pairs[i // 2])
    change = lambda x: jax.vmap(colour.colour)(x, colours[i], values[i])
    return jax.lax.cond(moves, move, change, images), None

  return jax.lax.scan(stage, images, (moves, order))[0]


def three_augment(key: jax.Array, images: jax.Array) -> jax.Array:
  """Greyscale, solarisation from 128 on, or a blur, each for a third of the images (DeiT III).

  The blur's radius is uniform in [0.1, 2].
  """
  which, radii = jax.random.uniform(key, (2, len(images)), jnp.float32)
  kinds, radii = jnp.floor(3 * which).astype(jnp.int32), 0.1 + 1.9 * radii

  def change(image, kind, radius):
    grey = jnp.broadcast_to(colour.grey(image)[..., None], image.shape)
    return jax.lax.select_n(kind, grey, colour.solarized(image), warp.blurred(image, radius))

  return jax.vmap(change)(images, kinds, radii)


def colour_jitter(key: jax.Array, images: jax.Array, most: Sequence[float]) -> jax.Array:
  """Brightness, contrast, saturation and, if there is a fourth number, hue in a random order.

  The factors of the first three are uniform in 1 -/+ `most`; the hue moves along its circle, whose
  length is 1, by a number uniform in -/+ `most`.
  """
  shape = (len(images), len(most), 2)
  which, uniform = jnp.moveaxis(jax.random.uniform(key, shape, jnp.float32), -1, 0)
  orders = jnp.argsort(which, axis=1)
  moves = jnp.array(most, jnp.float32)[orders] * (2 * uniform - 1)

  def change(image, kind, move):
    grey = colour.grey(image)
    mean = jnp.floor(jnp.mean(grey, dtype=jnp.float32) + 0.5).astype(jnp.uint8)
    poorer = jnp.where(kind == 0, jnp.uint8(0), jnp.where(kind == 1, mean, grey))
    blended = colour.blend(poorer[..., None], image, 1 + move)
    turned = colour.hue_moved(image, move) if len(most) > 3 else image
    return jnp.where(kind < 3, blended, turned)

  # A loop for the reason in `apply`.
  stage = lambda images, now: (jax.vmap(change)(images, *now), None)
  return jax.lax.scan(stage, images, (orders.T, moves.T))[0]
