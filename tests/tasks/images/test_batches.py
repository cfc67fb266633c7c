"""Rows of a split, from memory and read one by one."""

import dataclasses

import jax
import numpy as np
import pytest

from mixer_jax.data.dataset import Arrays
from mixer_jax.tasks.images import batches


@dataclasses.dataclass(frozen=True)
class Squares:
  """A streamed split of the squares of 0, 1, ... 19, read by a thread."""

  workers: int = 0
  read_ahead: int = 1
  spec = {"x": jax.ShapeDtypeStruct((), np.int64)}

  def __len__(self):
    return 20

  def arrays(self):
    return None

  def read(self, i, rng):
    return {"x": np.int64(i * i)}


@pytest.mark.parametrize("split", [Squares(), Arrays({"x": np.arange(20) ** 2})])
def test_batches_of_rows(split):
  rows = batches.spaced(split, 7)
  assert rows.tolist() == [0, 2, 5, 8, 11, 14, 17]
  found = [batch["x"].tolist() for batch in batches.each_batch(split, rows, 3)]
  assert found == [[0, 4, 25], [64, 121, 196], [289, 289, 289]]
  [whole] = batches.each_batch(split, batches.spaced(split), 99)
  assert whole["x"].tolist() == [i * i for i in range(20)]
