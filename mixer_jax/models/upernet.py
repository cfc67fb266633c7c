"""UperNet: classes of pixels from the features of a model of images at four depths.

Xiao et al., "Unified perceptual parsing for scene understanding", ECCV 2018,
https://arxiv.org/abs/1807.10221; on a backbone whose grids have one size, as in the code of BEiT
(Bao et al., 2022, https://arxiv.org/abs/2106.08254) and XCiT: the grids after four blocks are rescaled
to 4, 2, 1 and 1/2 of their sides first.

The published decoder has batch normalisation. Here it is a LayerNorm over the channels of each point,
as in the pyramid on plain backbones of Li et al. (2022, https://arxiv.org/abs/2203.16527): a batch of a
few crops gives poor statistics, the same function is trained and tested, the parts of a batch do not
depend on each other, and K-FAC has no statistics of others to differentiate through.
"""

import functools
from typing import Annotated, Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.models import family, layers
from mixer_jax.options import Option

SCALES = (1, 2, 3, 6)  # sides of the grids of the pyramid pooling
_BLOCKS = "four blocks whose tokens are read, from 0; []: at 1/3, 1/2, 2/3 and the end of the depth"
_SECOND = "weight of the loss of a second head, on the third features; 0: no such head"


def upernet(
  backbone: Callable[..., family.Model],
  num_classes: int,
  *,
  blocks: Annotated[tuple[int, ...], Option(_BLOCKS, 0)] = (),
  width: family.width("channels of the decoder") = 512,
  dropout_rate: family.rate("dropout of channels before the heads") = 0.1,
  auxiliary: Annotated[float, Option(_SECOND, 0)] = 0.0,
) -> "UperNet":
  """The decoder on a backbone that is ready but for `num_classes` and `feature_blocks`.

  A ValueError is raised unless `blocks` are four in rising order that end with the last one.
  """
  model = backbone(num_classes=0)
  chosen = tuple(map(int, blocks)) or feature_blocks(model.num_blocks)
  last = model.num_blocks - 1
  if len(chosen) != 4 or list(chosen) != sorted(chosen) or chosen[-1] != last:
    raise ValueError(f"decoder.blocks is {chosen}; allowed: four in rising order, the last {last}")
  return UperNet(model.clone(feature_blocks=chosen), num_classes, width, dropout_rate, auxiliary)


def feature_blocks(depth: int) -> tuple[int, ...]:
  """The blocks of a backbone that are read: 3, 5, 7 and 11 of 12, as published."""
  return tuple(max(0, depth * part // 6 - 1) for part in (2, 3, 4, 6))


class _ConvNorm(nn.Module):
  """A convolution without a bias (of one point a dense layer), a norm over channels, ReLU."""

  features: int
  side: int
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    fields = dict(dtype=self.dtype, use_bias=False, kernel_init=nn.initializers.he_normal())
    if self.side == 1:
      x = layers.Dense(self.features, name="dense", **fields)(x)
    else:
      x = nn.Conv(self.features, (self.side,) * 2, name="conv", **fields)(x)
    return nn.relu(nn.LayerNorm(dtype=self.dtype, name="norm")(x))


class _Doubled(nn.Module):
  """A transposed convolution of 2x2 with stride 2: a dense layer that makes four points of each.

  Each of the four has a bias of its own. XLA's convolution takes some forty times as long on a CPU.
  """

  features: int
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [batch, rows, columns, any] to [batch, 2 rows, 2 columns, features]."""
    batch, rows, columns, _ = x.shape
    x = layers.Dense(4 * self.features, dtype=self.dtype, name="dense")(x)
    x = x.reshape(batch, rows, columns, 2, 2, self.features).swapaxes(2, 3)
    return x.reshape(batch, 2 * rows, 2 * columns, self.features)


class UperNet(nn.Module):
  """A backbone and its decoder; see `upernet` for the fields."""

  backbone: family.Model
  num_classes: int
  width: int = 512
  dropout_rate: float = 0.1
  auxiliary: float = 0.0

  @nn.compact
  def __call__(
    self, images: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, jax.Array | None]:
    """Maps [batch, height, width, 3] to float32 logits [batch, rows, columns, classes].

    The grid has four times as many rows and columns as the backbone has patches. The second part
    are the logits of the second head, on the backbone's own grid; None without it, or unless `train`.
    """
    dtype = self.backbone.dtype
    conv = functools.partial(_ConvNorm, dtype=dtype)
    levels = self._rescaled(self.backbone(images, train=train))
    second = None
    if self.auxiliary and (train or self.is_initializing()):
      x = conv(max(1, self.width // 2), 3, name="auxiliary")(levels[2])
      second = self._head(x, "auxiliary_head", train)
    pooled = [
      resized(conv(self.width, 1, name=f"pool_{n}")(mean_pool(levels[3], n)), levels[3].shape[1:3])
      for n in SCALES
    ]
    top = conv(self.width, 3, name="pyramid")(jnp.concatenate([levels[3], *pooled], axis=-1))
    merged = [top]  # the coarsest first
    for i in (2, 1, 0):
      lateral = conv(self.width, 1, name=f"lateral_{i}")(levels[i])
      merged.append(lateral + resized(merged[-1], lateral.shape[1:3]))
    fine = merged[-1].shape[1:3]
    outputs = [conv(self.width, 3, name=f"output_{3 - i}")(x) for i, x in enumerate(merged) if i]
    outputs = [resized(x, fine) for x in (top, *outputs)]
    x = conv(self.width, 3, name="fusion")(jnp.concatenate(outputs[::-1], axis=-1))
    return self._head(x, "head", train), second

  def _rescaled(self, grids: list[jax.Array]) -> list[jax.Array]:
    """Grids of 4, 2, 1 and 1/2 times the sides, from four of one size."""
    channels, dtype = self.backbone.hidden_dim, self.backbone.dtype
    up = lambda x, name: _Doubled(channels, dtype, name=name)(x)
    first = nn.gelu(nn.LayerNorm(dtype=dtype, name="up_4_norm")(up(grids[0], "up_4_first")))
    return [
      up(first, "up_4_second"),
      up(grids[1], "up_2"),
      grids[2],
      nn.max_pool(grids[3], (2, 2), (2, 2), padding="SAME"),
    ]

  def _head(self, x: jax.Array, name: str, train: bool) -> jax.Array:
    rate = np.float32(self.dropout_rate)  # Dropout draws numbers of its type
    drop = nn.Dropout(rate, broadcast_dims=(1, 2), deterministic=not train)
    x, start = drop(x.astype(jnp.float32)), nn.initializers.zeros
    return layers.Dense(self.num_classes, kernel_init=start, name=name)(x)


def resized(x: jax.Array, size: tuple[int, int]) -> jax.Array:
  """Interpolates [batch, rows, columns, channels] to other rows and columns, pixels as areas."""
  shape = (x.shape[0], *size, x.shape[3])
  return x if shape == x.shape else jax.image.resize(x, shape, "linear", antialias=False)


def mean_pool(x: jax.Array, side: int) -> jax.Array:
  """Means of [batch, rows, columns, channels] over `side` x `side` areas, which may overlap.

  Area i of n points begins at floor(i n / side) and ends before ceil((i + 1) n / side).
  """
  rows, columns = (_areas(n, side).astype(x.dtype) for n in x.shape[1:3])
  return jnp.einsum("ih,bhwc,jw->bijc", rows, x, columns, precision="highest")


def _areas(points: int, side: int) -> np.ndarray:
  """The matrix [side, points] of these means along one axis."""
  first = np.arange(side) * points // side
  last = -(-np.arange(1, side + 1) * points // side)
  inside = (np.arange(points) >= first[:, None]) & (np.arange(points) < last[:, None])
  return inside / inside.sum(axis=1, keepdims=True)
