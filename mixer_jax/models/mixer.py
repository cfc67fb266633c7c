"""MLP-Mixer: an all-MLP architecture for vision.

Tolstikhin et al., NeurIPS 2021, https://arxiv.org/abs/2105.01601. The parameter
tree has the names of the public checkpoints of google-research/
vision_transformer, so that these load without renaming.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import attention, blocks, layers

# Table 1 of the paper; the patch size 4 variants are those of the K-FAC study
# (32x32 images), `mixer_small` is a small net to train from scratch.
_S = dict(hidden_dim=512, num_blocks=8, tokens_mlp_dim=256, channels_mlp_dim=2048)
_B = dict(hidden_dim=768, num_blocks=12, tokens_mlp_dim=384, channels_mlp_dim=3072)
_L = dict(hidden_dim=1024, num_blocks=24, tokens_mlp_dim=512, channels_mlp_dim=4096)
_H = dict(hidden_dim=1280, num_blocks=32, tokens_mlp_dim=640, channels_mlp_dim=5120)

VARIANTS = {
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

TOKEN_MIXERS = ("mlp", *attention.KINDS)


def patch_centres(rows: int, columns: int) -> jax.Array:
  """Centres (y, x) in [0, 1]^2 of the patches of an image: [1, rows * columns, 2]."""
  y, x = (jnp.arange(n) + 0.5 for n in (rows, columns))
  return jnp.stack(jnp.meshgrid(y / rows, x / columns, indexing="ij"), axis=-1).reshape(1, -1, 2)


class MixerBlock(nn.Module):
  """Token mixing, then channel mixing, each pre-normalised and residual.

  The fields are those of `Mixer`.
  """

  tokens_mlp_dim: int
  channels_mlp_dim: int
  dropout_rate: float = 0.0
  gelu: str = "tanh"
  layer_norm_epsilon: float = 1e-6
  token_mixer: str = "mlp"
  num_heads: int = 8
  dtype: Any = "float32"

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    drop_rate: float | jax.Array = 0.0,
    train: bool = False,
  ) -> jax.Array:
    """Maps [batch, tokens, channels] to the same shape.

    Args:
      x: [batch, tokens, channels].
      positions: [1, tokens, 2], for attention only.
      drop_rate: of stochastic depth, for each of the two branches.
      train: whether dropout and stochastic depth act.

    Raises:
      ValueError: an unknown token_mixer, or heads that do not divide the channels.
    """
    if self.token_mixer not in TOKEN_MIXERS:
      raise ValueError(f"token_mixer is {self.token_mixer!r}; known: {', '.join(TOKEN_MIXERS)}")

    def norm(x):
      return nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype)(x)

    def mlp(x, width, name):
      block = layers.MlpBlock(width, self.dropout_rate, self.gelu, self.dtype, name=name)
      return block(x, train=train)

    # The released training code keeps dropped branches unscaled.
    depth = layers.StochasticDepth(rescale=False)
    if self.token_mixer == "mlp":
      y = jnp.swapaxes(norm(x), 1, 2)  # [batch, channels, tokens]
      y = jnp.swapaxes(mlp(y, self.tokens_mlp_dim, "token_mixing"), 1, 2)
    else:
      y = attention.SoftmaxFreeAttention(
        self.token_mixer, self.num_heads, dtype=self.dtype, name="token_mixing"
      )(norm(x), positions)
    x = x + depth(y, drop_rate, train=train)
    y = mlp(norm(x), self.channels_mlp_dim, "channel_mixing")
    return x + depth(y, drop_rate, train=train)


class Mixer(nn.Module):
  """MLP-Mixer for images, or the same with attention in place of token mixing.

  The token-mixing MLP tells tokens apart by their order. Attention does not: it
  gets the centres of the patches, in [0, 1]^2, as coordinates prepended to each
  head's queries, keys and values (Cao, 2021).

  Attributes:
    num_classes: size of the output.
    patch_size: side of a square patch in pixels; it divides height and width.
    hidden_dim: channels C of a token.
    num_blocks: number of Mixer blocks.
    tokens_mlp_dim: hidden width D_S of token mixing; attention does not use it.
    channels_mlp_dim: hidden width D_C of channel mixing.
    dropout_rate: dropout in the MLPs.
    stochastic_depth: drop rate of the last block; it grows linearly from zero
      at the first (Section 3.1 and Appendix B of the paper).
    gelu: "tanh", as in the public models, or "exact".
    layer_norm_epsilon: 1e-6 in the public models.
    token_mixer: "mlp", or attention without softmax, "galerkin" or "fourier";
      then one model takes images of any size.
    num_heads: heads of the attention; they divide hidden_dim.
    remat: compute the inside of each block again in the backward pass, which saves
      memory; on a CPU only together with scan_blocks.
    scan_blocks: loop over one program of a block; `blocks.stacked` says how its
      parameters are laid out.
    dtype: the dtype of the computation; parameters, normalisation statistics
      and logits are float32.
  """

  num_classes: int
  patch_size: int
  hidden_dim: int
  num_blocks: int
  tokens_mlp_dim: int
  channels_mlp_dim: int
  dropout_rate: float = 0.0
  stochastic_depth: float = 0.0
  gelu: str = "tanh"
  layer_norm_epsilon: float = 1e-6
  token_mixer: str = "mlp"
  num_heads: int = 8
  remat: bool = False
  scan_blocks: bool = False
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, height, width, 3] to float32 logits [batch, num_classes].

    The tokens before the last normalisation, [batch, tokens, channels], are
    sown as "tokens" into the collection "intermediates".
    """
    x = layers.image_tokens(images, self.patch_size, self.hidden_dim, self.dtype)
    positions = patch_centres(*(side // self.patch_size for side in images.shape[1:3]))
    fields = dict(
      tokens_mlp_dim=self.tokens_mlp_dim,
      channels_mlp_dim=self.channels_mlp_dim,
      dropout_rate=self.dropout_rate,
      gelu=self.gelu,
      layer_norm_epsilon=self.layer_norm_epsilon,
      token_mixer=self.token_mixer,
      num_heads=self.num_heads,
      dtype=self.dtype,
    )
    last = max(self.num_blocks - 1, 1)
    x = blocks.apply(
      MixerBlock,
      fields,
      x,
      positions,
      drop_rates=[self.stochastic_depth * i / last for i in range(self.num_blocks)],
      train=train,
      remat=self.remat,
      scan=self.scan_blocks,
    )
    self.sow("intermediates", "tokens", x)
    x = nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name="pre_head_layer_norm")(
      x
    )
    x = jnp.mean(x, axis=1, dtype=jnp.float32)
    # A zero head starts training at the uniform prediction, as published.
    return nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros, name="head")(x)
