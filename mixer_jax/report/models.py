"""A table of the zoo: sizes, operations, memory and throughput of inference."""

import os
import statistics
from typing import Any, Iterator, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import flops, models
from mixer_jax.benchmark import take_turns


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
    size = models.image_size(name)
    images = jnp.full((batch_size, size, size, 3), 0.01)
    programs = {
      label: _Program(model, params, images) for label, (model, params) in _forms(name).items()
    }
    fits = rounds and max(p.peak_bytes for p in programs.values()) < 0.9 * _memory()
    times = take_turns({k: p.run for k, p in programs.items()}, rounds) if fits else {}
    for label, program in programs.items():
      rate = batch_size / statistics.median(times[label]) if fits else 0.0
      multiply_adds = program.multiply_adds // batch_size
      yield Row(label, size, program.parameters, multiply_adds, program.peak_bytes, rate)


def _forms(name: str) -> dict[str, tuple[Any, Any]]:
  """The named model, and its form for inference if it has one, with some parameters."""
  model, size = models.build(name, num_classes=1000), models.image_size(name)
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, size, size, 3)))["params"]
  params = jax.tree.map(lambda x: np.full(x.shape, 0.01, np.float32), shapes)
  forms = {name: (model, params)}
  if isinstance(model, models.ResMlp):
    forms[f"{name}, absorbed"] = models.absorb_affine(model, params, (size, size))
  return forms


class _Program:
  """A compiled forward pass."""

  def __init__(self, model: Any, params: Any, images: jax.Array):
    forward = jax.jit(lambda params, images: model.apply({"params": params}, images))
    self._arguments = jax.device_put((params, images))
    self._compiled = forward.lower(params, images).compile()
    plan = self._compiled.memory_analysis()
    self.peak_bytes = (
      plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    )
    self.parameters = sum(x.size for x in jax.tree.leaves(params))
    self.multiply_adds = flops.multiply_adds(forward, params, images)

  def run(self) -> None:
    jax.block_until_ready(self._compiled(*self._arguments))


def _memory() -> int:
  """Bytes of the first device."""
  stats = jax.devices()[0].memory_stats() or {}
  return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
