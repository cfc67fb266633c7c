"""RegNetY: convolutions in groups and squeeze-and-excitation, the teachers of DeiT and ResMLP.

Radosavovic et al., "Designing network design spaces", CVPR 2020, https://arxiv.org/abs/2003.13678,
with the stem of one 3x3 layer of 32 channels and as many squeezed channels as a quarter of the
block's input, as in Facebook's pycls and timm. A number in a name is multiply-adds in units of 0.1
billion, at 224x224 pixels.
"""

from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import family, resnet
from mixer_jax.options import Option

_STEM = 32
# Blocks and widths of the four stages, and the width of a group.
_SIZES = {
  "regnety_002": ((1, 1, 4, 7), (24, 56, 152, 368), 8),
  "regnety_016": ((2, 6, 17, 2), (48, 120, 336, 888), 24),
  "regnety_040": ((2, 6, 12, 2), (128, 192, 512, 1088), 64),
  "regnety_080": ((2, 4, 10, 1), (168, 448, 896, 2016), 56),
  "regnety_160": ((2, 4, 11, 1), (224, 448, 1232, 3024), 112),
}
_FIELDS = ("stages", "widths", "group_width")


class RegNetYBlock(resnet.Block):
  """A 1x1 layer, a 3x3 one in groups, squeeze-and-excitation (Hu et al., 2018) and a 1x1 layer."""

  group_width: int = 1

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """Maps [batch, height, width, any] to [batch, height / stride, width / stride, features]."""
    groups = dict(feature_group_count=self.features // self.group_width)
    y = nn.relu(self._layer(x, 1, 1, train))
    y = nn.relu(self._layer(y, 3, 2, train, strides=self.stride, **groups))
    y = y * self._gates(y, max(1, round(x.shape[-1] / 4)))
    y = self._layer(y, 1, 3, train)
    return nn.relu(y + self._shortcut(x, train))

  def _gates(self, y: jax.Array, width: int) -> jax.Array:
    squeezed = nn.Dense(width, dtype=self.dtype, name="squeeze")(jnp.mean(y, axis=(1, 2)))
    excited = nn.Dense(self.features, dtype=self.dtype, name="excite")(nn.relu(squeezed))
    return nn.sigmoid(excited)[:, None, None]


class RegNetY(resnet.ConvNet, kw_only=True):
  """RegNetY: stages of blocks with groups and squeeze-and-excitation, each with half the side.

  Radosavovic et al., 2020, https://arxiv.org/abs/2003.13678. RegNetY-16GF is the teacher of DeiT
  and ResMLP.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    model = models.RegNetY(num_classes=10, stages=(1,), widths=(8,), group_width=4)
    images = jnp.zeros((2, 16, 16, 3))
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), images)
    ```
  """

  widths: Annotated[tuple[int, ...], Option("channels of each stage", 1)]
  group_width: family.width("channels of a group; it divides all widths")

  def enter(self, images: jax.Array, train: bool) -> jax.Array:
    return self.convolved(images, _STEM, 3, 2, train)

  def block(self, number: int, stage: int, first: bool) -> nn.Module:
    sizes = self.widths[stage], 2 if first else 1, "projection", self.dtype, self.group_width
    return RegNetYBlock(*sizes, name=f"RegNetYBlock_{number}")


_VARIANTS = {name: dict(zip(_FIELDS, sizes)) for name, sizes in _SIZES.items()}
FAMILY = family.Family(
  variants=family.variants(RegNetY, _VARIANTS),
  layers={"RegNetYBlock/conv2": family.TOKENS},
)
