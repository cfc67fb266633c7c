"""Sizes of the models of the zoo, speed and memory of their forward passes."""

import statistics
from typing import Any, Iterator, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import flops, tables
from benchmarks.timing import fits, planned_bytes, take_turns
from mixer_jax import models
from mixer_jax.runtime import devices


class Forward:
  """A compiled forward pass with some variables and images.

  Attributes:
    peak_bytes: arguments, results and temporaries, as XLA plans them.
    parameters: how many.
    multiply_adds: of the batch.
  """

  def __init__(self, model: Any, variables: Any, images: jax.Array):
    forward = jax.jit(lambda variables, images: model.apply(variables, images))
    self._arguments = jax.device_put((variables, images))
    self._compiled = forward.lower(variables, images).compile()
    self.peak_bytes = planned_bytes(self._compiled.memory_analysis())
    self.parameters = sum(x.size for x in jax.tree.leaves(variables["params"]))
    self.multiply_adds = flops.multiply_adds(forward, variables, images)

  def __call__(self) -> None:
    jax.block_until_ready(self._compiled(*self._arguments))


def _forms(name: str, batch_size: int, dtype: str) -> dict[str, Forward]:
  """The named model and, of a ResMLP, its form with absorbed Aff and LayerScale, by label."""
  model, size = models.build(name, num_classes=1000, dtype=dtype), models.image_size(name)
  images = jnp.full((batch_size, size, size, 3), 0.01)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images[:1])
  variables = jax.tree.map(lambda x: np.full(x.shape, 0.01, np.float32), shapes)
  forms = {name: (model, variables)}
  if isinstance(model, models.ResMlp):
    absorbed, params = models.absorb_affine(model, variables["params"], (size, size))
    forms[f"{name}, absorbed"] = absorbed, {"params": params}
  return {label: Forward(*form, images) for label, form in forms.items()}


def _timed(forms: dict[str, Forward], rounds: int) -> dict[str, list[float]]:
  """Seconds of each in turn; nothing without rounds, or if they do not fit into the memory."""
  fit = rounds and fits(max(form.peak_bytes for form in forms.values()))
  return take_turns(forms, rounds) if fit else {}


class Row(NamedTuple):
  """A model at its usual image size and 1,000 classes. None was not measured."""

  # of the model, or with ", absorbed" of a ResMLP whose Aff and LayerScale are folded into the
  # linear layers
  name: str
  image_size: int  # side in pixels
  parameters: int  # how many
  multiply_adds: int  # of one image
  peak_bytes: int  # of a batch, as XLA plans them
  images_per_second: float | None = None  # at the batch, from the median
  latency: float | None = None  # median seconds of one image alone
  latency_p95: float | None = None  # their 95th percentile


def measure(
  names: Sequence[str], batch_size: int, dtype: str, rounds: int, single_rounds: int = 0
) -> Iterator[Row]:
  """Measures inference, one model after the other, a ResMLP in turn with its absorbed form.

  Args:
    names: models by name.
    batch_size: images of a batch.
    dtype: of the computation.
    rounds: timed batches after a warm-up; 0: sizes alone.
    single_rounds: timed images alone, likewise; 0: none.
  """
  for name in names:
    forms = _forms(name, batch_size, dtype)
    batches = _timed(forms, rounds)
    alone = single_rounds if batches else 0
    singles = _timed(_forms(name, 1, dtype), alone) if alone else {}
    for label, form in forms.items():
      adds = form.multiply_adds // batch_size
      row = Row(label, models.image_size(name), form.parameters, adds, form.peak_bytes)
      if batches:
        row = row._replace(images_per_second=batch_size / statistics.median(batches[label]))
      if singles:
        median, p95 = np.percentile(singles[label], (50, 95))
        row = row._replace(latency=float(median), latency_p95=float(p95))
      yield row


TITLES = ("model", "images/s", "latency (ms)", "95th percentile (ms)", "memory (MiB)")
ZOO_TITLES = (
  *("model", "image", "parameters (M)", "multiply-adds (G)", "memory (MiB)", "images/s"),
)


def cells(row: Row) -> list[str]:
  """A row of the table of speed."""
  latencies = (tables.number(s, ".1f", 1e-3) for s in (row.latency, row.latency_p95))
  rate = tables.number(row.images_per_second, ".1f")
  return [f"`{row.name}`", rate, *latencies, tables.mebibytes(row.peak_bytes)]


def zoo_cells(row: Row) -> list[str]:
  """A row of the table of sizes."""
  return [
    f"`{row.name}`",
    str(row.image_size),
    f"{row.parameters / 1e6:.1f}",
    f"{row.multiply_adds / 1e9:.2f}",
    tables.mebibytes(row.peak_bytes),
    tables.number(row.images_per_second, ".1f"),
  ]


def main(options: Any) -> None:
  """Prints the table of speed."""
  tables.show(TITLES, map(cells, _rows(options, single_rounds=5 * options.rounds)))


def zoo(options: Any) -> None:
  """Prints the table of sizes."""
  tables.show(ZOO_TITLES, map(zoo_cells, _rows(options, single_rounds=0)))


def _rows(options: Any, single_rounds: int) -> Iterator[Row]:
  names, batch_size = options.models or list(models.VARIANTS), options.batch_size or 32
  devices.print_line()
  print(f"batch {batch_size}, {options.dtype}, {options.rounds} rounds; -: does not fit\n")
  return measure(names, batch_size, options.dtype, options.rounds, single_rounds)
