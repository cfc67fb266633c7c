"""Heads on encoders of text: words behind masks, and classes of sequences.

Their parameters are {"encoder": ..., "head": ...}, so that one hands the encoder's to the other.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import family, layers
from mixer_jax.models.text import EMBEDDING_INIT, TextModel
from mixer_jax.options import one_of

POOLINGS = ("first", "mean", "pooler")
_POOLING = (
  'the first token, the mean of the real ones, or "pooler", BERT\'s dense layer on the first'
)


class MaskedLm(nn.Module):
  """Predicts the words at chosen tokens of an encoder (masked language model).

  Tied, the embedding of words is the matrix of the head, beside a bias, as in BERT. BERT's dense
  layer before it is left out, for the published all-MLP models of text print none.

  Attributes:
    encoder: the encoder of text, as `encoder` builds it.
    tied: whether the embedding of words is the head's matrix.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    encoder = models.encoder("gmlp_text_small", vocab_size=11, max_length=4, num_blocks=1)
    ids, mask, masked = jnp.ones((2, 4), int), jnp.ones((2, 4), bool), jnp.array([[1], [2]])
    model = models.MaskedLm(encoder)
    logits, _ = jax.jit(model.init_with_output)(jax.random.key(0), ids, mask, None, masked)
    assert logits.shape == (2, 1, 11)
    ```
  """

  encoder: TextModel
  tied: bool = True

  @nn.compact
  def __call__(
    self,
    ids: jax.Array | None,
    mask: jax.Array,
    segments: jax.Array | None,
    positions: jax.Array,
    features: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> jax.Array:
    """Computes float32 logits [batch, k, vocab_size] of the words at k positions of each sequence.

    Args:
      ids: words [batch, tokens], int; None if there are features.
      mask: [batch, tokens], True for a real token.
      segments: [batch, tokens], int; None means all 0.
      positions: tokens whose words are predicted, [batch, k], int.
      features: frozen features [batch, tokens, features_dim] in the place of words.
      train: whether to drop, which needs the rng "dropout".

    Raises:
      ValueError: the encoder does not take the inputs, or a tied head has features.
    """
    x = self.encoder(ids, mask, segments, features, train=train)
    x = jnp.take_along_axis(x, positions[..., None], axis=1).astype(jnp.float32)
    if self.tied:
      return layers.Affine(None, name="head")(self.encoder.attend(x))
    return nn.Dense(self.encoder.vocab_size, kernel_init=EMBEDDING_INIT, name="head")(x)


class TextClassifier(family.Checked):
  """Classifies sequences by their first token or the mean of all; the head starts at zero.

  With the pooling "pooler" the first token goes through a dense layer and tanh, as in BERT.

  Attributes:
    encoder: the encoder of text, as `encoder` builds it.
    num_classes: width of the head.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    encoder = models.encoder("gmlp_text_small", vocab_size=11, max_length=4, num_blocks=1)
    ids, mask = jnp.ones((2, 4), int), jnp.ones((2, 4), bool)
    model = models.TextClassifier(encoder, num_classes=3, pooling="mean")
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), ids, mask)
    assert logits.shape == (2, 3)
    ```
  """

  encoder: TextModel
  num_classes: int
  pooling: one_of(_POOLING, POOLINGS) = "first"
  dropout_rate: family.rate("dropout before the head") = 0.0

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
    """Computes float32 logits [batch, num_classes].

    Args:
      ids: words [batch, tokens], int; None if there are features.
      mask: [batch, tokens], True for a real token.
      segments: [batch, tokens], int; None means all 0.
      features: frozen features [batch, tokens, features_dim] in the place of words.
      train: whether to drop, which needs the rng "dropout".

    Raises:
      ValueError: the encoder does not take the inputs.
    """
    x = self.encoder(ids, mask, segments, features, train=train).astype(jnp.float32)
    if self.pooling == "first":
      x = x[:, 0]
    elif self.pooling == "pooler":
      x = jnp.tanh(nn.Dense(x.shape[-1], kernel_init=EMBEDDING_INIT, name="pooler")(x[:, 0]))
    else:
      real = mask.astype(bool)[..., None]
      x = jnp.where(real, x, 0).sum(axis=1) / jnp.maximum(real.sum(axis=1), 1)
    x = layers.Dropout(self.dropout_rate, deterministic=not train)(x)
    return nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros, name="head")(x)
