"""Checkpoints with Orbax: the latest and the best by test accuracy are kept."""

import dataclasses
import pathlib
from typing import Any

from absl import logging
import jax
import orbax.checkpoint as ocp

from mixer_jax.errors import UserError

# Raised when the layout of a checkpoint changes.
FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Progress:
  """What a run has reached; saved with its state.

  Attributes:
    epoch: epochs finished.
    best_top1: highest test accuracy so far, in [0, 1].
    best_epoch: the first epoch that reached it.
    target_epoch: the first epoch that reached `config.target_accuracy`, or 0.
  """

  epoch: int = 0
  best_top1: float = 0.0
  best_epoch: int = 0
  target_epoch: int = 0

  def after(self, epoch: int, top1: float, target: float) -> "Progress":
    """The progress once `epoch` has ended with this test accuracy."""
    best = (
      (top1, epoch) if top1 > self.best_top1 or epoch == 1 else (self.best_top1, self.best_epoch)
    )
    reached = self.target_epoch or (epoch if 0 < target <= top1 else 0)
    return Progress(epoch, *best, reached)


class Checkpoints:
  """The checkpoints of a run, under `workdir/checkpoints/STEP`.

  Each holds `params`, the rest of the train state and the progress. Saving
  copies the arrays and returns; writing goes on while training does.
  """

  def __init__(self, workdir: pathlib.Path, read_only: bool = False):
    self.path = workdir / "checkpoints"
    policies = ocp.checkpoint_managers
    options = ocp.CheckpointManagerOptions(
      read_only=read_only,
      create=not read_only,
      cleanup_tmp_directories=not read_only,
      preservation_policy=policies.AnyPreservationPolicy(
        [
          policies.LatestN(1),
          policies.BestN(get_metric_fn=_rank, n=1),
        ]
      ),
      # Used for ranking; the policy above decides what stays.
      best_fn=_rank,
    )
    if read_only and not self.path.is_dir():
      raise UserError(f"{workdir} holds no checkpoints (looked for {self.path})")
    names = ("params", "state", "progress")
    self._manager = ocp.CheckpointManager(self.path, options=options, item_names=names)

  def save(self, step: int, params: Any, state: Any, progress: Progress, top1: float) -> None:
    """Saves in the background.

    Args:
      step: optimizer steps taken; the checkpoint's name.
      params: the parameters.
      state: all other arrays of the train state.
      progress: what the run has reached.
      top1: test accuracy of these parameters.
    """
    self._manager.save(
      step,
      args=ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        state=ocp.args.StandardSave(state),
        progress=ocp.args.JsonSave(dataclasses.asdict(progress) | {"format": FORMAT}),
      ),
      metrics={"top1": float(top1), "epoch": progress.epoch},
    )

  def close(self) -> None:
    """Waits for the last save; raises if it failed."""
    self._manager.wait_until_finished()
    self._manager.close()

  def latest(self) -> int | None:
    """The step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def find(self, which: str) -> int:
    """The step that "best", "latest" or a number names.

    Raises:
      UserError: there is no such checkpoint.
    """
    steps = self._manager.all_steps()
    if not steps:
      raise UserError(f"{self.path} holds no finished checkpoint")
    if which == "latest":
      return max(steps)
    if which == "best":
      return self._manager.best_step()
    if which.isdigit() and int(which) in steps:
      return int(which)
    raise UserError(
      f"checkpoint {which!r} is not in {self.path}; allowed: best, latest,"
      f" {', '.join(map(str, sorted(steps)))}"
    )

  def restore(self, step: int, params: Any, state: Any) -> tuple[Any, Any, Progress]:
    """Restores a train state onto the shapes and shardings of a template."""
    restored = self._restore(
      step,
      params=ocp.args.StandardRestore(params),
      state=ocp.args.StandardRestore(state),
      progress=ocp.args.JsonRestore(),
    )
    return restored["params"], restored["state"], self._progress(step, restored["progress"])

  def restore_params(self, step: int, params: Any) -> tuple[Any, Progress]:
    """Restores the parameters alone, without reading optimizer state."""
    restored = self._restore(
      step, params=ocp.args.StandardRestore(params), progress=ocp.args.JsonRestore()
    )
    return restored["params"], self._progress(step, restored["progress"])

  def restore_arrays(self, step: int) -> Any:
    """The parameters as they were saved, on the first device, without a model."""
    return self._restore(step, params=ocp.args.StandardRestore())["params"]

  def _restore(self, step: int, **items: Any) -> Any:
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**items))
    except (ValueError, KeyError, OSError) as e:
      logging.debug("restoring failed", exc_info=True)
      reason = str(e).strip().splitlines() or [type(e).__name__]
      raise UserError(f"checkpoint {self.path / str(step)} cannot be restored: {reason[0]}") from e

  def _progress(self, step: int, saved: dict[str, Any]) -> Progress:
    found = saved.pop("format", None)
    if found != FORMAT:
      raise UserError(f"checkpoint {self.path / str(step)} has format {found}, not {FORMAT}")
    return Progress(**saved)


def _rank(metrics: dict[str, float]) -> tuple[float, float]:
  """Higher accuracy first; of equals the earlier, as `Progress.best_epoch`."""
  return metrics["top1"], -metrics["epoch"]


def template(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  """Shapes and target shardings of a tree of arrays or shapes, to restore onto."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
