"""The contract of a split: its examples are any pytree of arrays."""

import dataclasses
from typing import Any, Callable, Iterable, Protocol

import jax
import numpy as np

__all__ = ("Arrays", "Bucketed", "Dataset", "Streamed")
# Step -> example ids of its batch, [batch_size].
Ids = Callable[[int], np.ndarray]
_SAMPLED = 8  # examples of `sample`


class Dataset(Protocol):
  """The contract of a split: its examples are any pytree of arrays.

  A split of files may have `paths`, bytes [n], below the directory of the set.
  """

  @property
  def spec(self) -> Any:
    """A `jax.ShapeDtypeStruct` for each array of one example, in the example's structure."""

  def __len__(self) -> int: ...

  def arrays(self) -> Any | None:
    """Returns all examples stacked, [n, ...] each; None of a `Streamed` split."""


class Streamed(Dataset, Protocol):
  """A split that is read example by example; its `arrays` returns None.

  Attributes:
    workers: processes that read; 0: a thread of this one.
    read_ahead: examples that each worker reads ahead.
  """

  workers: int
  read_ahead: int

  def read(self, i: int, rng: np.random.Generator) -> Any:
    """Reads example i: NumPy arrays as `spec` says; a UserError names the broken file or record.

    Worker processes call it: no JAX in it.
    """


@dataclasses.dataclass(frozen=True)
class Arrays:
  """A split that is held as arrays.

  Attributes:
    tree: arrays [n, ...], in the structure of an example.
    paths: file of each example, bytes [n]; None: there are none.

  Raises:
    ValueError: the arrays differ in length.

  Example:
    ```python
    import numpy as np
    from mixer_jax.data.dataset import Arrays

    train = Arrays({"image": np.zeros((100, 8, 8, 3), np.uint8), "label": np.zeros(100, np.int32)})
    assert len(train) == 100 and train.spec["image"].shape == (8, 8, 3)
    ```
  """

  tree: Any
  paths: np.ndarray | None = dataclasses.field(default=None, kw_only=True)

  def __post_init__(self):
    lengths = {len(x) for x in jax.tree.leaves(self.tree)}
    if len(lengths) != 1:
      raise ValueError(f"arrays of a split have {sorted(lengths)} examples; allowed: one number")

  @property
  def spec(self) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.tree)

  def __len__(self) -> int:
    return len(jax.tree.leaves(self.tree)[0])

  def arrays(self) -> Any:
    return self.tree


@dataclasses.dataclass(frozen=True)
class Bucketed(Arrays):
  """A training split of sequences whose batches have about equally many tokens.

  Its arrays of more than one axis, [n, tokens, ...], are cut to the length of a batch.

  Attributes:
    lengths: real tokens of each sequence of an example, int [n, sequences].
    batch_tokens: largest number of tokens of a batch's sequences, with their padding.
    most_shapes: largest number of shapes of batches.
  """

  lengths: np.ndarray
  batch_tokens: int
  most_shapes: int


def examples(split: Dataset, rows: Iterable[int]) -> Any:
  """Some examples of a split, stacked, whether it is streamed or not."""
  rows = np.asarray(rows, int)
  if (arrays := split.arrays()) is not None:
    return jax.tree.map(lambda x: np.asarray(x[rows]), arrays)
  found = [split.read(int(i), np.random.default_rng(int(i))) for i in rows]
  return jax.tree.map(lambda *x: np.stack(x), *found)


def sample(split: Dataset) -> dict[str, list[float]]:
  """Mean and standard deviation of each array of a few examples, evenly spaced, by its name.

  They differ for other examples of the same shapes, and do not depend on the decoder.
  """
  n = min(_SAMPLED, len(split))
  named = jax.tree_util.tree_leaves_with_path(examples(split, np.arange(n) * len(split) // n))
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  chosen = {name(path): np.asarray(x, np.float64) for path, x in named if x.size}
  return {key: [float(x.mean()), float(x.std())] for key, x in chosen.items()}
