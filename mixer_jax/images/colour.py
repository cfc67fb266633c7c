"""Operations on the colours of one image, uint8 [height, width, 3], to the numbers of Pillow.

All but `Color` and `Sharpness` look each value up in a table, so a random one of them costs a gather:
under `vmap` every branch of a `lax.switch` would be computed on the whole image.
"""

import jax
import jax.numpy as jnp

# What `colour` does, by number; the arguments are those of Pillow's functions.
COLOURS = (
  *("Identity", "AutoContrast", "Equalize", "Invert", "Posterize", "Solarize", "SolarizeAdd"),
  *("Brightness", "Contrast", "Color", "Sharpness"),
)
_BLENDED = COLOURS.index("Color")


def colour(image: jax.Array, kind: jax.Array, value: jax.Array) -> jax.Array:
  """Applies the operation of a number, an index of `COLOURS`.

  `value` is the bits that Posterize keeps, the threshold of Solarize, the number that SolarizeAdd
  adds to values below 128, or the factor of the last four: 0 gives black (Brightness), the mean
  (Contrast), grey (Color) or smoothed edges (Sharpness), 1 the image; the others take no value.
  """
  looked_up = apply_table(image, _tables(image, value)[jnp.minimum(kind, _BLENDED - 1)])
  poorer = jnp.where(kind == _BLENDED, grey(image)[..., None], smoothed(image))
  return jnp.where(kind < _BLENDED, looked_up, blend(poorer, image, value))


def apply_table(image: jax.Array, table: jax.Array) -> jax.Array:
  """Looks each channel up in its row of a table [3, 256]."""
  return table.reshape(-1).at[_bins(image)].get(mode="promise_in_bounds")


def blend(poorer: jax.Array, image: jax.Array, factor: jax.Array) -> jax.Array:
  """Pillow's `Image.blend`: 0 gives the first image, 1 the second; cut to [0, 255], truncated."""
  poorer = poorer.astype(jnp.float32)
  mixed = poorer + factor * (image.astype(jnp.float32) - poorer)
  return jnp.clip(mixed, 0, 255).astype(jnp.uint8)


def grey(image: jax.Array) -> jax.Array:
  """The luma of ITU-R 601-2, uint8 [height, width], rounded as Pillow's mode "L"."""
  weights = jnp.array([19595, 38470, 7471], jnp.int32)  # of 2^16
  return ((jnp.sum(image * weights, axis=-1) + 2**15) >> 16).astype(jnp.uint8)


def smoothed(image: jax.Array) -> jax.Array:
  """Pillow's SMOOTH: a 3x3 mean that counts the pixel itself five times; borders stay."""
  height, width, _ = image.shape
  padded = jnp.pad(image.astype(jnp.int32), ((1, 1), (1, 1), (0, 0)))
  around = sum(padded[i : i + height, j : j + width] for i in range(3) for j in range(3))
  means = ((around + 4 * padded[1:-1, 1:-1]) * 2 + 13) // 26  # of 13 weights, rounded
  rows, columns = jnp.arange(height)[:, None], jnp.arange(width)
  inner = (rows > 0) & (rows < height - 1) & (columns > 0) & (columns < width - 1)
  return jnp.where(inner[..., None], means.astype(jnp.uint8), image)


def solarized(image: jax.Array) -> jax.Array:
  """Inverts values from 128 on."""
  return jnp.where(image < 128, image, 255 - image)


def hue_moved(image: jax.Array, move: jax.Array) -> jax.Array:
  """Adds to the hue, whose circle has the length 1; saturation and value of HSV stay."""
  r, g, b = (image[..., i].astype(jnp.float32) for i in range(3))
  value, least = jnp.maximum(jnp.maximum(r, g), b), jnp.minimum(jnp.minimum(r, g), b)
  chroma = value - least
  c = jnp.maximum(chroma, 1.0)  # of a grey pixel the hue does not matter
  hue = jnp.where(value == r, (g - b) / c, jnp.where(value == g, 2 + (b - r) / c, 4 + (r - g) / c))
  sixths = hue[..., None] + 6 * move + jnp.array([5.0, 3.0, 1.0])
  sixths -= 6 * jnp.floor(sixths / 6)  # by jnp.mod all of this took eight times as long
  less = jnp.clip(jnp.minimum(sixths, 4 - sixths), 0, 1)
  return (value[..., None] - chroma[..., None] * less + 0.5).astype(jnp.uint8)


def _bins(image: jax.Array) -> jax.Array:
  return image.astype(jnp.int32) + 256 * jnp.arange(3)


def _tables(image: jax.Array, value: jax.Array) -> jax.Array:
  """The tables of all operations but the last two, uint8 [operations, 3, 256]."""
  values, whole = jnp.arange(256), value.astype(jnp.int32)
  # A flat index: with one of three axes the scatter takes twice as long on a CPU.
  counts = jnp.zeros(3 * 256, jnp.int32).at[_bins(image).reshape(-1)].add(1).reshape(3, 256)
  mean = jnp.floor(jnp.mean(grey(image), dtype=jnp.float32) + 0.5)
  parts = (
    values,
    _auto_contrast(counts),
    _equalized(counts),
    255 - values,
    values & ~((1 << (8 - whole)) - 1),
    jnp.where(values < whole, values, 255 - values),
    jnp.where(values < 128, jnp.minimum(values + whole, 255), values),
    blend(jnp.zeros(256), values, value),
    blend(jnp.full(256, mean), values, value),
  )
  return jnp.stack([jnp.broadcast_to(part, (3, 256)).astype(jnp.uint8) for part in parts])


def _auto_contrast(counts: jax.Array) -> jax.Array:
  """Stretches each channel to [0, 255], if it has two values."""
  values, lowest = jnp.arange(256), jnp.argmax(counts > 0, axis=1)[:, None]
  highest = 255 - jnp.argmax(counts[:, ::-1] > 0, axis=1)[:, None]
  stretched = (values - lowest) * 255 // jnp.maximum(highest - lowest, 1)
  return jnp.where(highest > lowest, jnp.clip(stretched, 0, 255), values)


def _equalized(counts: jax.Array) -> jax.Array:
  """Flattens each channel's histogram, by the rule of Pillow's `ImageOps.equalize`."""
  values, below = jnp.arange(256), jnp.cumsum(counts, axis=1) - counts
  # Pixels under the highest value: its own do not count.
  step = jnp.max(jnp.where(counts > 0, below, 0), axis=1)[:, None] // 255
  flat = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
  return jnp.where(step > 0, flat, values)
