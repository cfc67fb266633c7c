"""The order of examples: pure functions, so that any process knows which example comes when."""

import dataclasses
import functools
from typing import Any

import numpy as np


def train_indices(
  seed: int, epoch: int, num_examples: int, batch_size: int, restores: int = 0, repeats: int = 1
) -> np.ndarray:
  """Example ids of an epoch's batches, int32 [steps, batch_size]: a function of the arguments.

  Each epoch, from 1, is a new permutation, and so is one after a restore, when the run has
  diverged. The examples that do not fill a last batch are left out.

  With `repeats` each comes so many times in a row (repeated augmentation: Hoffer et al., 2020,
  https://arxiv.org/abs/1901.09335). An epoch has as many steps as without, and so sees only one
  out of `repeats` examples: this is the sampler of DeiT, but that it hands the copies to different
  devices, each with its own choices.
  """
  entropy = (seed, epoch, restores) if restores else (seed, epoch)
  order = np.random.default_rng(entropy).permutation(num_examples).astype(np.int32)
  used = num_examples // batch_size * batch_size
  order = order if repeats == 1 else np.repeat(order[: -(-used // repeats)], repeats)
  return order[:used].reshape(-1, batch_size)


# Steps come one after the other, for the training split and maybe another one.
_latest_indices = functools.lru_cache(maxsize=2)(train_indices)


@dataclasses.dataclass(frozen=True)
class Order:
  """Example ids of each step, from 0, int32 [batch_size]: see `train_indices`."""

  seed: int
  num_examples: int
  batch_size: int
  restores: int = 0
  repeats: int = 1

  @property
  def steps_per_epoch(self) -> int:
    return self.num_examples // self.batch_size

  def epoch_of(self, step: int) -> int:
    return step // self.steps_per_epoch + 1

  def __call__(self, step: int) -> np.ndarray:
    sizes = (self.num_examples, self.batch_size, self.restores, self.repeats)
    ids = _latest_indices(self.seed, self.epoch_of(step), *sizes)
    return ids[step % self.steps_per_epoch]

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
    first = step % self.steps_per_epoch * self.batch_size
    return (first + np.arange(self.batch_size)) % self.repeats


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
