"""Encoders of text: the all-MLP families over tokens of a vocabulary.

  encoder = models.encoder("gmlp_text_small", vocab_size=30522, max_length=128)

The blocks are those of the families for images. Tokens have no positions but their places in the
matrices over tokens, as gMLP for text has none. Padding changes nothing: a real token has the
same output in a batch of its own length. Embeddings start at the normal distribution of BERT, 0.02.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import family, gmlp, mixer, resmlp

EMBEDDING_INIT = nn.initializers.normal(0.02)

# Liu et al.: 36 blocks of Table 3, and 18 of Kurtsev's classifiers; base and large as in the
# specifications of the models for pretraining, whose printed sizes (gMLP 130 and 365
# million, aMLP 109 and 316) are met by 32,000 words and Toeplitz matrices for 512
# tokens. `small` is for two cores.
_PAPER = dict(hidden_dim=512, ffn_dim=3072)
_LARGE = dict(hidden_dim=768, ffn_dim=3072)
_SMALL = dict(num_blocks=6, hidden_dim=128)
_GMLP = {
  "gmlp_text_18": dict(num_blocks=18, **_PAPER),
  "gmlp_text_36": dict(num_blocks=36, **_PAPER),
  "gmlp_text_base": dict(num_blocks=48, spatial="toeplitz", **_PAPER),
  "gmlp_text_large": dict(num_blocks=96, spatial="toeplitz", **_LARGE),
  "gmlp_text_small": dict(ffn_dim=512, **_SMALL),
  "amlp_text_18": dict(num_blocks=18, attention_dim=64, **_PAPER),
  "amlp_text_base": dict(num_blocks=36, attention_dim=64, spatial="toeplitz", **_PAPER),
  "amlp_text_large": dict(num_blocks=72, attention_dim=128, spatial="toeplitz", **_LARGE),
  "amlp_text_small": dict(ffn_dim=512, attention_dim=64, **_SMALL),
  "tmlp_text_18": dict(num_blocks=18, spatial="toeplitz", **_PAPER),
  "tmlp_text_small": dict(ffn_dim=512, spatial="toeplitz", **_SMALL),
}
_MIXER = {"mixer_text_small": dict(tokens_mlp_dim=64, channels_mlp_dim=512, **_SMALL)}
_RESMLP = {"resmlp_text_small": dict(channels_mlp_dim=512, layer_scale_init=0.1, **_SMALL)}


class TextModel(family.Stack, kw_only=True):
  """Embeddings of words, blocks (`mix`), a normalisation.

  Attributes:
    vocab_size: number of words of the embedding.
    max_length: largest number of tokens of a sequence; the size of matrices over tokens.
    segments: number of kinds of segments, each with an embedding; 0 means none.
    features_dim: channels of frozen features in the place of words; 0 means words.
  """

  vocab_size: int
  max_length: int
  segments: int = 0
  features_dim: int = 0

  @property
  def max_tokens(self) -> int:
    return self.max_length

  def setup(self):
    # Float32, as logits made with it are.
    embed = lambda size: nn.Embed(size, self.hidden_dim, embedding_init=EMBEDDING_INIT)
    if self.features_dim:
      self.project = nn.Dense(self.hidden_dim, dtype=self.dtype)
    else:
      self.words = embed(self.vocab_size)
    if self.segments:
      self.segment_types = embed(self.segments)

  @nn.compact
  def __call__(
    self,
    ids: jax.Array | None,
    mask: jax.Array,
    segments: jax.Array | None = None,
    features: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> jax.Array:
    """Maps a batch of sequences to normalised tokens [batch, tokens, hidden_dim] of `dtype`.

    Args:
      ids: words [batch, tokens], int, at most max_length tokens; unused if there are features.
      mask: [batch, tokens], True for a real token; the outputs of others mean nothing.
      segments: [batch, tokens], int; None means all 0. Unused by a model without segments.
      features: [batch, tokens, features_dim], if features_dim is not 0.
      train: whether to drop, which needs the rng "dropout".

    Raises:
      ValueError: too many tokens, or features where there must be none or the reverse.
    """
    if mask.shape[1] > self.max_length:
      raise ValueError(f"{mask.shape[1]} tokens are more than max_length {self.max_length}")
    if (features is None) == bool(self.features_dim):
      given = "no" if features is None else "some"
      raise ValueError(f"there are {given} features, but features_dim is {self.features_dim}")
    x = self.words(ids) if features is None else self.project(features)
    if self.segments:
      zeros = lambda: jnp.zeros(mask.shape, jnp.int32)
      x = x + self.segment_types(zeros() if segments is None else segments)
    return self.pool(self.mix(x.astype(self.dtype), train, mask.astype(bool)))

  def attend(self, x: jax.Array) -> jax.Array:
    """Float32 logits [..., vocab_size] of tokens [..., hidden_dim], by the embedding of words.

    Raises a ValueError if there is none.
    """
    if self.features_dim:
      raise ValueError("a model of features has no words to attend to; its head cannot be tied")
    return self.words.attend(x.astype(jnp.float32))


class GmlpText(gmlp.GmlpStack, TextModel, kw_only=True):
  """gMLP, aMLP and tMLP for text.

  Liu et al., 2021, https://arxiv.org/abs/2105.08050. LayerNorm's epsilons, which the paper does not
  print, are 1e-5.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    sizes = dict(vocab_size=11, max_length=4, hidden_dim=8, num_blocks=1)
    model = models.GmlpText(ffn_dim=16, spatial="toeplitz", **sizes)
    ids, mask = jnp.ones((2, 4), int), jnp.ones((2, 4), bool)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, mask)
    ```
  """

  layer_norm_epsilon: family.Epsilon = 1e-5


class MixerText(mixer.MixerStack, TextModel, kw_only=True):
  """Mixer for text.

  Attention instead of the MLP over tokens gets the place of a token, in (0, 1), as a fraction of
  max_length.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    sizes = dict(vocab_size=11, max_length=4, hidden_dim=8, num_blocks=1)
    model = models.MixerText(tokens_mlp_dim=4, channels_mlp_dim=16, **sizes)
    ids, mask = jnp.ones((2, 4), int), jnp.ones((2, 4), bool)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, mask)
    ```
  """

  token_mixer: mixer.TokenMixer = "mlp"
  num_heads: mixer.NumHeads = 8


class ResMlpText(resmlp.ResMlpStack, TextModel, kw_only=True):
  """ResMLP for text, without convolutions and class token.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    sizes = dict(vocab_size=11, max_length=4, hidden_dim=8, num_blocks=1)
    model = models.ResMlpText(channels_mlp_dim=16, layer_scale_init=0.1, **sizes)
    ids, mask = jnp.ones((2, 4), int), jnp.ones((2, 4), bool)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, mask)
    ```
  """


_TABLES = {GmlpText: _GMLP, MixerText: _MIXER, ResMlpText: _RESMLP}
FAMILY = family.Family(
  variants={k: v for c, table in _TABLES.items() for k, v in family.variants(c, table).items()},
  layers=dict.fromkeys(("words", "segment_types", "project"), family.STEM),
)
