"""What a person reads about a curvature: the table of its layers, and warnings."""

import functools
import logging
import os
from typing import Sequence

import jax

from mixer_jax.optim.curvature.blocks import Block


def table(blocks: Sequence[Block]) -> str:
  """A line for each layer, and one for each parameter without, with its reason."""
  rows = [("layer", "kind", "factors", "uses", "rows of an example")]
  rest = []
  for block in blocks:
    if block.kind == "gradient":
      rest.append((block.name, block.reason))
      continue
    sizes = [f"{n}{' (diagonal)' * d}" for n, d in zip(block.factor_sizes, block.diagonal)]
    lead = "".join(f"{n} x " for n in block.stacked)
    factors = lead + " x ".join(sizes) if sizes else "diagonal"
    kind = block.layer or "scale or shift"
    rows.append((block.name, kind, factors, str(block.uses or ""), str(block.tokens or "")))
  lines = [_line(row, rows) for row in rows]
  if rest:
    lines += ["", "parameters without a layer, which take the plain gradient:"]
    lines += [_line(row, rest) for row in rest]
  return "\n".join(lines)


def _line(row: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  widths = [max(len(r[i]) for r in rows) for i in range(len(row))]
  return "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def warn(blocks: Sequence[Block], unasked: bool) -> None:
  """Logs once in a process that factors are diagonal unasked, or that OpenBLAS may be slow."""
  for block in blocks if unasked else ():
    for size, diagonal in zip(block.factor_sizes, block.diagonal):
      if diagonal and block.layer != "embedding":
        say(f"K-FAC keeps the diagonal of a factor of {size:,} rows of {block.name} (max_factor)")
  threads = os.environ.get("OPENBLAS_NUM_THREADS")
  if threads is None and (os.cpu_count() or 1) > 1 and jax.default_backend() == "cpu":
    say(
      "K-FAC inverts on the CPU: threads of OpenBLAS can make that many times slower beside"
      " another busy process; set OPENBLAS_NUM_THREADS=1 before Python starts"
    )


@functools.cache
def say(line: str) -> None:
  """Warns of something once in a process."""
  logging.getLogger(__name__).warning(line)
