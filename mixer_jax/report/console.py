"""What a run prints."""

from typing import Any

from clu import parameter_overview
import jax

import mixer_jax
from mixer_jax import optim
from mixer_jax.checkpoint import Progress
from mixer_jax.experiment import Experiment


def print_devices() -> None:
  """The first line of a run: what it really runs on."""
  device, number = jax.devices()[0], jax.process_count()
  among = f" in {number} processes" if number > 1 else ""
  print(
    f"mixer_jax {mixer_jax.__version__}, JAX {jax.__version__}, backend {device.platform}:"
    f" {jax.device_count()} x {device.device_kind}{among}",
    flush=True,
  )


def print_model(run: Experiment) -> None:
  """The parameters and, under K-FAC, the curvature block of each."""
  shapes = run.param_shapes
  print(parameter_overview.get_parameter_overview(shapes, include_stats=False))
  if kfac := _kfac_config(run.config.optimizer):
    problem = run.problem
    options = {"norms": kfac.norms} if kfac.norms else {}
    options["plain"] = (kfac.plain,) if kfac.plain else ()
    blocks = optim.kfac_blocks(problem.predict, problem.params, problem.batch, **options)
    print(blocks_table(blocks), flush=True)


def _kfac_config(config: Any) -> Any:
  """The K-FAC part of an optimizer's config, or None."""
  if config.name == "graft":
    return _kfac_config(config.magnitude) or _kfac_config(config.direction)
  return config if config.name == "kfac" else None


def blocks_table(blocks: Any) -> str:
  """Layer, kind of curvature block and factor sizes, a line each."""
  width = max(len(b.name) for b in blocks)
  lines = [f"{'curvature block':{width}}  kind       factors"]
  for b in blocks:
    sizes = " x ".join(map(str, b.factor_sizes)) or "-"
    lines.append(f"{b.name:{width}}  {b.kind:9}  {sizes}")
  return "\n".join(lines)


def epoch_line(row: dict[str, Any], num_epochs: int) -> str:
  """One line about an epoch."""
  top5 = f" top-5 {row['test/top5']:.2%}" if "test/top5" in row else ""
  skipped = f"  {row['train/skipped']} skipped" if row.get("train/skipped") else ""
  return (
    f"epoch {row['epoch']}/{num_epochs}  train loss {row['train/loss']:.4f} accuracy"
    f" {row['train/accuracy']:.2%}  test loss {row['test/loss']:.4f} top-1"
    f" {row['test/top1']:.2%}{top5} (best {row['test/best_top1']:.2%} in epoch"
    f" {row['test/best_epoch']})  lr {row['learning_rate']:.3g}"
    f"  {row['images_per_second']:.0f} images/s  {row['seconds_per_epoch']:.1f} s{skipped}"
  )


def summary(progress: Progress, target: float) -> str:
  """What a run reached."""
  text = (
    f"{progress.epoch} epochs, best test top-1 {progress.best_top1:.2%} in epoch"
    f" {progress.best_epoch}"
  )
  if target:
    reached = f"in epoch {progress.target_epoch}" if progress.target_epoch else "not reached"
    text += f", target {target:.0%} {reached}"
  if progress.skipped:
    text += f", {progress.skipped} step{'s' * (progress.skipped > 1)} skipped"
  return text
