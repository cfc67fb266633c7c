"""Tokens are masked as BERT does it, inside the compiled step.

Devlin et al., "BERT", NAACL 2019, Section 3.1, https://arxiv.org/abs/1810.04805.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

# The shares of chosen tokens that become [MASK] and a random entry; the others stay.
_MASKED, _RANDOM = 0.8, 0.1


class Masked(NamedTuple):
  """A batch of sequences with up to k chosen tokens each.

  Attributes:
    ids: int32 [batch, tokens], with chosen tokens replaced.
    positions: int32 [batch, k], the places of the chosen tokens.
    targets: int32 [batch, k], their ids before.
    weights: float32 [batch, k], 0 for places beyond the last chosen token, else 1.
  """

  ids: jax.Array
  positions: jax.Array
  targets: jax.Array
  weights: jax.Array


def most(rate: float, tokens: int) -> int:
  """The largest number of tokens chosen in a sequence."""
  return max(1, math.floor(rate * tokens + 0.5))


def mask(
  keys: jax.Array, ids: jax.Array, real: jax.Array, rate: float, mask_id: int, size: int
) -> Masked:
  """Chooses and replaces the rounded share of each sequence's tokens, at least one.

  Args:
    keys: a random key for each sequence, [batch].
    ids: [batch, tokens].
    real: bool [batch, tokens], False for padding, [CLS] and [SEP], which are not chosen.
    rate: the share that is chosen.
    mask_id: the id of [MASK].
    size: the size of the vocabulary, from which random entries are drawn.
  """
  return Masked(*jax.vmap(lambda *x: _mask(*x, rate, mask_id, size))(keys, ids, real))


def _mask(key, ids, real, rate, mask_id, size):
  order_key, fate_key, entry_key = jax.random.split(key, 3)
  k = most(rate, len(ids))
  number = jnp.sum(real, dtype=jnp.float32)
  count = jnp.minimum(jnp.clip(jnp.floor(rate * number + 0.5), 1, k), number)
  scores = jnp.where(real, jax.random.uniform(order_key, ids.shape, jnp.float32), -1.0)
  positions = jax.lax.top_k(scores, k)[1].astype(jnp.int32)
  chosen = jnp.arange(k) < count
  targets = ids[positions].astype(jnp.int32)
  fate = jax.random.uniform(fate_key, (k,), jnp.float32)
  entries = jax.random.randint(entry_key, (k,), 0, size, jnp.int32)
  new = jnp.where(fate < _MASKED, mask_id, jnp.where(fate < _MASKED + _RANDOM, entries, targets))
  replaced = ids.astype(jnp.int32).at[positions].set(jnp.where(chosen, new, targets))
  return replaced, positions, targets, chosen.astype(jnp.float32)
