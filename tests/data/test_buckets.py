"""Batches of about equally many tokens."""

import dataclasses
import itertools
import pickle

import jax
import numpy as np
import pytest

from mixer_jax.data import buckets, feed
from mixer_jax.data.dataset import Bucketed
from mixer_jax.errors import UserError
from tests.data.test_feed import batched


def drawn(n=600, seed=0, longest=40):
  rng = np.random.default_rng(seed)
  return np.minimum(3 + rng.geometric(0.1, (n, 2)), longest).astype(np.int32)


def order(n=600, **fields):
  lengths = drawn(n)
  return buckets.BucketOrder(3, lengths, buckets.shapes(lengths.max(1), 400, 4, 5), **fields)


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_no_other_shapes_have_less_padding(most):
  lengths = drawn(50, seed=most, longest=17).max(1)
  found = buckets.shapes(lengths, 60, 2, most)
  if (rest := min(found)) < 60 // 17 // 2 * 2:
    assert found.pop(rest) == 17
  sizes = {}
  for size in range(2, 61, 2):
    sizes[min(60 // size, 17)] = size
  assert all(sizes[length] == size for size, length in found.items()) and len(found) <= most
  assert list(found.values()) == sorted(found.values()) and max(found.values()) == 17

  def cells(ends):
    return sum(min(end for end in ends if end >= length) for length in lengths)

  others = itertools.combinations([x for x in sizes if x < 17], min(most, len(sizes)) - 1)
  assert cells(found.values()) == min(cells((*some, 17)) for some in others)


def test_each_example_comes_once_an_epoch_in_a_batch_that_holds_it():
  ordered = order()
  rest = min(ordered.shapes)
  for epoch in (1, 2):
    steps = range((epoch - 1) * ordered.steps_per_epoch, epoch * ordered.steps_per_epoch)
    batches = [ordered(step) for step in steps]
    assert {ordered.epoch_of(step) for step in steps} == {epoch}
    ids = np.concatenate(batches)
    assert len(np.unique(ids)) == len(ids) == ordered.examples(steps) > 600 - 4
    for batch in batches:
      assert ordered.lengths[batch].max() <= ordered.shapes[len(batch)]
      assert 300 < len(batch) * ordered.shapes[len(batch)] <= 400 or len(batch) == rest
    assert sum(len(batch) == rest for batch in batches) == 1


@pytest.mark.parametrize("most", [1, 6])
@pytest.mark.parametrize("n", [13, 102, 301])
def test_few_examples_are_left_out_and_none_always(n, most):
  """The bundled sentences' options: of the longest a whole batch has 144 examples."""
  lengths = np.minimum(3 + np.random.default_rng(0).poisson(11, (n, 2)), 63)
  ordered = buckets.BucketOrder(0, lengths, buckets.shapes(lengths.max(1), 2048, 8, most))
  seen = np.zeros(n, int)
  for epoch in range(1, 201):
    ids = np.concatenate(ordered.batches(epoch))
    assert len(ids) == n // 8 * 8 and len(ordered.batches(epoch)) == ordered.steps_per_epoch
    seen[ids] += 1
  assert seen.min() > 0
  longest = lengths.max(1) >= np.quantile(lengths.max(1), 0.9)
  assert seen[longest].mean() > 0.8 * seen.mean()


def test_the_order_is_a_function_of_seed_restores_and_step():
  steps = (57, 0, 21, 200)
  first = [order()(step) for step in steps]
  again = order()
  list(map(again, range(100)))  # whatever was asked for before
  for a, b in zip(first, [again(step) for step in steps]):
    np.testing.assert_array_equal(a, b)
  for a, b in zip(first, map(pickle.loads(pickle.dumps(order())), steps)):
    np.testing.assert_array_equal(a, b)
  epochs = {
    k: np.concatenate(o.batches(e))
    for k, (o, e) in {
      "first": (order(), 1),
      "second": (order(), 2),
      "seed": (dataclasses.replace(order(), seed=4), 1),
      "restored": (order(restores=1), 1),
    }.items()
  }
  for a, b in itertools.combinations(epochs.values(), 2):
    assert len(a) != len(b) or (a != b).mean() > 0.9
  assert order(restores=1).steps_per_epoch == order().steps_per_epoch == len(order().batches(7))


def test_padding_is_counted():
  ordered = order()
  real = cells = 0
  for ids in ordered.batches(1):
    mask = np.arange(ordered.shapes[len(ids)]) < ordered.lengths[ids][:, :, None]
    real, cells = real + mask.sum(), cells + mask.size
  used = {len(ids) for ids in ordered.batches(1)}
  assert ordered.summary().startswith(f"{len(used)} shapes of batches: ")
  assert ordered.summary().endswith(f"; {1 - real / cells:.1%} padding")


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["gathered", "resident"])
@pytest.mark.thorough
def test_batches_are_cut_to_their_length(limit, monkeypatch):
  monkeypatch.setattr(feed, "DEVICE_BYTES", limit)
  ordered = order()
  tokens = np.random.default_rng(1).integers(0, 99, (600, 40))
  split = Bucketed({"ids": tokens, "length": ordered.lengths[:, 0]}, ordered.lengths, 400, 5)
  opened, sharding = feed.Feed(split, ordered, batched(2)), batched(2)
  for step, (resident, rows) in enumerate(opened.windows((i, 1) for i in range(8))):
    ids = ordered(step)
    whole = feed.take(resident, jax.tree.map(lambda x: x[0], rows), sharding)
    batch = ordered.cut(whole)
    np.testing.assert_array_equal(batch["ids"], tokens[ids, : ordered.shapes[len(ids)]])
    np.testing.assert_array_equal(batch["length"], ordered.lengths[ids, 0])


def test_too_few_tokens_are_refused():
  with pytest.raises(UserError, match="batch_tokens is 150; allowed: at least 160"):
    buckets.shapes(drawn().max(1), 150, 4, 3)
