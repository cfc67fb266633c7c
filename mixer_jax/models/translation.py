"""Sequence-to-sequence ResMLP, and the Transformer that it is compared with.

  model = models.translator("resmlp_translate_6", vocab_size=32000, max_length=128)

Touvron et al., "ResMLP: Feedforward networks for image classification with data-efficient
training", TPAMI 2022, https://arxiv.org/abs/2105.03404, Section 3.5: the encoder and the decoder of
Vaswani et al., "Attention is all you need", 2017, https://arxiv.org/abs/1706.03762, with a linear
layer over the tokens in the place of self-attention, triangular in the decoder. Cross-attention is
kept.

Choices that the papers leave: GELU in both; the Transformer normalises before each branch, as
ResMLP; embeddings start at deviation 1 / sqrt(d) and are multiplied by sqrt(d), as in Vaswani et
al.; layers over channels start at Xavier's uniform distribution; dropout acts on embeddings and on
the ends of branches; encoder and decoder end with a normalisation.
"""

from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.models import blocks, family, layers
from mixer_jax.models.resmlp import LayerScaleInit
from mixer_jax.models.translation_blocks import DecoderBlock, EncoderBlock, norm
from mixer_jax.options import Option, one_of

MIXINGS = ("linear", "attention")
_MIXING = "mixing of tokens: a matrix over them (ResMLP), or self-attention (Transformer)"

_PAPER = dict(hidden_dim=512, channels_mlp_dim=2048, num_heads=8)
# For two cores.
_SMALL = dict(hidden_dim=256, channels_mlp_dim=1024, num_heads=4, num_blocks=3)
_SIZES = {"6": dict(num_blocks=6, **_PAPER), "12": dict(num_blocks=12, **_PAPER), "small": _SMALL}
_NAMES = {"linear": "resmlp_translate", "attention": "transformer_translate"}
_VARIANTS = {
  f"{name}_{size}": dict(mixing=mixing, **fields)
  for mixing, name in _NAMES.items()
  for size, fields in _SIZES.items()
}


def positions(length: int, channels: int) -> np.ndarray:
  """Sinusoidal positions [length, channels], float32 (Vaswani et al., Section 3.5)."""
  channel = np.arange(channels)
  angle = np.arange(length)[:, None] / 10000.0 ** (channel // 2 * 2 / channels)
  return np.where(channel % 2, np.cos(angle), np.sin(angle)).astype(np.float32)


class Translator(family.Checked):
  """Encoder, decoder, and logits of the words that come next in the target.

  Matrices over tokens are [max_length, max_length]; a batch takes their leading parts, as
  published, and knows no other positions. The Transformer adds sinusoidal positions to the
  embeddings, and has LayerNorm where ResMLP has Aff and LayerScale. Padding does not influence the
  outputs of real tokens.

  Attributes:
    vocab_size: number of words of source and target together.
    max_length: largest number of tokens of a source, and of a target.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    sizes = dict(hidden_dim=8, num_blocks=1, channels_mlp_dim=16, num_heads=2)
    model = models.Translator(vocab_size=11, max_length=4, mixing="attention", **sizes)
    ids, mask = jnp.ones((2, 4), int), jnp.ones((2, 4), bool)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, mask, ids, mask)
    ```
  """

  vocab_size: int
  max_length: int
  hidden_dim: family.width("channels of a token")
  num_blocks: family.width("blocks of the encoder, and of the decoder")
  channels_mlp_dim: family.MlpDim
  num_heads: family.width("heads of an attention; they divide hidden_dim")
  mixing: one_of(_MIXING, MIXINGS)
  layer_scale_init: LayerScaleInit = 0.2
  dropout_rate: family.rate("dropout of embeddings and branches") = 0.1
  gelu: family.Gelu = "exact"
  layer_norm_epsilon: family.Epsilon = 1e-6
  tied: Annotated[bool, Option("one matrix embeds sources and targets and is the head")] = True
  dtype: family.Dtype = "float32"

  def setup(self):
    start = nn.initializers.normal(self.hidden_dim**-0.5)
    embed = lambda: nn.Embed(self.vocab_size, self.hidden_dim, embedding_init=start)
    if self.tied:
      self.words = embed()
    else:
      self.source_words, self.target_words = embed(), embed()
      self.head = nn.Dense(self.vocab_size, use_bias=False, kernel_init=start)
    self.dropout = layers.Dropout(self.dropout_rate)
    block = lambda cls, i: cls(name=f"{cls.__name__}_{i}", **blocks.fields_of(self, cls))
    self.encoder = [block(EncoderBlock, i) for i in range(self.num_blocks)]
    self.decoder = [block(DecoderBlock, i) for i in range(self.num_blocks)]
    last = lambda: norm(self.mixing, self.layer_norm_epsilon, self.dtype)
    self.encoder_norm, self.decoder_norm = last(), last()

  def __call__(
    self,
    source_ids: jax.Array,
    source_mask: jax.Array,
    target_ids: jax.Array,
    target_mask: jax.Array,
    *,
    train: bool = False,
  ) -> jax.Array:
    """Computes logits of the words that follow those of the target.

    The logits of word t depend only on the target's words 0 to t.

    Args:
      source_ids: words of the source, [batch, n], int, n at most max_length.
      source_mask: [batch, n], True for a real token.
      target_ids: words of the target, [batch, m], int, m at most max_length.
      target_mask: [batch, m], True for a real token.
      train: whether to drop, which needs the rng "dropout".

    Returns:
      Float32 logits [batch, m, vocab_size].

    Raises:
      ValueError: there are too many tokens, or heads that do not divide the channels.
    """
    encoded, memory_mask = self.encode(source_ids, source_mask, train=train), source_mask != 0
    x, mask = self._embedded(target_ids, "target", train), target_mask != 0
    for block in self.decoder:
      x = block(x, mask, block.memory(encoded), memory_mask, train=train)
    return self._logits(x)

  def encode(self, ids: jax.Array, mask: jax.Array, *, train: bool = False) -> jax.Array:
    """Encodes sources.

    Args:
      ids: words of the source, [batch, n], int.
      mask: [batch, n], True for a real token.
      train: whether to drop, which needs the rng "dropout".

    Returns:
      Outputs [batch, n, hidden_dim] of `dtype`.
    """
    x, mask = self._embedded(ids, "source", train), mask != 0
    for block in self.encoder:
      x = block(x, mask, train=train)
    return self.encoder_norm(x)

  def start(self, ids: jax.Array, mask: jax.Array, *, beams: int, length: int) -> tuple[Any, Any]:
    """Returns the memory of sources and an empty cache, both for `step`.

    Args:
      ids: words of the source, [batch, n], int.
      mask: [batch, n], True for a real token.
      beams: number of targets that are decoded for each source.
      length: most tokens of a target.

    Returns:
      The memory, and the cache, whose arrays are [batch, beams, length, ...].

    Raises:
      ValueError: `length` is more than max_length.
    """
    self._check(length)
    encoded = self.encode(ids, mask)
    memory = [block.memory(encoded) for block in self.decoder], mask != 0
    return memory, [block.empty_cache(len(ids), beams, length) for block in self.decoder]

  def step(self, ids: jax.Array, t: jax.Array, memory: Any, cache: Any) -> tuple[jax.Array, Any]:
    """Decodes one token of each beam: the call's float32 logits at t, without the other places.

    Args:
      ids: token t of the targets, [batch, beams].
      t: its place; the steps of 0 to t - 1 have filled the cache.
      memory: the memory of `start`.
      cache: the cache of the step before, or of `start`.

    Returns:
      Logits [batch, beams, vocab_size], and the cache for place t + 1.
    """
    x, (memories, mask) = self._embedded(ids, "target", place=t), memory
    filled = []
    for block, own, old in zip(self.decoder, memories, cache):
      x, new = block.step(x, t, old, own, mask)
      filled.append(new)
    return self._logits(x), filled

  def _check(self, length: int) -> None:
    if length > self.max_length:
      raise ValueError(f"{length} tokens are more than max_length {self.max_length}")

  def _embedded(
    self, ids: jax.Array, side: str, train: bool = False, place: jax.Array | None = None
  ) -> jax.Array:
    """Embeddings of whole sequences, or of tokens that are all at one place."""
    if place is None:
      self._check(ids.shape[1])
    words = self.words if self.tied else getattr(self, f"{side}_words")
    x = words(ids) * self.hidden_dim**0.5
    if self.mixing == "attention":
      table = jnp.asarray(positions(self.max_length, self.hidden_dim))
      x = x + (table[: ids.shape[1]] if place is None else table[place])
    return self.dropout(x.astype(self.dtype), deterministic=not train)

  def _logits(self, x: jax.Array) -> jax.Array:
    x = self.decoder_norm(x).astype(jnp.float32)
    return self.words.attend(x) if self.tied else self.head(x)


_LAYERS = {
  "cross_patch": family.TOKENS_SQUARE,
  "attention": family.TOKENS,
  "cross_attention": family.TOKENS,
}
_BLOCKS = ("EncoderBlock", "DecoderBlock")
FAMILY = family.Family(
  variants=family.variants(Translator, _VARIANTS),
  layers={f"{block}/{name}": layer for block in _BLOCKS for name, layer in _LAYERS.items()}
  | dict.fromkeys(("words", "source_words", "target_words"), family.STEM),
)
