"""Metrics that add up over batches and devices."""

from typing import Any, Mapping, NamedTuple, Protocol, Sequence

import flax.struct
import jax
import jax.numpy as jnp


class Metric(NamedTuple):
  """A metric as tables and figures show it: as a percentage, or with a unit such as "nats".

  Attributes:
    name: its name.
    higher_is_better: whether the best checkpoint has the highest value.
    percent: whether it is shown in percent.
    unit: its unit.
  """

  name: str
  higher_is_better: bool
  percent: bool = False
  unit: str = ""

  @property
  def label(self) -> str:
    """The name with the unit."""
    unit = "%" if self.percent else self.unit
    return f"{self.name} ({unit})" if unit else self.name

  @property
  def scale(self) -> float:
    """The factor from a value to the number beside the `label`."""
    return 100.0 if self.percent else 1.0

  def shown(self, value: float) -> str:
    return f"{value:.2%}" if self.percent else f"{value:.4g}"

  def better(self, a: float, b: float) -> bool:
    return a > b if self.higher_is_better else a < b


def _wide(values: jax.Array) -> jax.Array:
  """The values as float32, or as they are if wider."""
  return values.astype(jnp.promote_types(values.dtype, jnp.float32))


@flax.struct.dataclass
class WeightedSum:
  """A mean, as the sum of weight times value and the sum of weights, which add up over batches.

  Both are scalars, float32, or float64 if the values are.

  Attributes:
    total: sum of weight times value.
    weight: sum of weights.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import tasks

    first = tasks.WeightedSum.of(jnp.array([1.0, 3.0]))
    second = tasks.WeightedSum.of(jnp.array([5.0, 7.0]), weights=jnp.array([1.0, 0.0]))
    assert first.merge(second).value() == 3.0
    ```
  """

  total: jax.Array
  weight: jax.Array

  @classmethod
  def of(cls, values: jax.Array, weights: Any = None) -> "WeightedSum":
    """Sums values [...]; weights broadcast to them and are 1 by default. Weight 0 hides NaN."""
    values = _wide(values)
    if weights is None:
      return cls(jnp.sum(values), jnp.asarray(values.size, values.dtype))
    weights = jnp.broadcast_to(weights, values.shape).astype(values.dtype)
    return cls(jnp.sum(jnp.where(weights == 0, 0.0, weights * values)), jnp.sum(weights))

  @classmethod
  def empty(cls) -> "WeightedSum":
    return cls(jnp.zeros(()), jnp.zeros(()))

  def merge(self, other: "WeightedSum") -> "WeightedSum":
    """Adds the sums of other examples."""
    return self.replace(total=self.total + other.total, weight=self.weight + other.weight)

  def value(self) -> jax.Array:
    """The mean, NaN if the weights are 0."""
    return self.total / self.weight


@flax.struct.dataclass
class MeanOrZero(WeightedSum):
  """The mean, 0 if the weights are 0."""

  def value(self) -> jax.Array:
    return self.total / jnp.where(self.weight == 0, 1.0, self.weight)


@flax.struct.dataclass
class RootMeanSquare(WeightedSum):
  """The root of the mean of squares; `of` takes the squares."""

  def value(self) -> jax.Array:
    return jnp.sqrt(self.total / self.weight)


@flax.struct.dataclass
class ExpMean(WeightedSum):
  """The exponential of a mean: the perplexity of losses in nats; `of` takes the losses."""

  def value(self) -> jax.Array:
    return jnp.exp(self.total / self.weight)


@flax.struct.dataclass
class Largest:
  """The largest value, a float32 scalar, or float64 if the values are.

  Attributes:
    largest: the value so far.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import tasks

    assert tasks.Largest.of(jnp.array([1.0, 3.0]), mask=jnp.array([True, False])).value() == 1.0
    ```
  """

  largest: jax.Array

  @classmethod
  def of(cls, values: jax.Array, mask: Any = True) -> "Largest":
    """Takes the largest of values [...] where a mask, which broadcasts to them, is true."""
    return cls(jnp.max(jnp.where(mask, _wide(values), -jnp.inf)))

  @classmethod
  def empty(cls) -> "Largest":
    return cls(jnp.full((), -jnp.inf, float))

  def merge(self, other: "Largest") -> "Largest":
    return Largest(jnp.maximum(self.largest, other.largest))

  def value(self) -> jax.Array:
    return self.largest


@flax.struct.dataclass
class ClassMeans(WeightedSum):
  """The mean over classes of their means: of hits, balanced accuracy. Sums are [classes]."""

  @classmethod
  def of_labels(
    cls, values: jax.Array, labels: jax.Array, classes: int, mask: Any = True
  ) -> "ClassMeans":
    """Sums of values [...] by their int labels [...], where a mask, which broadcasts, is true."""
    weights = jnp.broadcast_to(mask, labels.shape).astype(jnp.float32)
    add = lambda x: jnp.zeros(classes).at[labels.reshape(-1)].add(x.reshape(-1))
    return cls(add(weights * values), add(weights))

  def empty(self) -> "ClassMeans":
    return self.replace(total=jnp.zeros_like(self.total), weight=jnp.zeros_like(self.weight))

  of_each = "accuracy"

  def by_class(self) -> jax.Array:
    """The mean of each class, [classes]; NaN of one without examples."""
    return self.total / self.weight

  def value(self) -> jax.Array:
    return jnp.nanmean(self.by_class())


_LOW = 20  # bits of the lower part of a count


@flax.struct.dataclass
class Confusion:
  """How often each class (row) was taken for each (column), as exact counts below 2^51.

  The last column counts pixels without an answer. A count is `high` 2^20 + `low`, both int32
  [classes, classes + 1], since a float32 counts to 2^24 only and an int32 to 2^31.
  """

  high: jax.Array
  low: jax.Array

  @classmethod
  def of(
    cls, labels: jax.Array, found: jax.Array, classes: int, weights: Any = True
  ) -> "Confusion":
    """Counts int labels and answers [...] where the weights [...] are not 0.

    Labels are below `classes`; the answer `classes` stands for none.
    """
    labels, found = (jnp.asarray(x, jnp.int32) for x in (labels, found))  # uint8 would wrap at 256
    counted = jnp.broadcast_to(jnp.asarray(weights) != 0, labels.shape).reshape(-1)
    shape = classes, classes + 1
    pairs = (jnp.where(counted.reshape(labels.shape), labels, 0) * shape[1] + found).reshape(-1)
    counts = jnp.zeros(shape[0] * shape[1], jnp.int32).at[pairs].add(counted.astype(jnp.int32))
    return cls._of_counts(jnp.zeros_like(counts), counts, shape)

  @classmethod
  def _of_counts(cls, high: jax.Array, low: jax.Array, shape: tuple[int, int]) -> "Confusion":
    return cls((high + (low >> _LOW)).reshape(shape), (low & (2**_LOW - 1)).reshape(shape))

  def empty(self) -> "Confusion":
    """Counts of nothing, of as many classes."""
    return type(self)(*(jnp.zeros(self.low.shape, jnp.int32) for _ in range(2)))

  def merge(self, other: "Confusion") -> "Confusion":
    return self._of_counts(self.high + other.high, self.low + other.low, self.low.shape)

  def counts(self) -> jax.Array:
    """The counts as float32 [classes, classes + 1], each rounded once."""
    return self.high.astype(jnp.float32) * 2**_LOW + self.low.astype(jnp.float32)


@flax.struct.dataclass
class MeanIou(Confusion):
  """The mean of intersection over union of the classes in labels or answers, as mmsegmentation's."""

  of_each = "iou"

  def by_class(self) -> jax.Array:
    """The `ious` of the counts, [classes]."""
    return ious(self.counts())

  def value(self) -> jax.Array:
    return jnp.nanmean(self.by_class())


@flax.struct.dataclass
class Hits(Confusion):
  """The share of answers that are right."""

  def value(self) -> jax.Array:
    counts = self.counts()
    return jnp.trace(counts) / jnp.sum(counts)


def ious(counts: jax.Array) -> jax.Array:
  """Intersection over union of each class, from counts as in `Confusion`; NaN if the union is 0."""
  own = jnp.diagonal(counts)
  return own / (counts[:, : len(own)].sum(0) + counts.sum(1) - own)


class Sums(Protocol):
  """A pytree with sums of a metric over examples, such as `WeightedSum`."""

  def empty(self) -> "Sums": ...

  def merge(self, other: Any) -> "Sums": ...

  def value(self) -> jax.Array: ...


def empty(shapes: Mapping[str, Sums]) -> dict[str, Sums]:
  """Metrics of no examples, of the same kinds as these metrics, or as their shapes."""
  return {name: sums.empty() for name, sums in shapes.items()}


def merge(a: Mapping[str, Sums], b: Mapping[str, Sums]) -> dict[str, Sums]:
  """The metrics of two sets of examples together (traceable)."""
  return {name: sums.merge(b[name]) for name, sums in a.items()}


def by_class(metrics: Mapping[str, Sums], names: Sequence[str]) -> dict[str, float]:
  """The numbers of each class, as "accuracy/cat", of metrics that have them (`by_class`, `of_each`)."""
  found = {s.of_each: s.by_class() for s in metrics.values() if hasattr(s, "by_class")}
  return {f"{name}/{own}": float(x) for name, each in found.items() for own, x in zip(names, each)}


def values(metrics: Mapping[str, Sums]) -> dict[str, float]:
  """The metrics as numbers."""
  return {name: float(sums.value()) for name, sums in metrics.items()}
