"""Checkpoints with Orbax: the two latest and the best by the primary metric are kept."""

import contextlib
import itertools
import os
import pathlib
import re
import shutil
import sys
import time
from typing import Any, Callable, Iterator

from absl import logging
from flax import serialization
import jax
import orbax.checkpoint as ocp

from mixer_jax import errors
from mixer_jax.errors import UserError
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.runtime import processes
from mixer_jax.training import manifest
from mixer_jax.training.state import TrainState

FORMAT = 5  # raised when the layout of a checkpoint changes
_KEPT = 3  # the two latest and the best
_LOOKS = 10  # for a checkpoint that a live run has removed meanwhile


class Checkpoints:
  """The checkpoints of a run, under `workdir/checkpoints/STEP`.

  Each holds the variables, the rest of the train state, and the training seconds since the
  last evaluation. Saving copies the arrays and returns; writing goes on while training
  does. A directory gets its name last, when all is written and `manifest` has its sums.

  Args:
    workdir: the run's directory.
    read_only: look only. Otherwise damaged checkpoints are moved to `workdir/damaged`, if there
      is a sound one to go on from.

  Raises:
    UserError: all checkpoints are damaged, or, if `read_only`, there are none.
  """

  def __init__(self, workdir: pathlib.Path, read_only: bool = False):
    self.path = workdir / "checkpoints"
    self._read_only = read_only
    if not read_only:
      processes.lead(lambda: self._set_damaged_aside(workdir / "damaged"))
    elif not self.path.is_dir():
      raise UserError(f"{workdir} holds no checkpoints (looked for {self.path})")
    policies = ocp.checkpoint_managers
    kept = [policies.LatestN(2), policies.BestN(get_metric_fn=_rank, n=1)]
    options = ocp.CheckpointManagerOptions(
      read_only=read_only,
      create=not read_only,
      cleanup_tmp_directories=not read_only,
      preservation_policy=policies.AnyPreservationPolicy(kept),
      # Used for ranking; the policy above decides which stay.
      best_fn=_rank,
      async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
    )
    # Named here, so that a process can ask for an item's metadata before it restores one.
    handlers = {name: ocp.StandardCheckpointHandler() for name in ("variables", "rest")}
    handlers["progress"] = ocp.JsonCheckpointHandler()
    manager = lambda: ocp.CheckpointManager(self.path, options=options, item_handlers=handlers)
    self._manager = self._listed(manager)

  def _listed(self, read: Callable[[], Any]) -> Any:
    """Reads the list of steps, again while a live run removes one of them."""
    for look in itertools.count(1):
      try:
        return read()
      except Exception as e:  # Orbax raises nearly anything of files that vanish or are damaged
        if not self._read_only:
          raise
        if look == _LOOKS:
          raise UserError(f"{self.path} cannot be read: {errors.reason(e)}") from e
        time.sleep(0.1)

  def _at(self, step: int) -> pathlib.Path:
    return self.path / str(step)

  def _refused(self, step: int, text: str) -> UserError:
    return UserError(f"checkpoint {self._at(step)} {text}")

  def _set_damaged_aside(self, aside: pathlib.Path) -> None:
    """Moves damaged checkpoints out of the way, and says so."""
    steps = sorted(int(p.name) for p in self.path.glob("*") if p.name.isdigit())
    damaged = {step: reason for step in steps if (reason := manifest.damage(self._at(step)))}
    sound = [step for step in steps if step not in damaged]
    for step, reason in damaged.items():
      if not sound:
        text = f"is damaged ({reason}), and no other is sound; --workdir=NEW starts afresh"
        raise self._refused(step, text)
      aside.mkdir(exist_ok=True)
      target = self._at(step).rename(aside / f"{step}-{len(list(aside.iterdir()))}")
      text = f"is damaged ({reason}): moved to {target}; that of step {sound[-1]} is sound"
      print(self._refused(step, text), file=sys.stderr)

  def _write_manifest(self) -> None:
    """Called when all is written, but before the directory gets its name."""
    (unnamed,) = self.path.glob("*.orbax-checkpoint-tmp*")
    manifest.write(unnamed)

  def save(self, step: int, state: TrainState, seconds: float, score: float | None) -> None:
    """Saves in the background a state that took some seconds since the last evaluation.

    Its score is the primary metric, higher is better; None: it was not evaluated.
    """
    rest = serialization.to_state_dict(state)
    items = ocp.args.Composite(
      variables=ocp.args.StandardSave(rest.pop("variables")),
      rest=ocp.args.StandardSave(rest),
      progress=ocp.args.JsonSave({"format": FORMAT, "seconds": seconds}),
    )
    ranked = {"evaluated": score is not None, "score": float(score or 0.0), "step": step}
    with self._writing():  # it waits for the last one
      self._manager.save(step, args=items, metrics=ranked)

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
      code = re.search(r"os_error_code='(\d+)'", str(e))
      known = os.strerror(int(code[1])) if code else getattr(e, "strerror", None)
      place = f"a checkpoint in {self.path}"
      raise UserError(directory_lib.unwritten(place, known or processes.first_line(e))) from e

  def check_room(self, state: Any) -> None:
    """Warns if checkpoints of these arrays or shapes do not fit; a UserError if not one does."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    there = sum(p.stat().st_size for p in self.path.rglob("*") if p.is_file())
    free, needed = shutil.disk_usage(self.path).free, (_KEPT + 1) * size - there
    mb = lambda size: f"{size / 1e6:,.1f} MB"
    text = (
      f"{self.path} has {mb(free)} free; a checkpoint takes {mb(size)}, and {mb(needed)} more are"
      f" needed to keep {_KEPT} while the next is written"
    )
    if free < min(size, needed):
      raise UserError(text)
    if free < needed:
      print(f"warning: {text}", file=sys.stderr)

  def close(self) -> None:
    """As `wait`; nothing can be saved afterwards."""
    self.wait()
    self._manager.close()

  def latest(self) -> int | None:
    """The step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def find(self, which: str) -> int:
    """The step that "best", "latest" or a number names; a UserError if there is none."""
    steps = self._manager.all_steps()
    if not steps:
      raise UserError(f"{self.path} holds no finished checkpoint")
    if which == "latest":
      return max(steps)
    if which == "best":
      return self._manager.best_step()
    if which.isdigit() and int(which) in steps:
      return int(which)
    allowed = ", ".join(["best", "latest", *map(str, sorted(steps))])
    raise UserError(f"checkpoint {which!r} is not in {self.path}; allowed: {allowed}")

  def restore(self, step: int, shapes: TrainState) -> tuple[TrainState, float]:
    """Restores a train state onto shapes with shardings, and the seconds saved with it."""
    rest = serialization.to_state_dict(shapes)
    restored = self._restore(
      step,
      variables=ocp.args.StandardRestore(rest.pop("variables")),
      rest=ocp.args.StandardRestore(rest),
      progress=ocp.args.JsonRestore(),
    )
    state = {**restored["rest"], "variables": restored["variables"]}
    return serialization.from_state_dict(shapes, state), restored["progress"]["seconds"]

  def restore_variables(
    self, which: str, sharding: jax.sharding.Sharding, shapes: Any = None
  ) -> tuple[int, dict[str, Any]]:
    """The step and the variables of a checkpoint, whatever devices wrote it.

    Args:
      which: see `find`. A checkpoint that a live run removes meanwhile is looked for anew.
      sharding: of all arrays.
      shapes: the variables that are expected, beside averages; None: those in the file.
    """
    for look in itertools.count(1):
      step = self.find(which)
      try:
        return step, self._read_variables(step, sharding, shapes)
      except UserError:
        time.sleep(0.4)  # a directory is removed file by file
        self._listed(self._manager.reload)
        listed = step in self._manager.all_steps()
        if look == _LOOKS or listed and manifest.is_complete(self._at(step)):
          raise

  def _read_variables(self, step: int, sharding: Any, expected: Any) -> dict[str, Any]:
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    with self._reading(step):
      if (found := self._manager.item_metadata(step)["variables"]) is None:
        raise FileNotFoundError("its variables are missing")
      found = jax.tree.map(placed, found)
    if expected is not None:
      self._compare(step, found, expected)
    return self._restore(
      step, variables=ocp.args.StandardRestore(found), progress=ocp.args.JsonRestore()
    )["variables"]

  def _compare(self, step: int, found: Any, expected: Any) -> None:
    named = lambda tree: {
      jax.tree_util.keystr(k): x.shape for k, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    found, expected = named({k: found.get(k) for k in expected}), named(expected)
    for name in sorted(found.keys() | expected.keys()):
      if found.get(name) != (wanted := expected.get(name)):
        text = f"cannot be restored: {name} is {found.get(name)}, the model wants {wanted}"
        raise self._refused(step, text)

  def _restore(self, step: int, **items: Any) -> Any:
    parts = tuple(f"{name}/" for name in items)
    if self._read_only and (damage := manifest.damage(self._at(step), parts)):
      others = ", ".join(str(s) for s in sorted(self._manager.all_steps()) if s != step)
      raise self._refused(step, f"is damaged ({damage}); others: {others or 'none'}")
    with self._reading(step):
      restored = self._manager.restore(step, args=ocp.args.Composite(**items))
    match restored["progress"]:
      case {"format": int(found), "seconds": int() | float()} if found == FORMAT:
        return restored
    raise self._refused(step, f"is not of format {FORMAT}")

  @contextlib.contextmanager
  def _reading(self, step: int) -> Iterator[None]:
    try:
      yield
    except Exception as e:  # Orbax and TensorStore raise nearly anything of damaged files
      logging.debug("restoring failed", exc_info=True)
      raise self._refused(step, f"cannot be restored: {processes.first_line(e)}") from e


def _rank(metrics: dict[str, float]) -> tuple[bool, float, int]:
  """The highest score first; of equals the earlier. A checkpoint without a score is never best."""
  return metrics["evaluated"], metrics["score"], -metrics["step"]


def on_device() -> jax.sharding.Sharding:
  """The first device of this process, for arrays that one program looks at."""
  return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
