"""Several random views of each image, for learning without labels."""

import dataclasses
from typing import Annotated, Mapping, NamedTuple

import jax
import jax.numpy as jnp

from mixer_jax.errors import UserError
from mixer_jax.images import augment, colour, rand_augment, warp
from mixer_jax.images.image_data import ImageData
from mixer_jax.options import Option, Size, pair

GLOBAL = 2  # views of a large part of the image
_Shares = lambda text: Annotated[tuple[float, ...], Option(text, 1e-3, 1, length=2)]
_Chance = lambda text: Annotated[float, Option(text, 0, 1)]


@dataclasses.dataclass(frozen=True)
class Views:
  """The group `config.views`; the defaults are those of DINO.

  Caron et al., 2021, https://arxiv.org/abs/2104.14294, with the numbers of its code, which are those
  of BYOL. A view is a random area, maybe mirrored; then come colour jitter, grey, blur, solarisation.
  """

  local: Annotated[int, Option("views of a small part of each image", 0, 64)] = 8
  local_size: Annotated[
    Size, Option("side of local views in pixels, or height and width; 0: data.image_size", 0, 2**14)
  ] = 0
  global_share: _Shares("least and most share of the area of the two large views") = (0.4, 1.0)
  local_share: _Shares("least and most share of the area of the small views") = (0.05, 0.4)
  jitter: _Chance("share of views with other colours") = 0.8
  jitter_most: Annotated[
    tuple[float, ...],
    Option("largest changes of brightness, contrast, saturation and hue", 0, 1, length=4),
  ] = (0.4, 0.4, 0.2, 0.1)
  grey: _Chance("share of views without colours") = 0.2
  blur: Annotated[
    tuple[float, ...], Option("share of first, second and small views", 0, 1, length=3)
  ] = (1.0, 0.1, 0.5)
  blur_radius: Annotated[float, Option("most standard deviation in pixels", 0.1, 2)] = 2.0
  solarise: _Chance("share of second views inverted from 128 on") = 0.2

  def check(self) -> None:
    """Raises a UserError for shares whose least is more than the most, or too much hue."""
    for name in ("global_share", "local_share"):
      if (shares := tuple(getattr(self, name)))[0] > shares[1]:
        raise UserError(f"views.{name} is {shares}; allowed: the least share first")
    if self.jitter_most[3] > 0.5:
      raise UserError(f"views.jitter_most is {tuple(self.jitter_most)}; allowed: a hue up to 0.5")


class _Kinds(NamedTuple):
  """Views of one size: float32 [views], and [views, 2] for `share`."""

  share: jax.Array
  blur: jax.Array
  solarise: jax.Array


def views(
  key: jax.Array, images: jax.Array, how: Views, data: ImageData
) -> Mapping[str, jax.Array]:
  """Random views of images [batch, height, width, 3] uint8, normalised, float32.

  Crops are bilinear and antialiased, where the published ones are bicubic.

  Returns:
    "global" [batch, 2, *data.image_size, 3] and "local" [batch, how.local,
    *how.local_size, 3].
  """
  n, side = how.local, data.image_size
  shares = [how.global_share] * GLOBAL + [how.local_share] * n
  blurs, solarised = [*how.blur[:2], *[how.blur[2]] * n], [0.0, how.solarise] + [0.0] * n
  kinds = _Kinds(*(jnp.array(x, jnp.float32) for x in (shares, blurs, solarised)))
  if how.local_size in (0, side):
    found = _of_size(key, images, kinds, side, how, data)
    return {"global": found[:, :GLOBAL], "local": found[:, GLOBAL:]}
  large, small = (jax.tree.map(lambda x: x[part], kinds) for part in (slice(2), slice(2, None)))
  keys = jax.random.split(key)
  return {
    "global": _of_size(keys[0], images, large, side, how, data),
    "local": _of_size(keys[1], images, small, how.local_size, how, data),
  }


def _of_size(
  key: jax.Array, images: jax.Array, kinds: _Kinds, size: Size, how: Views, data: ImageData
) -> jax.Array:
  batch, n = len(images), len(kinds.blur)
  if not n:
    return jnp.zeros((batch, 0, *pair(size), 3), jnp.float32)
  kinds = jax.tree.map(lambda x: jnp.tile(x, (batch,) + (1,) * (x.ndim - 1)), kinds)
  keys = jax.random.split(key, 3)
  uniform = jax.random.uniform(keys[0], (batch * n, warp.BOX), jnp.float32)
  area = lambda u, image, share: warp.random_area(u, image, share, size)
  crops = jax.vmap(area)(uniform, jnp.repeat(images, n, axis=0), kinds.share)
  crops = _changed(keys[1:], crops, kinds, how, data.flip)
  return augment.normalise(crops, data).reshape(batch, n, *pair(size), 3)


def _changed(
  keys: jax.Array, images: jax.Array, kinds: _Kinds, how: Views, flip: bool
) -> jax.Array:
  """Mirrors crops uint8 [n, height, width, 3] and changes their colours."""
  choices = jax.random.uniform(keys[0], (6, len(images)), jnp.float32)
  picked = lambda i, share: (choices[i] < share)[:, None, None, None]
  if flip:
    images = jnp.where(picked(0, 0.5), images[:, :, ::-1], images)
  if how.jitter:
    jittered = rand_augment.colour_jitter(keys[1], images, tuple(how.jitter_most))
    images = jnp.where(picked(1, how.jitter), jittered, images)
  images = jnp.where(picked(2, how.grey), colour.grey(images)[..., None], images)
  if any(how.blur):
    blurred = jax.vmap(warp.blurred)(images, 0.1 + (how.blur_radius - 0.1) * choices[3])
    images = jnp.where(picked(4, kinds.blur), blurred, images)
  return jnp.where(picked(5, kinds.solarise), colour.solarized(images), images)
