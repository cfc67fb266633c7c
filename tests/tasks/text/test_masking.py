"""The choice and the replacement of masked tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.tasks.masked_lm import masking

MASK, SIZE = 4, 50


def masked(rate=0.15, tokens=128, batch=400, seed=0):
  rng = np.random.default_rng(seed)
  ids = rng.integers(5, SIZE, (batch, tokens)).astype(np.int32)
  lengths = rng.integers(3, tokens + 1, batch)
  real = np.arange(tokens) < lengths[:, None]
  real[:, 0] = False
  keys = jax.random.split(jax.random.key(seed), batch)
  found = masking.mask(keys, jnp.asarray(ids), jnp.asarray(real), rate, MASK, SIZE)
  return ids, real, jax.tree.map(np.asarray, found)


def test_the_rounded_share_of_each_sequence_is_chosen():
  for rate in (0.15, 0.4):
    _, real, found = masked(rate)
    number = real.sum(1)
    assert found.weights.sum(1).tolist() == np.maximum(1, np.floor(rate * number + 0.5)).tolist()
    assert found.positions.shape[1] == masking.most(rate, 128)


def test_only_real_tokens_are_chosen_and_each_once():
  ids, real, found = masked()
  for row in range(len(ids)):
    chosen = found.positions[row][found.weights[row] == 1]
    assert len(set(chosen)) == len(chosen) and real[row, chosen].all()
    np.testing.assert_array_equal(found.targets[row], ids[row, found.positions[row]])
    others = np.setdiff1d(np.arange(ids.shape[1]), chosen)
    np.testing.assert_array_equal(found.ids[row, others], ids[row, others])


def test_eight_of_ten_become_masks_and_one_another_word():
  _ids, _, found = masked(batch=2000)
  chosen = found.weights == 1
  new = np.take_along_axis(found.ids, found.positions, 1)[chosen]
  old = found.targets[chosen]
  n = len(old)
  within = lambda share, p: abs(share - p) < 4 * (p * (1 - p) / n) ** 0.5
  assert within(np.mean(new == MASK), 0.8 + 0.1 / SIZE)
  assert within(np.mean(new == old), 0.1 + 0.1 / SIZE)
  random = new[(new != MASK) & (new != old)]
  assert within(len(random) / n, 0.1 * (1 - 2 / SIZE)) and len(set(random)) > SIZE / 2


@pytest.mark.thorough
def test_all_tokens_are_chosen_equally_often():
  tokens, batch = 20, 4000
  real = np.ones((batch, tokens), bool)
  keys = jax.random.split(jax.random.key(1), batch)
  found = masking.mask(keys, jnp.full((batch, tokens), 7), jnp.asarray(real), 0.15, MASK, SIZE)
  counts = np.bincount(np.asarray(found.positions).ravel(), minlength=tokens)
  expected = 3 * batch / tokens
  assert np.abs(counts - expected).max() < 5 * expected**0.5


@pytest.mark.thorough
def test_a_sequence_without_words_has_none_to_find():
  keys = jax.random.split(jax.random.key(0), 2)
  ids = jnp.full((2, 8), 9)
  found = masking.mask(keys, ids, jnp.zeros((2, 8), bool), 0.15, MASK, SIZE)
  assert not found.weights.any()
  np.testing.assert_array_equal(found.ids, ids)
