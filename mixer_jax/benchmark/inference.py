"""Speed and memory of forward passes."""

import statistics
from typing import Any, Iterator, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import flops, models
from mixer_jax.benchmark.timing import fits, planned_bytes, take_turns


class Forward:
  """A compiled forward pass with some parameters and images.

  Attributes:
    peak_bytes: arguments, results and temporaries, as XLA plans them.
    parameters: how many.
    multiply_adds: of the batch.
  """

  def __init__(self, model: Any, params: Any, images: jax.Array):
    forward = jax.jit(lambda params, images: model.apply({"params": params}, images))
    self._arguments = jax.device_put((params, images))
    self._compiled = forward.lower(params, images).compile()
    self.peak_bytes = planned_bytes(self._compiled.memory_analysis())
    self.parameters = sum(x.size for x in jax.tree.leaves(params))
    self.multiply_adds = flops.multiply_adds(forward, params, images)

  def __call__(self) -> None:
    jax.block_until_ready(self._compiled(*self._arguments))


def compiled_forms(name: str, batch_size: int, dtype: str = "float32") -> dict[str, Forward]:
  """The named model and, of a ResMLP, its form with absorbed Aff and LayerScale.

  Args:
    name: a model, at its usual image size and 1,000 classes.
    batch_size: images of a batch.
    dtype: of the computation.

  Returns:
    The programs by name, or by name and ", absorbed".
  """
  model, size = models.build(name, num_classes=1000, dtype=dtype), models.image_size(name)
  images = jnp.full((batch_size, size, size, 3), 0.01)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images[:1])["params"]
  params = jax.tree.map(lambda x: np.full(x.shape, 0.01, np.float32), shapes)
  forms = {name: (model, params)}
  if isinstance(model, models.ResMlp):
    forms[f"{name}, absorbed"] = models.absorb_affine(model, params, (size, size))
  return {label: Forward(*form, images) for label, form in forms.items()}


def timed(forms: dict[str, Forward], rounds: int) -> dict[str, list[float]]:
  """Seconds of each in turn; nothing where they do not fit into the device's memory."""
  return take_turns(forms, rounds) if fits(max(f.peak_bytes for f in forms.values())) else {}


class Row(NamedTuple):
  """How fast a model answers.

  Attributes:
    name: the model, perhaps with ", absorbed".
    peak_bytes: of the batch, as XLA plans them.
    images_per_second: at the batch, from the median; 0.0: it does not fit.
    latency: median seconds of one image alone.
    latency_p95: their 95th percentile.
  """

  name: str
  peak_bytes: int
  images_per_second: float = 0.0
  latency: float = 0.0
  latency_p95: float = 0.0


def measure(
  names: Sequence[str], batch_size: int, dtype: str, rounds: int, single_rounds: int
) -> Iterator[Row]:
  """Measures inference, one model after the other, a ResMLP in turn with its absorbed form.

  Args:
    names: models by name.
    batch_size: images of a batch.
    dtype: of the computation.
    rounds: timed batches after one that warms up.
    single_rounds: timed images alone, likewise.
  """
  for name in names:
    forms = compiled_forms(name, batch_size, dtype)
    batches = timed(forms, rounds)
    singles = timed(compiled_forms(name, 1, dtype), single_rounds) if batches else {}
    for label, form in forms.items():
      row = Row(label, form.peak_bytes)
      if batches:
        median, p95 = np.percentile(singles[label], (50, 95))
        rate = batch_size / statistics.median(batches[label])
        row = row._replace(images_per_second=rate, latency=float(median), latency_p95=float(p95))
      yield row


HEADER = (
  "| model | images/s | latency (ms) | 95th percentile (ms) | memory (MiB) |\n"
  "| :-- | --: | --: | --: | --: |"
)


def line(row: Row) -> str:
  """A row of the table in Markdown."""
  memory = f"{row.peak_bytes / 2**20:.0f}"
  if not row.images_per_second:
    return f"| `{row.name}` | does not fit | - | - | {memory} |"
  return (
    f"| `{row.name}` | {row.images_per_second:.1f} | {1e3 * row.latency:.1f}"
    f" | {1e3 * row.latency_p95:.1f} | {memory} |"
  )
