"""A table of the zoo: sizes, operations, memory and throughput of inference.

`python -m mixer_jax.benchmark inference` measures speed more closely.
"""

import statistics
from typing import Iterator, NamedTuple, Sequence

from mixer_jax import models
from mixer_jax.benchmark import inference


class Row(NamedTuple):
  """What is known of a model, at its usual image size and 1,000 classes.

  Attributes:
    name: as `models.build` takes it, or with ", absorbed" for a ResMLP whose Aff
      and LayerScale are folded into the linear layers.
    image_size: side in pixels.
    parameters: how many.
    multiply_adds: of one image.
    peak_bytes: arguments, results and temporaries of a batch, as XLA plans them.
    images_per_second: median of the timed batches; 0.0: not measured, because
      the plan does not fit into the memory of the device.
  """

  name: str
  image_size: int
  parameters: int
  multiply_adds: int
  peak_bytes: int
  images_per_second: float


def measure(names: Sequence[str], batch_size: int, rounds: int) -> Iterator[Row]:
  """Measures inference in float32, one model after the other.

  A ResMLP takes turns with itself with absorbed Aff.

  Args:
    names: models by name.
    batch_size: images of a batch.
    rounds: timed batches after one that warms up; 0: sizes alone.
  """
  for name in names:
    forms = inference.compiled_forms(name, batch_size)
    times = inference.timed(forms, rounds) if rounds else {}
    for label, form in forms.items():
      rate = batch_size / statistics.median(times[label]) if times else 0.0
      multiply_adds = form.multiply_adds // batch_size
      size = models.image_size(name)
      yield Row(label, size, form.parameters, multiply_adds, form.peak_bytes, rate)


HEADER = (
  "| model | image | parameters (M) | multiply-adds (G) | memory (MiB) | images/s |\n"
  "| :-- | --: | --: | --: | --: | --: |"
)


def line(row: Row) -> str:
  """A row of the table in Markdown."""
  rate = f"{row.images_per_second:.1f}" if row.images_per_second else "-"
  return (
    f"| `{row.name}` | {row.image_size} | {row.parameters / 1e6:.1f}"
    f" | {row.multiply_adds / 1e9:.2f} | {row.peak_bytes / 2**20:.0f} | {rate} |"
  )
