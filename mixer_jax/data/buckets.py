"""Batches of about equally many tokens: examples of about one length come together."""

import dataclasses
import functools
import math
from typing import Any, Iterable, Mapping

import jax
import numpy as np

from mixer_jax.data.dataset import Bucketed, Dataset
from mixer_jax.data.order import Order
from mixer_jax.errors import UserError


def shapes(lengths: np.ndarray, batch_tokens: int, multiple: int, most: int) -> dict[int, int]:
  """Chooses the shapes of batches that leave the least padding: lengths by sizes, shortest first.

  The last shape may be a smaller batch of the same, longest length, for the rest of an epoch.

  Args:
    lengths: of the examples, [n].
    batch_tokens: largest product of a size and its length.
    multiple: a number that divides each size.
    most: largest number of shapes, without that last one.

  Raises:
    UserError: batches of `multiple` of the longest example have more tokens.
  """
  longest = int(lengths.max())
  if batch_tokens < multiple * longest:
    raise UserError(
      f"data.batch_tokens is {batch_tokens}; allowed: at least {multiple * longest}, batch_size"
      f" {multiple} x {longest} tokens of the longest training example"
    )
  sizes = range(multiple, batch_tokens // int(lengths.min()) + multiple, multiple)
  largest = {min(batch_tokens // size, longest): size for size in sizes}
  # No example of a batch is longer than the batch, so the last length is the longest.
  ends = np.array(sorted(length for length in largest if length), np.int64)
  below = np.searchsorted(np.sort(lengths), ends, side="right")
  chosen = _fewest_cells(ends, below, min(most, max(len(lengths) // multiple, 1)))
  found = {largest[int(ends[i])]: int(ends[i]) for i in chosen}
  _, rest = _filled(found, _used(np.diff(below[chosen], prepend=0), multiple))
  return found | ({rest: longest} if rest else {})


def _used(own: np.ndarray, multiple: int) -> np.ndarray:
  """Returns how many of each shape's own examples an epoch takes; their sum is a multiple.

  The shapes with most examples leave out the surplus, so that no example is left out in every epoch.
  """
  used = own.copy()
  for _ in range(int(used.sum()) % multiple):
    used[np.argmax(used)] -= 1
  return used


def _filled(sizes: Iterable[int], own: np.ndarray) -> tuple[int, int]:
  """Returns the number of batches, and of examples left, for shapes with `own` examples each."""
  batches = waiting = 0
  for size, number in zip(sizes, own):
    full, waiting = divmod(int(number) + waiting, size)
    batches += full
  return batches, waiting


def _fewest_cells(ends: np.ndarray, below: np.ndarray, most: int) -> list[int]:
  """Chooses at most `most` ends, the last among them, by dynamic programming; returns indices.

  An example is padded to the next chosen end. `below` counts the examples up to each end.
  """
  cells, before = below * ends, []  # cells that the examples up to each end take in one bucket
  for _ in range(min(most, len(ends)) - 1):
    added = (below[None] - below[:, None]) * ends[None] + cells[:, None]
    added = np.where(np.tri(len(ends), dtype=bool), np.iinfo(np.int64).max, added)
    start = np.argmin(added, axis=0)
    fewer = np.min(added, axis=0)
    before.append(np.where(fewer < cells, start, -1))
    cells = np.minimum(cells, fewer)
  chosen = [len(ends) - 1]
  for start in reversed(before):
    if start[chosen[0]] >= 0:
      chosen.insert(0, int(start[chosen[0]]))
  return chosen


@dataclasses.dataclass(frozen=True, eq=False)
class BucketOrder:
  """Example ids of each step, from 0, int32 [size]; an `order.Order` without `copies`.

  Each epoch is a function of seed, epoch and restores: it draws the examples anew, fills the batches
  of each length, and shuffles the batches. Examples that fill no batch go to the next longer ones.
  An epoch leaves out fewer examples than the number that divides all sizes, and each epoch others.

  Attributes:
    seed: of the order.
    lengths: real tokens of the sequences of each example, [n, sequences].
    shapes: lengths of batches by their sizes, shortest first.
    restores: number of restores so far, as in `order.Order`.
  """

  seed: int
  lengths: np.ndarray
  shapes: Mapping[int, int]
  restores: int = 0

  @property
  def batch_size(self) -> int:
    """Number of examples of a whole batch of the longest sequences."""
    longest = max(self.shapes.values())
    return max(size for size, length in self.shapes.items() if length == longest)

  @functools.cached_property
  def steps_per_epoch(self) -> int:
    return _filled(self.shapes, self._used)[0]

  @functools.cached_property
  def _bucket(self) -> np.ndarray:
    """The index of the first shape that is long enough for each example, [n]."""
    return np.searchsorted(list(self.shapes.values()), self.lengths.max(1))

  @functools.cached_property
  def _used(self) -> np.ndarray:
    own = np.bincount(self._bucket, minlength=len(self.shapes))
    return _used(own, math.gcd(*self.shapes))

  def batches(self, epoch: int) -> list[np.ndarray]:
    """The batches of an epoch, from 1, each int32 [size]."""
    entropy = (self.seed, epoch, self.restores) if self.restores else (self.seed, epoch)
    rng = np.random.default_rng(entropy)
    drawn = rng.permutation(len(self.lengths)).astype(np.int32)
    found, waiting = [], drawn[:0]
    for number, size in enumerate(self.shapes):
      own = drawn[self._bucket[drawn] == number][: self._used[number]]
      own = rng.permutation(np.concatenate([waiting, own]))
      full = len(own) // size * size
      found += list(own[:full].reshape(-1, size))
      waiting = own[full:]
    return [found[i] for i in rng.permutation(len(found))]

  def epoch_of(self, step: int) -> int:
    return step // self.steps_per_epoch + 1

  def __call__(self, step: int) -> np.ndarray:
    return _latest_batches(self, self.epoch_of(step))[step % self.steps_per_epoch]

  def examples(self, steps: range) -> int:
    return sum(len(self(step)) for step in steps)

  def cut(self, examples: Any) -> Any:
    """Cuts stacked examples to the length of their shape (traceable)."""
    cut = lambda x: x[:, : self.shapes[len(x)]] if x.ndim > 1 else x
    return jax.tree.map(cut, examples)

  def summary(self) -> str:
    """A line on the shapes and the padding of an epoch."""
    batches = self.batches(1)
    cells = sum(len(ids) * self.shapes[len(ids)] for ids in batches) * self.lengths.shape[1]
    padding = 1 - self.lengths[np.concatenate(batches)].sum() / cells
    used = {len(ids) for ids in batches}
    named = ", ".join(f"{size}x{length}" for size, length in self.shapes.items() if size in used)
    number = "one shape" if len(used) == 1 else f"{len(used)} shapes"
    return f"{number} of batches: {named}; {padding:.1%} padding"


# Steps come one after the other, so the batches of an epoch are kept.
_latest_batches = functools.lru_cache(maxsize=2)(BucketOrder.batches)


def order_of(
  dataset: Dataset,
  seed: int,
  batch_size: int,
  repeats: int = 1,
  labels: np.ndarray | None = None,
) -> Order | BucketOrder:
  """Returns the order of a training split, which is bucketed or has batches of one size.

  Raises a UserError for repeats of a bucketed split.
  """
  if not isinstance(dataset, Bucketed):
    return Order(seed, len(dataset), batch_size, repeats=repeats, labels=labels)
  if repeats != 1:
    raise UserError(f"repeats are {repeats}; allowed with batches of several shapes: 1")
  limits = (dataset.batch_tokens, batch_size, dataset.most_shapes)
  return BucketOrder(seed, dataset.lengths, shapes(dataset.lengths.max(1), *limits))
