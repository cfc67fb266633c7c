"""MLP-Mixer: an all-MLP architecture for vision.

Tolstikhin et al., NeurIPS 2021, https://arxiv.org/abs/2105.01601. The parameter tree has the names
of the public checkpoints of google-research/ vision_transformer, so that these load without
renaming.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import attention, blocks, family, layers
from mixer_jax.options import one_of

# Table 1 of the paper; the variants of patch size 4 are the K-FAC study's (32x32
# images), `mixer_small` is a small net to train from scratch.
_S = dict(hidden_dim=512, num_blocks=8, tokens_mlp_dim=256, channels_mlp_dim=2048)
_B = dict(hidden_dim=768, num_blocks=12, tokens_mlp_dim=384, channels_mlp_dim=3072)
_L = dict(hidden_dim=1024, num_blocks=24, tokens_mlp_dim=512, channels_mlp_dim=4096)
_H = dict(hidden_dim=1280, num_blocks=32, tokens_mlp_dim=640, channels_mlp_dim=5120)

_VARIANTS = {
  "mixer_s32": dict(patch_size=32, **_S),
  "mixer_s16": dict(patch_size=16, **_S),
  "mixer_s4": dict(patch_size=4, **_S),
  "mixer_b32": dict(patch_size=32, **_B),
  "mixer_b16": dict(patch_size=16, **_B),
  "mixer_b4": dict(patch_size=4, **_B),
  "mixer_l32": dict(patch_size=32, **_L),
  "mixer_l16": dict(patch_size=16, **_L),
  "mixer_h14": dict(patch_size=14, **_H),
  "mixer_small": dict(
    patch_size=4, hidden_dim=256, num_blocks=8, tokens_mlp_dim=256, channels_mlp_dim=1024
  ),
}
TokenMixer = one_of(
  "an MLP over tokens, or attention without softmax", ("mlp", *attention.SOFTMAX_FREE)
)
NumHeads = family.width("heads of the attention; they divide hidden_dim")


def patch_centres(rows: int, columns: int) -> jax.Array:
  """Centres (y, x) in [0, 1]^2 of the patches of an image: [1, rows * columns, 2]."""
  y, x = (jnp.arange(n) + 0.5 for n in (rows, columns))
  return jnp.stack(jnp.meshgrid(y / rows, x / columns, indexing="ij"), axis=-1).reshape(1, -1, 2)


class MixerBlock(nn.Module):
  """Token mixing, then channel mixing, pre-normalised and residual.

  Fields are as in `Mixer`. `max_tokens` is the size of the matrices over tokens, 0 for that of x;
  fewer tokens use the leading part.
  """

  tokens_mlp_dim: int
  channels_mlp_dim: int
  dropout_rate: float = 0.0
  gelu: str = "tanh"
  layer_norm_epsilon: float = 1e-6
  token_mixer: str = "mlp"
  num_heads: int = 8
  max_tokens: int = 0
  dtype: Any = "float32"

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    drop_rate: Any = 0.0,
    train: bool = False,
  ) -> jax.Array:
    """Maps x, [batch, tokens, channels], to the same shape.

    `positions` [1, tokens, any] are for attention only. `mask` [batch, tokens] is True for a real
    token; others influence no real one. If `train`, stochastic depth at `drop_rate`, a number, and
    dropout act on each of the two branches. A ValueError is raised for heads that do not divide the
    channels, and for too many tokens.
    """
    norm = lambda x: nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype)(x)
    fields = (self.dropout_rate, self.gelu, self.dtype)
    mlp = lambda x, dim, name: layers.MlpBlock(dim, *fields, name=name)(x, train=train)
    # The released training code keeps dropped branches unscaled.
    depth = layers.StochasticDepth(rescale=False)
    if self.token_mixer == "mlp":
      mix = lambda y: mlp(y, self.tokens_mlp_dim, "token_mixing")
      y = layers.over_tokens(mix, norm(x), self.max_tokens or x.shape[1], mask)
    else:
      y = attention.OperatorAttention(
        self.token_mixer, self.num_heads, dtype=self.dtype, name="token_mixing"
      )(norm(x), positions, mask)
    x = x + depth(y, drop_rate, train=train)
    y = mlp(norm(x), self.channels_mlp_dim, "channel_mixing")
    return x + depth(y, drop_rate, train=train)


class MixerStack(family.Stack, kw_only=True):
  """The blocks of Mixers of images, text and functions.

  Stochastic depth follows Section 3.1 and Appendix B of the paper.
  """

  tokens_mlp_dim: family.width("hidden width of the MLP over tokens; attention has none")
  channels_mlp_dim: family.MlpDim
  dropout_rate: family.DropoutRate = 0.0
  stochastic_depth: family.rate(
    "drop rate of the last block; grows linearly from 0 at the first"
  ) = 0.0
  gelu: family.Gelu = "tanh"
  last_norm = "pre_head_layer_norm"

  def mix(self, x: jax.Array, train: bool, mask: Any = None, grid: Any = ()) -> Any:
    if grid:
      positions = patch_centres(*grid)
    else:
      places = jnp.arange(x.shape[1]) + 0.5
      positions = places.reshape(1, -1, 1) / (self.max_tokens or x.shape[1])
    last = max(self.num_blocks - 1, 1)
    drop_rates = [self.stochastic_depth * i / last for i in range(self.num_blocks)]
    return blocks.apply(self, MixerBlock, x, positions, mask, drop_rates=drop_rates, train=train)


class Mixer(MixerStack, family.Model, kw_only=True):
  """MLP-Mixer for images, or the same with attention in place of token mixing.

  Tolstikhin et al., 2021, https://arxiv.org/abs/2105.01601. The token-mixing MLP tells tokens apart
  by their order. Attention does not: it gets the centres of the patches, in [0, 1]^2, as
  coordinates prepended to each head's queries, keys and values (Cao, 2021), and takes images of any
  size.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    sizes = dict(hidden_dim=8, num_blocks=1, tokens_mlp_dim=4, channels_mlp_dim=16)
    model = models.Mixer(num_classes=10, patch_size=8, **sizes)
    images = jnp.zeros((2, 32, 32, 3))
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), images)
    ```
  """

  token_mixer: TokenMixer = "mlp"
  num_heads: NumHeads = 8


FAMILY = family.Family(
  variants=family.variants(Mixer, _VARIANTS),
  layers={
    "MixerBlock/token_mixing": family.TOKENS,
    "MixerBlock/token_mixing/Dense_0": family.TOKENS_IN,
    "MixerBlock/token_mixing/Dense_1": family.TOKENS_OUT,
  },
  image_sizes={"mixer_s4": 32, "mixer_b4": 32, "mixer_small": 32},
)
