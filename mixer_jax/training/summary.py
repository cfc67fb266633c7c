"""A run in words: its model, a line of metrics, its result."""

import collections
from typing import Sequence

from clu import parameter_overview
import jax

from mixer_jax import optimizers
from mixer_jax.experiment import Experiment
from mixer_jax.rundir.metrics_file import Row
from mixer_jax.tasks import Metric


def of_model(run: Experiment) -> tuple[str, str]:
  """A line about the model, and the tables of its parameters and curvature blocks."""
  shapes = run.variable_shapes["params"]
  sizes = [x.size for x in jax.tree.leaves(shapes)]
  number = f"{sum(sizes):,}" if sum(sizes) < 1e5 else f"{sum(sizes) / 1e6:,.2f} million"
  line = f"{number} parameters in {len(sizes)} arrays"
  tables = parameter_overview.get_parameter_overview(shapes, include_stats=False)
  parts = optimizers.of_curvature(run.config.optimizer)
  for blocks in dict.fromkeys(optimizers.curvature_blocks(part, run.problem) for part in parts):
    kinds = collections.Counter(block.kind for block in blocks)
    line += "; curvature blocks: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    if cut := sum(block.kind == "kronecker" and any(block.diagonal) for block in blocks):
      line += f" ({cut} with a diagonal factor)"
    width = max(len(b.name) for b in blocks)
    tables += f"\n{'curvature block':{width}}  kind       factors"
    for b in blocks:
      marks = (" (diagonal)" if diagonal else "" for diagonal in b.diagonal)
      factors = " x ".join(f"{n}{mark}" for n, mark in zip(b.factor_sizes, marks)) or "-"
      tables += f"\n{b.name:{width}}  {b.kind:9}  {factors}"
  return line, tables + "\n"


def of_row(row: Row, num_steps: int, metrics: Sequence[Metric], splits: Sequence[str]) -> str:
  """The line that a run prints after an evaluation."""
  parts = [f"step {row['step']}/{num_steps} epoch {row['epoch']:g}"]
  for split in ("train", *splits):
    values = [(m, row[f"{split}/{m.name}"]) for m in metrics if f"{split}/{m.name}" in row]
    parts.append(f"{split} {' '.join(f'{m.name} {m.shown(value)}' for m, value in values)}")
  parts += [f"lr {row['learning_rate']:.3g}", f"{row['examples_per_second']:.0f} examples/s"]
  parts.append(f"{row['seconds']:.1f} s")
  if row.get("train/skipped"):
    parts.append(f"{row['train/skipped']} skipped")
  return "  ".join(parts)


def of_run(rows: Sequence[Row], primary: Metric, split: str, target: float) -> str:
  """The result of a run: its last evaluation, and the best one of the split that picks it."""
  if not rows:
    return "nothing was evaluated"
  last, name = rows[-1], primary.name
  test, best = (primary.shown(last[key]) for key in (f"test/{name}", f"{split}/best_{name}"))
  text = (
    f"{last['step']} steps, {last['epoch']:g} epochs, test {name} {test} at the end; best {split}"
    f" {name} {best} at step {last[f'{split}/best_step']}"
  )
  if target:
    reached = (r["step"] for r in rows if not primary.better(target, r[f"{split}/{name}"]))
    step = next(reached, None)
    text += f", target {primary.shown(target)} " + (f"at step {step}" if step else "not reached")
  if skipped := last.get("train/skipped"):
    text += f", {skipped} step{'s' * (skipped > 1)} skipped"
  return text
