"""A named split of labelled images, as a source reads it."""

import dataclasses

import numpy as np

from mixer_jax.data import splits


@dataclasses.dataclass(frozen=True)
class Base:
  """All examples of a named split: images uint8 [n, height, width, 3] and integer labels [n].

  `shuffled` says whether their order is random; `paths` are those of their files, bytes [n].
  """

  images: np.ndarray
  labels: np.ndarray
  shuffled: bool = False
  paths: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.labels)

  def take(self, rows: range) -> tuple[np.ndarray, ...]:
    """Images, labels and any paths of a slice; views unless the order has to be shuffled."""
    chosen = slice(rows.start, rows.stop)
    if not self.shuffled and len(rows) < len(self):
      chosen = splits.shuffled_order(len(self))[chosen]
    arrays = self.images, self.labels, self.paths
    return tuple(x[chosen] for x in arrays if x is not None)
