"""Random erasing, Mixup and CutMix: on normalised images [batch, height, width, 3], float32."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from mixer_jax.images import warp
from mixer_jax.images.policy import Augment

_ERASED = (0.02, 1 / 3)  # share of an image, as in timm
_RATIO = 1 / 0.3  # most aspect ratio of the rectangle


def erase(key: jax.Array, images: jax.Array, share: float) -> jax.Array:
  """Replaces a rectangle in a share of the images by standard normal noise in each value.

  Random erasing (Zhong et al., 2020, https://arxiv.org/abs/1708.04896) with the sizes of timm: 2%
  to a third of the image, aspect ratios of 0.3 to 1/0.3, "pixel" noise. The noise is drawn once for
  the batch, and each image takes it from another place on: to draw it for each image took as long
  as all else here.
  """
  choice_key, noise_key = jax.random.split(key)
  batch, height, width, channels = images.shape
  size = height * width * channels
  chosen, places, boxes = jnp.split(
    jax.random.uniform(choice_key, (batch, 2 + warp.BOX), jnp.float32), (1, 2), axis=1
  )
  used = chosen < share
  # A branch of its own: XLA would compute the noise anew for each image.
  draw = lambda: jax.random.normal(noise_key, (size,), jnp.float32)
  noise = jnp.tile(jax.lax.cond(jnp.any(used), draw, lambda: jnp.zeros(size, jnp.float32)), 2)

  def change(image, used, place, uniform):
    covered = used & inside(
      warp.random_box(uniform, (height, width), _ERASED, _RATIO), height, width
    )
    own = jax.lax.dynamic_slice_in_dim(noise, place, size).reshape(image.shape)
    return jnp.where(covered[..., None], own, image)

  places = jnp.floor(places[:, 0] * size).astype(jnp.int32)
  return jax.vmap(change)(images, used[:, 0], places, boxes)


def inside(box: jax.Array, height: int, width: int) -> jax.Array:
  """A mask of the pixels that a rectangle (left, top, width, height) covers: bool [height, width]."""
  left, top, w, h = box
  x, y = jnp.arange(width), jnp.arange(height)[:, None]
  return (x >= left) & (x < left + w) & (y >= top) & (y < top + h)


def mix(key: jax.Array, images: jax.Array, how: Augment) -> tuple[jax.Array, jax.Array]:
  """Mixup or CutMix of each image and the one as far from the end of the batch.

  Mixup (Zhang et al., 2018, https://arxiv.org/abs/1710.09412) adds images, lambda times the own;
  CutMix (Yun et al., 2019, https://arxiv.org/abs/1905.04899) pastes a rectangle of the other one,
  of sides sqrt(1 - lambda) times the image's, around a uniform centre, cut off at the border.
  Lambda is Beta(alpha, alpha). `how.mix` says whether the choice, lambda and the rectangle are drawn
  for each example, or once for all as in the code of both papers, and of DeiT.

  Returns:
    The images, and the share of the own image, [batch]: of CutMix one minus the area that was
    pasted, after it was cut off.
  """
  batch, height, width, _ = images.shape
  n = 1 if how.mix == "batch" else batch
  switch, place, x, y = jax.random.uniform(key, (4, n), jnp.float32)
  cut = switch < (how.switch if how.mixup and how.cutmix else float(how.cutmix > 0))
  # An alpha of 0 is not used: its method is never chosen.
  share, own_side = (beta_quantile(place, alpha or 1.0) for alpha in (how.mixup, how.cutmix))
  centres = jnp.stack([x, y], axis=1)
  boxes = jax.vmap(lambda s, c: cut_box(s, c, height, width))(jnp.sqrt(1 - own_side), centres)
  pasted = jax.vmap(lambda box: inside(box, height, width))(boxes)
  own = jnp.where(cut[:, None, None], 1.0 - pasted, share[:, None, None])
  shares = jnp.where(cut, 1 - jnp.mean(pasted, axis=(1, 2), dtype=jnp.float32), share)
  mixed = own[..., None] * images + (1 - own[..., None]) * images[::-1]
  return mixed, jnp.broadcast_to(shares, (batch,))


def beta_quantile(uniform: jax.Array, alpha: float) -> jax.Array:
  """The quantile function of Beta(alpha, alpha), linear between 4,097 points."""
  table = jnp.asarray(scipy.special.betaincinv(alpha, alpha, np.linspace(0, 1, 4097)), jnp.float32)
  place = uniform * 4096
  low = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, 4095)
  return table[low] + (table[low + 1] - table[low]) * (place - low)


def cut_box(side: jax.Array, centre: jax.Array, height: int, width: int) -> jax.Array:
  """The rectangle (left, top, width, height) around a centre in [0, 1)^2, cut off at the border.

  Half a side, rounded down, lies before the middle and as much behind it, as in the paper's code:
  an odd side is a pixel shorter. (timm 1.0.31 keeps that pixel.)
  """
  size = jnp.array([width, height], jnp.float32)
  lengths, middle = jnp.floor(side * size), jnp.floor(centre * size)
  low = middle - jnp.floor(lengths / 2)
  high = jnp.minimum(middle + jnp.floor(lengths / 2), size)
  low = jnp.maximum(low, 0)
  return jnp.concatenate([low, high - low])


def soft_labels(
  labels: jax.Array, shares: jax.Array | None, classes: int, smoothing: float
) -> jax.Array:
  """Distributions float32 [batch, classes] of int labels [batch].

  A share of each, [batch], is the own label's, the rest that of the partner in `mix` (None: no
  mixing). Smoothing (Szegedy et al., 2016, https://arxiv.org/abs/1512.00567) spreads a part of
  the whole evenly over all classes.
  """
  own = jax.nn.one_hot(labels, classes, dtype=jnp.float32)
  if shares is not None:
    own = shares[:, None] * own + (1 - shares[:, None]) * own[::-1]
  return (1 - smoothing) * own + smoothing / classes
