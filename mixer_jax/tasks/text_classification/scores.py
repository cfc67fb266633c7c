"""GLUE's scores of two classes, from counts that add up."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mixer_jax.tasks.metrics import MeanOrZero, Sums


@flax.struct.dataclass
class F1(MeanOrZero):
  """F1 = 2 tp / (2 tp + fp + fn) of the second class; 0 where it neither comes nor is found."""


@flax.struct.dataclass
class Matthews:
  """Matthews' correlation of found and true classes; 0 where one of them is constant.

  `counts` float32 [2, 2]: examples by whether they are of the second class, and found to be.
  """

  counts: jax.Array

  @classmethod
  def empty(cls) -> "Matthews":
    return cls(jnp.zeros((2, 2)))

  def merge(self, other: "Matthews") -> "Matthews":
    return Matthews(self.counts + other.counts)

  def value(self) -> jax.Array:
    (tn, fp), (fn, tp) = self.counts
    spread = jnp.prod(self.counts.sum(0)) ** 0.5 * jnp.prod(self.counts.sum(1)) ** 0.5
    return jnp.where(spread > 0, (tp * tn - fp * fn) / jnp.maximum(spread, 1.0), 0.0)


def of_two(found: jax.Array, true: jax.Array, mask: Any) -> dict[str, Sums]:
  """`F1` and Matthews' correlation of found and true second classes, bool [batch]."""
  mask = jnp.broadcast_to(mask, true.shape).astype(jnp.float32)
  count = lambda a, b: jnp.sum(mask * (true == a) * (found == b))
  counts = jnp.stack([jnp.stack([count(a, b) for b in (False, True)]) for a in (False, True)])
  right, wrong = 2 * counts[1, 1], counts[0, 1] + counts[1, 0]
  return {"f1": F1(right, right + wrong), "matthews": Matthews(counts)}
