"""The order of examples: pure functions, so that any process knows which example comes when."""

import dataclasses
import functools
from typing import Any

import numpy as np

from mixer_jax.options import one_of

Sampling = one_of(
  "what comes equally often in an epoch: each training example, or each class, by copies of its"
  ' examples ("class-balanced", Kang et al., 2020)',
  ("example", "class"),
)


def train_indices(
  seed: int,
  epoch: int,
  num_examples: int,
  batch_size: int,
  restores: int = 0,
  repeats: int = 1,
  labels: np.ndarray | None = None,
) -> np.ndarray:
  """Example ids of an epoch's batches, int32 [steps, batch_size]: a function of the arguments.

  Each epoch, from 1, is a new permutation, and so is one after a restore, when the run has
  diverged. The examples that do not fill a last batch are left out.

  With `repeats` each comes so many times in a row (repeated augmentation: Hoffer et al., 2020,
  https://arxiv.org/abs/1901.09335). An epoch has as many steps as without, and so sees only one
  out of `repeats` examples: this is the sampler of DeiT, but that it hands the copies to different
  devices, each with its own choices.

  With `labels` [num_examples] each class comes as often as the others, to within one; in a class
  each example comes once before any comes again.
  """
  rng = np.random.default_rng((seed, epoch, restores) if restores else (seed, epoch))
  used = num_examples // batch_size * batch_size
  if labels is None:
    order = rng.permutation(num_examples).astype(np.int32)
  else:
    order = _by_class(rng, labels, -(-used // repeats))
  order = order if repeats == 1 else np.repeat(order[: -(-used // repeats)], repeats)
  return order[:used].reshape(-1, batch_size)


def _by_class(rng: np.random.Generator, labels: np.ndarray, total: int) -> np.ndarray:
  """Ids of examples of all classes, int32 [total], in a random order."""
  _, sizes = np.unique(labels, return_counts=True)
  classes, drawn = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1]), []
  for i, chosen in enumerate(rng.permutation(len(classes))):
    own, number = classes[chosen], total // len(classes) + (i < total % len(classes))
    drawn += [rng.permutation(own) for _ in range(number // len(own))]
    drawn.append(rng.permutation(own)[: number % len(own)])
  return rng.permutation(np.concatenate(drawn)).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
  """Example ids of each step, from 0, int32 [batch_size]: see `train_indices`."""

  seed: int
  num_examples: int
  batch_size: int
  restores: int = 0
  repeats: int = 1
  labels: np.ndarray | None = None

  @property
  def steps_per_epoch(self) -> int:
    return self.num_examples // self.batch_size

  def epoch_of(self, step: int) -> int:
    return step // self.steps_per_epoch + 1

  def indices(self, epoch: int) -> np.ndarray:
    """The ids of an epoch, from 1, [steps, batch_size]."""
    sizes = (self.num_examples, self.batch_size, self.restores, self.repeats, self.labels)
    return train_indices(self.seed, epoch, *sizes)

  def __call__(self, step: int) -> np.ndarray:
    return _latest_indices(self, self.epoch_of(step))[step % self.steps_per_epoch]

  def examples(self, steps: range) -> int:
    """Number of examples of some steps together."""
    return len(steps) * self.batch_size

  def cut(self, examples: Any) -> Any:
    """The part of a batch's stacked examples that is trained on: all of them (traceable)."""
    return examples

  def summary(self) -> str:
    """A line on the shapes of batches; "" if they have one."""
    return ""

  def copies(self, step: int) -> np.ndarray:
    """The number of each example's copy among its copies in the epoch, from 0: [batch_size]."""
    place = step % self.steps_per_epoch
    if self.labels is not None:
      return _latest_copies(self, self.epoch_of(step))[place]
    return (place * self.batch_size + np.arange(self.batch_size)) % self.repeats

  def all_copies(self, epoch: int) -> np.ndarray:
    """The `copies` of an epoch, [steps, batch_size]."""
    ids = _latest_indices(self, epoch)
    by_id = np.argsort(ids.reshape(-1), kind="stable")
    ordered = ids.reshape(-1)[by_id]
    found = np.empty(ids.size, np.int64)
    found[by_id] = np.arange(ids.size) - np.searchsorted(ordered, ordered)
    return found.reshape(ids.shape)


# Steps come one after the other, for the training split and maybe another one.
_latest_indices = functools.lru_cache(maxsize=2)(Order.indices)
_latest_copies = functools.lru_cache(maxsize=2)(Order.all_copies)


def test_indices(num_examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Ids and mask, [batches, batch_size], that cover each example exactly once."""
  batches = -(-num_examples // batch_size)
  ids = np.arange(batches * batch_size).reshape(batches, batch_size)
  return np.minimum(ids, num_examples - 1).astype(np.int32), ids < num_examples


test_indices.__test__ = False  # pytest must not take it for a test


def crop_rng(seed: int, epoch: int, example: int, copy: int = 0) -> np.random.Generator:
  """The generator behind the random choices for a copy of an example in an epoch, as its crop."""
  # The last number keeps example 0 from the stream of `train_indices`: NumPy pads with zeros.
  return np.random.default_rng((seed, epoch, example, 1 + copy))
