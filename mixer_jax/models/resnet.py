"""ResNet: convolutions with batch normalisation, teachers for distillation.

He et al., "Deep residual learning for image recognition", CVPR 2016,
https://arxiv.org/abs/1512.03385. Its networks for CIFAR (Section 4.2: 6n + 2 layers, shortcuts
without parameters) and those for larger images (Table 1; projections where the shape changes). In a
bottleneck the 3x3 layer has the stride, as in Facebook's and PyTorch's code ("v1.5"), not the first
layer, as in the paper.
"""

import functools
import math
from typing import Annotated, Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.errors import UserError
from mixer_jax.models import family
from mixer_jax.options import Option, one_of

STEMS = ("small", "large")
SHORTCUTS = ("projection", "padding")
_SMALL = dict(width=16, stem="small", shortcut="padding")
_LARGE = dict(width=64, stem="large", shortcut="projection")
_VARIANTS = {
  "resnet_20": dict(stages=(3, 3, 3), **_SMALL),
  "resnet_56": dict(stages=(9, 9, 9), **_SMALL),
  "resnet_18": dict(stages=(2, 2, 2, 2), **_LARGE),
  "resnet_50": dict(stages=(3, 4, 6, 3), bottleneck=True, **_LARGE),
}

Conv = functools.partial(
  nn.Conv, use_bias=False, kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal")
)
# PyTorch's epsilon and momentum (which it counts as 1 - 0.9).
BatchNorm = functools.partial(nn.BatchNorm, momentum=0.9, epsilon=1e-5)


def normalised(x: jax.Array, train: bool, **fields: Any) -> jax.Array:
  """Batch normalisation of [batch, height, width, channels], by their own statistics in training.

  Raises a UserError if training has one value a channel, whose deviation is 0.
  """
  if train and math.prod(x.shape[:-1]) < 2:
    allowed = "2 or more, by larger images, or a larger batch_size / accum_steps"
    raise UserError(
      f"{fields['name']} normalises 1 value a channel in training; allowed: {allowed}"
    )
  return BatchNorm(use_running_average=not train, **fields)(x)


class Block(nn.Module):
  """Layers on a branch, each normalised, and a shortcut; `features` are those of a 3x3 layer."""

  features: int
  stride: int
  shortcut: str
  dtype: Any = "float32"
  expansion = 1

  def _layer(self, x: jax.Array, side: int, i: int, train: bool, **fields: Any) -> jax.Array:
    """A convolution with kernels of side x side and its normalisation, the i-th of the branch."""
    fields = dict(features=self.features, strides=1, padding=side // 2) | fields
    x = Conv(kernel_size=(side, side), dtype=self.dtype, name=f"conv{i}", **fields)(x)
    return normalised(x, train, dtype=self.dtype, name=f"norm{i}")

  def _shortcut(self, x: jax.Array, train: bool) -> jax.Array:
    width = self.features * self.expansion
    if self.stride == 1 and x.shape[-1] == width:
      return x
    if self.shortcut == "padding":
      x = x[:, :: self.stride, :: self.stride]
      return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
    x = Conv(width, (1, 1), self.stride, padding=0, dtype=self.dtype, name="shortcut")(x)
    return normalised(x, train, dtype=self.dtype, name="shortcut_norm")


class BasicBlock(Block):
  """Two 3x3 layers."""

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """Maps [batch, height, width, any] to [batch, height / stride, width / stride, features]."""
    y = nn.relu(self._layer(x, 3, 1, train, strides=self.stride))
    return nn.relu(self._layer(y, 3, 2, train) + self._shortcut(x, train))


class BottleneckBlock(Block):
  """A 1x1, a 3x3 and a 1x1 layer; the last has four times the features."""

  expansion = 4

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """As `BasicBlock`, to [..., 4 * features]."""
    y = nn.relu(self._layer(x, 1, 1, train))
    y = nn.relu(self._layer(y, 3, 2, train, strides=self.stride))
    y = self._layer(y, 1, 3, train, features=self.expansion * self.features)
    return nn.relu(y + self._shortcut(x, train))


class ConvNet(family.Checked):
  """A stem, stages of blocks, the mean over places, a head.

  Attributes:
    num_classes: width of the head; 0 means no head: the mean is the output.
  """

  num_classes: int
  stages: Annotated[tuple[int, ...], Option("blocks of each stage", 1)]
  dtype: family.Dtype = "float32"

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps images [batch, height, width, 3] to float32 logits [batch, num_classes].

    Without a head (num_classes=0) the output is the mean over places.

    Args:
      images: normalised pixels.
      train: whether activations are normalised by the mean and the variance of the whole batch,
        over all devices; then the averages in the collection "batch_stats" have to be mutable: each
        is 0.9 times itself and 0.1 times the batch's. Otherwise these averages normalise. The
        variance is that of n numbers divided by n; PyTorch's average has n - 1.
    """
    x = self.enter(images, train)
    places = [(stage, i) for stage, n in enumerate(self.stages) for i in range(n)]
    for number, (stage, i) in enumerate(places):
      x = self.block(number, stage, first=not i)(x, train)
    x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
    if not self.num_classes:
      return x
    return nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros, name="head")(x)

  def convolved(self, x: jax.Array, width: int, side: int, stride: int, train: bool) -> jax.Array:
    """The stem: a convolution with kernels of side x side, its normalisation and ReLU."""
    fields = dict(strides=stride, padding=side // 2, dtype=self.dtype, name="stem")
    x = Conv(width, (side, side), **fields)(x)
    return nn.relu(normalised(x, train, dtype=self.dtype, name="stem_norm"))

  def enter(self, images: jax.Array, train: bool) -> jax.Array:
    """All before the blocks."""
    raise NotImplementedError

  def block(self, number: int, stage: int, first: bool) -> nn.Module:
    """The block of this number, all counted, in a stage, of which it may be the first."""
    raise NotImplementedError


class ResNet(ConvNet, kw_only=True):
  """ResNet: stages of blocks, each with half the side and twice the width of the one before.

  He et al., 2016, https://arxiv.org/abs/1512.03385. It is a convolutional teacher for distillation.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    model = models.ResNet(num_classes=10, stages=(1, 1), width=4)
    images = jnp.zeros((2, 16, 16, 3))
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), images)
    assert sorted(variables) == ["batch_stats", "params"]
    ```
  """

  width: family.width("channels of the first stage, of a 3x3 layer")
  bottleneck: Annotated[bool, Option("blocks of 1x1, 3x3 and 1x1 layers, not two of 3x3")] = False
  stem: one_of('3x3, or "large": 7x7 with stride 2 and a 3x3 maximum', STEMS) = "small"
  shortcut: one_of("where the shape changes: 1x1 layers, or zeros for new channels", SHORTCUTS) = (
    "projection"
  )

  def enter(self, images: jax.Array, train: bool) -> jax.Array:
    if self.stem == "small":
      return self.convolved(images, self.width, 3, 1, train)
    x = self.convolved(images, self.width, 7, 2, train)
    return nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))

  def block(self, number: int, stage: int, first: bool) -> nn.Module:
    cls: Callable[..., nn.Module] = BottleneckBlock if self.bottleneck else BasicBlock
    stride = 2 if stage and first else 1
    sizes = self.width * 2**stage, stride, self.shortcut, self.dtype
    return cls(*sizes, name=f"{cls.__name__}_{number}")


FAMILY = family.Family(
  variants=family.variants(ResNet, _VARIANTS),
  # A 3x3 kernel mixes places, and so is of the kind of layers over tokens.
  layers={
    "BasicBlock/conv1": family.TOKENS,
    "BasicBlock/conv2": family.TOKENS,
    "BottleneckBlock/conv2": family.TOKENS,
  },
  image_sizes={"resnet_20": 32, "resnet_56": 32},
)
