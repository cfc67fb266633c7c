"""Checkpoints with Orbax: the two latest and the best by test accuracy are kept."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys
from typing import Any, Iterator

from absl import logging
import jax
import orbax.checkpoint as ocp

from mixer_jax import manifest, processes
from mixer_jax import workdir as workdir_lib
from mixer_jax.errors import UserError

# Raised when the layout of a checkpoint changes. Format 3 did not know of skipped steps
# and restores. Format 2 had no manifest and no checkpoints within an epoch.
FORMAT = 4
_UNCHECKED = 2
_READABLE = (_UNCHECKED, 3, FORMAT)
# The two latest and the best.
_KEPT = 3
# Of a checkpoint within an epoch, which has not been tested: never the best.
_NO_TOP1 = -1.0


@dataclasses.dataclass(frozen=True)
class Progress:
  """What a run has reached; saved with its state.

  Attributes:
    epoch: epochs finished.
    best_top1: highest test accuracy so far, in [0, 1].
    best_epoch: the first epoch that reached it.
    target_epoch: the first epoch that reached `config.target_accuracy`, or 0.
    skipped: steps in those epochs whose numbers were not finite.
    restores: how often the run went back to a checkpoint, see `divergence`.
  """

  epoch: int = 0
  best_top1: float = 0.0
  best_epoch: int = 0
  target_epoch: int = 0
  skipped: int = 0
  restores: int = 0

  def after(self, epoch: int, top1: float, target: float, skipped: int = 0) -> "Progress":
    """The progress once `epoch` has ended with this test accuracy and as many steps skipped."""
    best = (
      (top1, epoch) if top1 > self.best_top1 or epoch == 1 else (self.best_top1, self.best_epoch)
    )
    reached = self.target_epoch or (epoch if 0 < target <= top1 else 0)
    return Progress(epoch, *best, reached, self.skipped + skipped, self.restores)

  def again(self, tries: int) -> "Progress":
    """As it was at a checkpoint, for one more try from there."""
    return dataclasses.replace(self, restores=self.restores + tries)


class Checkpoints:
  """The checkpoints of a run, under `workdir/checkpoints/STEP`.

  Each holds `params`, the rest of the train state and the progress. Saving
  copies the arrays and returns; writing goes on while training does. A directory
  gets its name last, when all is written and `manifest` has its sums.

  Args:
    workdir: the run's directory.
    read_only: look only. Otherwise checkpoints that are damaged are moved to
      `workdir/damaged`, if there is a sound one to go on from.

  Raises:
    UserError: all checkpoints are damaged, or, if `read_only`, there are none.
  """

  def __init__(self, workdir: pathlib.Path, read_only: bool = False):
    self.path = workdir / "checkpoints"
    self._read_only = read_only
    if not read_only:
      processes.lead(lambda: self._set_damaged_aside(workdir / "damaged"))
    policies = ocp.checkpoint_managers
    options = ocp.CheckpointManagerOptions(
      read_only=read_only,
      create=not read_only,
      cleanup_tmp_directories=not read_only,
      preservation_policy=policies.AnyPreservationPolicy(
        [
          policies.LatestN(2),
          policies.BestN(get_metric_fn=_rank, n=1),
        ]
      ),
      # Used for ranking; the policy above decides what stays.
      best_fn=_rank,
      async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
    )
    if read_only and not self.path.is_dir():
      raise UserError(f"{workdir} holds no checkpoints (looked for {self.path})")
    names = ("params", "state", "progress", "part")
    self._manager = ocp.CheckpointManager(self.path, options=options, item_names=names)

  def _set_damaged_aside(self, aside: pathlib.Path) -> None:
    """Moves what is damaged out of the way, and says so."""
    steps = sorted(int(p.name) for p in self.path.glob("*") if p.name.isdigit())
    damaged = {step: reason for step in steps if (reason := self._damage(step))}
    sound = [step for step in steps if step not in damaged]
    for step, reason in damaged.items():
      what = f"checkpoint {self.path / str(step)} is damaged ({reason})"
      if not sound:
        raise UserError(f"{what}, and no other is sound; --workdir=NEW starts afresh")
      aside.mkdir(exist_ok=True)
      target = aside / f"{step}-{len(list(aside.iterdir()))}"
      (self.path / str(step)).rename(target)
      print(f"{what}: moved to {target}; that of step {sound[-1]} is sound", file=sys.stderr)

  def _damage(self, step: int, parts: tuple[str, ...] = ("",)) -> str | None:
    directory = self.path / str(step)
    return None if _unchecked(directory) else manifest.damage(directory, parts)

  def _write_manifest(self) -> None:
    """Called when all is written, but before the directory gets its name."""
    (unnamed,) = self.path.glob("*.orbax-checkpoint-tmp*")
    manifest.write(unnamed)

  def save(
    self,
    step: int,
    params: Any,
    state: Any,
    progress: Progress,
    top1: float | None,
    part: Any = None,
  ) -> None:
    """Saves in the background.

    Args:
      step: optimizer steps taken; the checkpoint's name.
      params: the parameters.
      state: all other arrays of the train state.
      progress: what the run has reached.
      top1: test accuracy of these parameters; None within an epoch.
      part: within an epoch, a tree of the arrays that the rest of it needs.
    """
    items = dict(
      params=ocp.args.StandardSave(params),
      state=ocp.args.StandardSave(state),
      progress=ocp.args.JsonSave(dataclasses.asdict(progress) | {"format": FORMAT}),
    )
    if part is not None:
      items["part"] = ocp.args.StandardSave(_numbered(part))
    top1 = _NO_TOP1 if top1 is None else float(top1)
    with self._writing():  # it waits for the last one
      self._manager.save(
        step,
        args=ocp.args.Composite(**items),
        metrics={"top1": top1, "epoch": progress.epoch},
      )

  def check(self) -> None:
    """Raises if a save has failed, without waiting for one."""
    with self._writing():
      self._manager.check_for_errors()

  def wait(self) -> None:
    """Waits for the last save; raises if it failed."""
    with self._writing():
      self._manager.wait_until_finished()

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      yield
    except (OSError, ValueError, RuntimeError) as e:  # TensorStore raises the latter two
      logging.debug("saving failed", exc_info=True)
      raise UserError(workdir_lib.unwritten(f"a checkpoint in {self.path}", _reason(e))) from e

  def check_room(self, state: Any) -> None:
    """Looks whether there is room for the checkpoints that are kept, and one under way.

    Args:
      state: arrays or shapes of all that a checkpoint holds.

    Raises:
      UserError: not one more fits.
    """
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    there = sum(p.stat().st_size for p in self.path.rglob("*") if p.is_file())
    free, needed = shutil.disk_usage(self.path).free, (_KEPT + 1) * size - there
    if free >= needed:
      return
    text = (
      f"{self.path} has {_megabytes(free)} free; a checkpoint takes {_megabytes(size)}, and"
      f" {_megabytes(needed)} more are needed to keep {_KEPT} while the next is written"
    )
    if free < size:
      raise UserError(text)
    print(f"warning: {text}", file=sys.stderr)

  def close(self) -> None:
    """As `wait`; nothing can be saved afterwards."""
    self.wait()
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

  def restore_part(self, step: int, part: Any) -> Any:
    """Restores what was saved within an epoch, as `restore` does."""
    restored = self._restore(step, part=ocp.args.StandardRestore(_numbered(part)))["part"]
    leaves = [restored[key] for key in _numbered(part)]
    return jax.tree.unflatten(jax.tree.structure(part), leaves)

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
    damage = self._read_only and self._damage(step, tuple(f"{name}/" for name in items))
    if damage:
      others = ", ".join(str(s) for s in sorted(self._manager.all_steps()) if s != step)
      raise UserError(
        f"checkpoint {self.path / str(step)} is damaged ({damage}); others: {others or 'none'}"
      )
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**items))
    except (ValueError, KeyError, OSError) as e:
      logging.debug("restoring failed", exc_info=True)
      reason = str(e).strip().splitlines() or [type(e).__name__]
      raise UserError(f"checkpoint {self.path / str(step)} cannot be restored: {reason[0]}") from e

  def _progress(self, step: int, saved: dict[str, Any]) -> Progress:
    found = saved.pop("format", None) if isinstance(saved, dict) else None
    if found not in _READABLE:
      raise UserError(f"checkpoint {self.path / str(step)} has format {found}, not {FORMAT}")
    try:
      return Progress(**saved)
    except TypeError as e:
      raise UserError(f"checkpoint {self.path / str(step)} has other progress: {e}") from e


def _rank(metrics: dict[str, float]) -> tuple[float, float]:
  """Higher accuracy first; of equals the earlier, as `Progress.best_epoch`."""
  return metrics["top1"], -metrics["epoch"]


def _reason(e: Exception) -> str:
  """Why a write failed, in a few words: TensorStore says it in a page."""
  code = re.search(r"os_error_code='(\d+)'", str(e))
  if code or isinstance(e, OSError):
    return os.strerror(int(code[1])) if code else e.strerror or str(e)
  return (str(e).strip().splitlines() or [type(e).__name__])[0]


def _megabytes(size: int) -> str:
  return f"{size / 1e6:,.1f} MB"


def _unchecked(directory: pathlib.Path) -> bool:
  """Whether a checkpoint is of the format that had no manifest."""
  if (directory / manifest.FILE).exists():
    return False
  try:
    return json.loads((directory / "progress" / "metadata").read_text())["format"] == _UNCHECKED
  except (OSError, ValueError, KeyError, TypeError):
    return False


def _numbered(tree: Any) -> dict[str, Any]:
  """The leaves by number: Orbax knows neither metrics nor keys with a slash."""
  return {f"{i:03d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def template(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  """Shapes and target shardings of a tree of arrays or shapes, to restore onto."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
