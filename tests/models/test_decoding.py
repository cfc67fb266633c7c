"""Beam search against plain Python, brute force, and the model without a cache."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.models import decoding
from mixer_jax.models.decoding import Special
from tests.models.test_translation import MIXINGS, pairs, randomised, small

PAD, BOS, EOS, VOCAB = 0, 1, 2, 5
SPECIAL = Special(BOS, EOS, PAD)
WORDS = (3, 4)
BATCH = 6


class Toy:
  """A recurrent net: its logits depend on the whole past, each example has its own."""

  def __init__(self, seed=0, eos_bias=0.0):
    rng = np.random.default_rng(seed)
    self.words, self.turn = rng.normal(size=(VOCAB, 4)), rng.normal(size=(4, 4))
    self.head = 2 * rng.normal(size=(BATCH, 4, VOCAB))
    self.head_bias = np.eye(VOCAB)[EOS] * eos_bias
    self.cache = lambda beams, batch=BATCH: jnp.zeros((batch, beams, 4))

  def step(self, ids, t, cache):
    state = jnp.tanh(cache @ self.turn + jnp.asarray(self.words)[ids])
    head = self.head[: len(ids)]
    return jnp.einsum("bkd,bdv->bkv", state, head) + self.head_bias, state

  def log_probs(self, example, past):
    """Of the token after a past that begins with bos, float64."""
    state = np.zeros(4)
    for token in past:
      state = np.tanh(state @ self.turn + self.words[token])
    logits = state @ self.head[example] + self.head_bias
    return logits - np.log(np.exp(logits).sum())

  def log_prob(self, example, ids):
    past = [BOS, *ids]
    return sum(self.log_probs(example, past[: i + 1])[token] for i, token in enumerate(ids))


def normalised(log_prob, length, alpha):
  return log_prob / ((5 + length) / 6) ** alpha


def searched(toy, length, beams, alpha, batch=BATCH):
  search = jax.jit(
    lambda alpha: decoding.beam_search(
      toy.step, toy.cache(beams, batch), batch,
      beams=beams, length=length, special=SPECIAL, alpha=alpha,
    )
  )  # fmt: skip
  return search(alpha)


def plain(hypotheses, example, rank=0):
  """The tokens of a result up to eos; after it there is padding alone."""
  ids = list(np.asarray(hypotheses.ids[example, rank]))
  n = ids.index(EOS) + 1
  assert set(ids[n:]) <= {PAD}
  return ids[:n]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 3.0])
@pytest.mark.first(1)
def test_a_beam_for_all_prefixes_finds_the_best_of_all_sequences(alpha):
  toy, length = Toy(), 4
  every = [[*words, EOS] for n in range(length) for words in itertools.product(WORDS, repeat=n)]
  found = searched(toy, length, beams=16, alpha=alpha)
  for i in range(BATCH):
    score = lambda ids, i=i: normalised(toy.log_prob(i, ids), len(ids), alpha)
    best = max(every, key=score)
    assert plain(found, i) == best
    np.testing.assert_allclose(found.scores[i, 0], score(best), rtol=1e-5)


def beam_in_python(toy, example, length, beams, alpha):
  """The rules of `beam_search` with lists, without its bound on live hypotheses."""
  live, finished = [((BOS,), 0.0)], []
  for t in range(length):
    allowed = (EOS,) if t == length - 1 else (EOS, *WORDS)
    longer = [
      ((*past, token), score + toy.log_probs(example, past)[token])
      for past, score in live
      for token in allowed
    ]
    longer.sort(key=lambda x: -x[1])
    for ids, score in longer[:beams]:
      if ids[-1] == EOS:
        finished.append((list(ids[1:]), normalised(score, t + 1, alpha)))
    live = [x for x in longer if x[0][-1] != EOS][:beams]
    if len(finished) >= beams:
      break
  return max(finished, key=lambda x: x[1])


@pytest.mark.parametrize("beams, alpha", [(1, 0.6), (2, 0.6), (3, 4.0)])
@pytest.mark.first(2)
def test_beams_equal_those_of_plain_python(beams, alpha):
  """One beam takes the likeliest token. A large alpha prefers long sequences, also to those with which a search has ended."""
  for seed in range(2):
    toy = Toy(seed, eos_bias=1.0 - seed * 4.0)
    found = searched(toy, 7, beams, alpha)
    for i in range(BATCH):
      ids, score = beam_in_python(toy, i, 7, beams, alpha)
      assert plain(found, i) == ids
      np.testing.assert_allclose(found.scores[i, 0], score, rtol=1e-5)


def test_every_hypothesis_has_its_score_and_its_rank():
  toy = Toy(1, eos_bias=-1.0)
  found = searched(toy, 7, 4, 0.6)
  scores = np.asarray(found.scores)
  assert (scores[:, 1:] <= scores[:, :-1]).all() and np.isfinite(scores[:, 0]).all()
  for i, rank in np.argwhere(np.isfinite(scores)):
    ids = plain(found, i, rank)
    expected = normalised(toy.log_prob(i, ids), len(ids), 0.6)
    np.testing.assert_allclose(scores[i, rank], expected, rtol=1e-5)
  assert (np.asarray(found.ids)[~np.isfinite(scores)] == PAD).all()


@pytest.mark.thorough
def test_an_example_does_not_depend_on_its_batch():
  """Others that take longer change nothing in a search that has ended."""
  toy = Toy(2, eos_bias=1.0)
  whole, few = searched(toy, 7, 3, 0.6), searched(toy, 7, 3, 0.6, batch=2)
  assert len({len(plain(whole, i)) for i in range(BATCH)}) > 1
  np.testing.assert_array_equal(whole.ids[:2], few.ids)
  np.testing.assert_allclose(whole.scores[:2], few.scores, rtol=1e-6)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.first(1)
def test_the_search_stops_when_all_have_ended(beams):
  steps = []

  def step(ids, t, cache):
    jax.debug.callback(lambda: steps.append(1))
    best = jnp.where(t < 2, WORDS[0], EOS)
    return jnp.broadcast_to(10.0 * (jnp.arange(VOCAB) == best), (*ids.shape, VOCAB)), cache

  options = dict(beams=beams, length=50, special=SPECIAL, alpha=0.0)
  found = decoding.beam_search(step, (), 2, **options)
  jax.effects_barrier()
  assert plain(found, 0) == plain(found, 1) == [WORDS[0]] * 2 + [EOS]
  assert len(steps) == 3


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.thorough
def test_translations_equal_those_without_a_cache(mixing, beams):
  model = small(mixing, num_blocks=2, max_length=7)
  variables = randomised(model)
  source, source_mask, _, _ = pairs()
  special = Special(1, 2, 0)

  def whole(ids, t, cache):
    """The forward pass of all words so far; the cache has them."""
    cache = cache.at[:, :, t].set(ids)
    run = lambda ids: model.apply(variables, source, source_mask, ids, jnp.ones_like(ids))
    return jax.vmap(run, 1, 1)(cache)[:, :, t], cache

  empty = jnp.zeros((3, beams, 7), jnp.int32)
  options = dict(beams=beams, length=7, special=special)
  expected = jax.jit(lambda: decoding.beam_search(whole, empty, 3, **options))()
  found = decoding.translate(model, variables, source, source_mask, **options)
  assert found.ids.shape == (3, beams, 7)
  np.testing.assert_array_equal(found.ids, expected.ids)
  np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
