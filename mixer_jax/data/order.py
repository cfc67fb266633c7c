"""The order of examples: pure functions, so that any process can tell what comes when."""

import numpy as np


def epoch_order(seed: int, epoch: int, num_examples: int, restores: int = 0) -> np.ndarray:
  """The permutation of an epoch: a pure function of its arguments.

  Args:
    seed: of the run.
    epoch: from 1.
    num_examples: of the split.
    restores: how often the run went back after it diverged: never in the same order.
  """
  entropy = (seed, epoch, restores) if restores else (seed, epoch)
  return np.random.default_rng(entropy).permutation(num_examples).astype(np.int32)


def train_indices(
  seed: int, epoch: int, num_examples: int, batch_size: int, restores: int = 0
) -> np.ndarray:
  """Example ids of an epoch's batches, int32 [steps, batch_size].

  The examples that do not fill a last batch are left out: other ones every
  epoch, as the order is new.
  """
  steps = num_examples // batch_size
  order = epoch_order(seed, epoch, num_examples, restores)
  return order[: steps * batch_size].reshape(steps, -1)


def test_indices(num_examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Ids and mask, [batches, batch_size], covering each example exactly once."""
  batches = -(-num_examples // batch_size)
  ids = np.arange(batches * batch_size).reshape(batches, batch_size)
  return np.minimum(ids, num_examples - 1).astype(np.int32), ids < num_examples


def crop_rng(seed: int, epoch: int, example: int) -> np.random.Generator:
  """What decides the random crop of an example in an epoch."""
  # The last number keeps example 0 from `epoch_order`'s stream: NumPy pads with zeros.
  return np.random.default_rng((seed, epoch, example, 1))
