"""Examples outside of training and evaluation: of a split, or of files of a user."""

from typing import Any, Iterator

import jax
import numpy as np

from mixer_jax.data import order, stream
from mixer_jax.data.dataset import Dataset


def spaced(split: Dataset, most: int = 0) -> np.ndarray:
  """Rows of a split, evenly spaced, at most so many (0: all): int [n]."""
  n = min(most or len(split), len(split))
  return np.arange(n) * len(split) // n


def each_batch(split: Dataset, rows: np.ndarray, size: int) -> Iterator[Any]:
  """Stacked examples of some rows, `size` at once; at the end the last row is repeated.

  A streamed split is read by its own workers.
  """
  ids, _ = order.test_indices(len(rows), min(size, len(rows)))
  ids, arrays = rows[ids], split.arrays()
  if arrays is not None:
    yield from (jax.tree.map(lambda x: np.asarray(x[batch]), arrays) for batch in ids)
    return
  reader = stream.Stream(split, ids.__getitem__, np.arange(ids.shape[1]), seed=0)
  try:
    yield from (jax.tree.map(lambda x: x[0], reader.take(i, 1)) for i in range(len(ids)))
  finally:
    reader.close()
