"""A table of the zoo: sizes, operations, memory and throughput of inference."""

import os
import statistics
import time
from typing import Any, Iterator, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from mixer_jax import flops, models


class Row(NamedTuple):
  """What is known of a model, at its usual image size and 1,000 classes.

  Attributes:
    name: as `models.build` takes it.
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
  """Measures models one after the other, float32 unless JAX is told otherwise.

  Args:
    names: models by name.
    batch_size: images of a batch.
    rounds: timed batches after one that warms up; 0: sizes alone.
  """
  for name in names:
    size = models.image_size(name)
    model = models.build(name, num_classes=1000)
    images = jax.ShapeDtypeStruct((batch_size, size, size, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    forward = jax.jit(lambda params, images, model=model: model.apply({"params": params}, images))
    compiled = forward.lower(params, images).compile()
    plan = compiled.memory_analysis()
    peak = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    fits = rounds and peak < 0.9 * _memory()
    yield Row(
      name,
      size,
      sum(x.size for x in jax.tree.leaves(params)),
      flops.multiply_adds(forward, params, images) // batch_size,
      peak,
      batch_size / _seconds(compiled, params, images, rounds) if fits else 0.0,
    )


def _memory() -> int:
  """Bytes of the first device."""
  stats = jax.devices()[0].memory_stats() or {}
  return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _seconds(compiled: Any, params: Any, images: Any, rounds: int) -> float:
  """Median seconds of a batch; values do not matter to dense products."""
  params, images = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), (params, images))
  seconds = []
  for _ in range(rounds + 1):
    start = time.perf_counter()
    jax.block_until_ready(compiled(params, images))
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds[1:])


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
