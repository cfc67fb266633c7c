"""Checkpoints with Orbax: the latest and the best by the primary metric are kept."""

import contextlib
import itertools
import json
import logging as std_logging
import os
import pathlib
import re
import shutil
import sys
import time
from typing import Any, Callable, Iterator, Sequence

from absl import logging
from flax import serialization
import jax
import orbax.checkpoint as ocp

from mixer_jax.errors import Unwritten, UserError, reason
from mixer_jax.paths import sha256
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.runtime import processes
from mixer_jax.training.state import TrainState

FORMAT = 5  # raised when the layout of a checkpoint changes
SUMS = "sha256.json"
# Orbax adds the time to it when it names the directory: it has to be JSON, no more.
CHANGING = "_CHECKPOINT_METADATA"
_LOOKS = 10  # at a list of steps that a live run changes meanwhile


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
  """Of Orbax, which tells that a directory is read only: in a script or a notebook they show."""
  logger = logging.get_absl_logger()
  level = logger.level
  logger.setLevel(std_logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(level)


class Checkpoints:
  """The checkpoints of a run, under `workdir/checkpoints/STEP`.

  Each holds the variables, the rest of the train state, and the training seconds since the last
  evaluation. Saving copies the arrays, and writes while training goes on. A directory gets its name
  last, when all is written, with the SHA-256 sums of its files. The `keep` latest in turn stay, the
  newest, and the best. Unless `read_only`, damaged checkpoints are moved to `workdir/damaged`, if
  there is a sound one to go on from. A UserError if all checkpoints are damaged, or, if
  `read_only`, there are none.
  """

  def __init__(self, workdir: pathlib.Path, read_only: bool = False, keep: int = 2):
    self.path = workdir / "checkpoints"
    self._read_only = read_only
    if not read_only:
      processes.lead(lambda: self._set_damaged_aside(workdir / "damaged"))
    elif not self.path.is_dir():
      raise UserError(f"{workdir} holds no checkpoints (looked for {self.path})")
    policies = ocp.checkpoint_managers
    kept = [_LatestInTurn(keep), policies.BestN(get_metric_fn=_rank, n=1)]
    with _without_warnings() if read_only else contextlib.nullcontext():
      options = ocp.CheckpointManagerOptions(
        read_only=read_only,
        create=not read_only,
        cleanup_tmp_directories=not read_only,
        preservation_policy=policies.AnyPreservationPolicy(kept),
        # Used for ranking; the policy above decides which stay.
        best_fn=_rank,
        async_options=ocp.AsyncOptions(post_finalization_callback=self._write_sums),
      )
    # Named here, so that a process can ask for an item's metadata before it restores one.
    handlers = {name: ocp.StandardCheckpointHandler() for name in ("variables", "rest")}
    handlers["progress"] = ocp.JsonCheckpointHandler()
    manager = lambda: ocp.CheckpointManager(self.path, options=options, item_handlers=handlers)
    self._manager = self._listed(manager) if read_only else manager()

  def _listed(self, read: Callable[[], Any]) -> Any:
    """Reads the list of steps, again while a live run removes one of them."""
    for look in range(_LOOKS):
      time.sleep(0.1 * (look > 0))
      try:
        with _without_warnings():
          return read()
      except Exception as e:  # Orbax raises nearly anything of files that vanish or are damaged
        error = e
    raise UserError(f"{self.path} cannot be read: {reason(error)}") from error

  def _refused(self, step: int, text: str) -> UserError:
    return UserError(f"checkpoint {self.path / str(step)} {text}")

  def _set_damaged_aside(self, aside: pathlib.Path) -> None:
    steps = {int(p.name): p for p in sorted(self.path.glob("*")) if p.name.isdigit()}
    damaged = {step: fault for step, p in steps.items() if (fault := damage(p))}
    sound = max(steps.keys() - damaged, default=None)
    for step, fault in damaged.items():
      if sound is None:
        text = f"is damaged ({fault}), and no other is sound; --workdir=NEW starts afresh"
        raise self._refused(step, text)
      aside.mkdir(exist_ok=True)
      names = (aside / f"{step}-{i}" for i in itertools.count())
      target = steps[step].rename(next(name for name in names if not name.exists()))
      text = f"is damaged ({fault}): moved to {target}; that of step {sound} is sound"
      print(self._refused(step, text), file=sys.stderr)

  def _write_sums(self) -> None:
    """Called when all is written, but before the directory gets its name."""
    (unnamed,) = self.path.glob("*.orbax-checkpoint-tmp*")
    write_sums(unnamed)

  def save(
    self, step: int, state: TrainState, seconds: float, score: float | None, in_turn: bool = True
  ) -> None:
    """Saves in the background; `score`: higher is better, None: the state was not evaluated.

    A checkpoint out of turn, of a signal or the best so far, is not among those of `latest_steps`.
    """
    rest = serialization.to_state_dict(state)
    items = ocp.args.Composite(
      variables=ocp.args.StandardSave(rest.pop("variables")),
      rest=ocp.args.StandardSave(rest),
      progress=ocp.args.JsonSave({"format": FORMAT, "seconds": seconds}),
    )
    ranked = {"evaluated": score is not None, "score": float(score or 0.0), "step": step}
    ranked["in_turn"] = in_turn
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
      raise directory_lib.unwritten(place, known or reason(e)) from e

  def check_room(self, state: Any) -> None:
    """Raises an Unwritten if a checkpoint of these arrays or shapes does not fit on the disk."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    if (free := shutil.disk_usage(self.path).free) < size:
      mb = lambda size: f"{size / 1e6:,.1f} MB"
      raise Unwritten(f"{self.path} has {mb(free)} free; a checkpoint takes {mb(size)}")

  def close(self) -> None:
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
    best = self._manager.best_step()
    named = {"best": best} if self._noted(best).get("evaluated", True) else {}
    named |= {"latest": max(steps)} | {str(step): step for step in sorted(steps)}
    if which not in named:
      allowed = f"{', '.join(named)}, or mean:N of the N latest"
      raise UserError(f"checkpoint {which!r} is not in {self.path}; allowed: {allowed}")
    return named[which]

  def latest_steps(self, number: str, keep: int) -> list[int]:
    """The steps of so many latest checkpoints, in order, of a run that keeps the `keep` latest.

    One that is older is not among them, though kept as the best. A UserError if there are fewer.
    """
    steps = sorted(self._manager.all_steps())
    steps = [step for step in steps if self._noted(step).get("in_turn", True)][-keep:]
    if not number.isdecimal() or not 0 < int(number) <= len(steps):
      most = f"mean:{len(steps)} in {self.path}; keep_checkpoints says how many a run keeps"
      raise UserError(f"checkpoint is 'mean:{number}'; allowed: mean:1 to {most}")
    return steps[-int(number) :]

  def _noted(self, step: int) -> dict[str, Any]:
    """The metrics that `save` noted; none of a checkpoint that a live run has removed."""
    return self._manager.metrics(step) or {}

  def restore(self, step: int, shapes: TrainState) -> tuple[TrainState, float]:
    """Restores a train state onto shapes with shardings, and the seconds saved with it."""
    rest = serialization.to_state_dict(shapes)
    variables, progress = rest.pop("variables"), self._progress(step)
    self._check_sound(step, "variables", "rest")
    restored = self._restore(step, variables=variables, rest=rest)
    state = {**restored["rest"], "variables": restored["variables"]}
    return serialization.from_state_dict(shapes, state), progress["seconds"]

  def restore_variables(self, which: str, sharding: Any, shapes: Any = None) -> tuple[int, dict]:
    """The step and the variables, all of one sharding, of a checkpoint, whatever devices wrote it.

    `which` is as in `find`; a checkpoint that a live run removes meanwhile gives way to the next.
    `shapes` are the variables that are expected, beside averages; None: those in the file.
    """
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    while True:
      step = self.find(which)
      try:
        self._progress(step)
        self._check_sound(step, "variables")  # before their shapes are read
        with self._reading(step):
          found = jax.tree.map(placed, self._manager.item_metadata(step)["variables"] or {})
          _compare(found, shapes or found)
        return step, self._restore(step, variables=found)["variables"]
      except UserError:
        self._listed(self._manager.reload)
        if self.find(which) == step:
          raise

  def _progress(self, step: int) -> dict[str, Any]:
    """The item "progress"; a UserError of another format, whose arrays may have another layout."""
    self._check_sound(step, "progress")
    with self._reading(step):
      args = ocp.args.Composite(progress=ocp.args.JsonRestore())
      progress = self._manager.restore(step, args=args)["progress"]
    if progress.get("format") != FORMAT:
      raise self._refused(step, f"is not of format {FORMAT}")
    return progress

  def _restore(self, step: int, **items: Any) -> Any:
    """These items, after `_progress` and `_check_sound`."""
    args = {name: ocp.args.StandardRestore(item) for name, item in items.items()}
    with self._reading(step):
      return self._manager.restore(step, args=ocp.args.Composite(**args))

  def _check_sound(self, step: int, *items: str) -> None:
    """Raises a UserError if `read_only` and the files of these items are damaged."""
    parts = tuple(f"{name}/" for name in items)
    if self._read_only and (fault := damage(self.path / str(step), parts)):
      others = ", ".join(str(s) for s in sorted(self._manager.all_steps()) if s != step)
      raise self._refused(step, f"is damaged ({fault}); others: {others or 'none'}")

  @contextlib.contextmanager
  def _reading(self, step: int) -> Iterator[None]:
    try:
      yield
    except Exception as e:  # Orbax and TensorStore raise nearly anything of damaged files
      logging.debug("restoring failed", exc_info=True)
      raise self._refused(step, f"cannot be restored: {reason(e)}") from e


class _LatestInTurn:
  """A policy of Orbax that keeps the latest checkpoints in turn, so many, and the newest of all."""

  def __init__(self, number: int):
    self._number = number

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    noted = [info.metrics or {} for info in checkpoints]
    in_turn = [i for i, metrics in enumerate(noted) if metrics.get("in_turn", True)]
    kept = {*in_turn[-self._number :], len(checkpoints) - 1}
    return [i in kept for i in range(len(checkpoints))]


def _rank(metrics: dict[str, float]) -> tuple[bool, float, int]:
  """The highest score first; of equals the earlier. Without any score the latest, which is no best."""
  evaluated, step = metrics["evaluated"], metrics["step"]
  return evaluated, metrics["score"], -step if evaluated else step


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
  """Raises a ValueError that names an array which differs from the expected one."""
  named = lambda tree: {
    jax.tree_util.keystr(k): x.shape for k, x in jax.tree_util.tree_leaves_with_path(tree)
  }
  there, wanted = named({k: found.get(k) for k in expected}), named(expected)
  for name in sorted(there.keys() | wanted.keys()):
    if there.get(name) != wanted.get(name):
      raise ValueError(f"{name} is {there.get(name)}, the model wants {wanted.get(name)}")


def write_sums(directory: pathlib.Path) -> None:
  """Notes the sums of all files below a directory in a file of its own there."""
  files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != CHANGING)
  sums = {p.relative_to(directory).as_posix(): sha256(p) for p in files}
  (directory / SUMS).write_text(json.dumps(sums, indent=1) + "\n")


def damage(directory: pathlib.Path, parts: tuple[str, ...] = ("",)) -> str | None:
  """The fault of the files, in a few words; None if there is none.

  Args:
    directory: one to which `write_sums` was applied.
    parts: beginnings of the paths that are looked at, to read no more than is needed.
  """
  name = SUMS
  try:
    sums = json.loads((directory / SUMS).read_text()).items()
    name = CHANGING
    json.loads((directory / name).read_text())
    for name, expected in sums:
      if name.startswith(parts) and sha256(directory / name) != expected:
        return f"{name} is not as it was written"
  except FileNotFoundError:
    return f"{name} is missing"
  except (OSError, ValueError, AttributeError, RecursionError) as e:
    return f"{name} cannot be read: {e}"
  return None
