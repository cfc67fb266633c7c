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
# Orbax adds the time to this file when it names the directory, so that it has no sum.
CHANGING = "_CHECKPOINT_METADATA"
_READS = 10  # times that the list of steps is read, which a live run changes meanwhile


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
  """Silences Orbax's warning about read-only directories, which scripts and notebooks would show."""
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
  evaluation. Saving copies the arrays and writes while training goes on. A directory gets its name
  last, when everything is written, with the SHA-256 sums of its files. The `keep` latest regular
  checkpoints stay, the newest, and the best.

  Unless `read_only`, damaged checkpoints are moved to `workdir/damaged` if there is a sound one to go
  on from; a UserError if there is none. If `read_only`, a UserError if there are no checkpoints.
  """

  def __init__(self, workdir: pathlib.Path, read_only: bool = False, keep: int = 2):
    self.path = workdir / "checkpoints"
    self._read_only = read_only
    if not read_only:
      processes.on_first(lambda: self._set_damaged_aside(workdir / "damaged"))
    elif not self.path.is_dir():
      raise UserError(f"{workdir} holds no checkpoints (looked for {self.path})")
    policies = ocp.checkpoint_managers
    kept = [_LatestRegular(keep), policies.BestN(get_metric_fn=_rank, n=1)]
    with _without_warnings() if read_only else contextlib.nullcontext():
      options = ocp.CheckpointManagerOptions(
        read_only=read_only,
        create=not read_only,
        cleanup_tmp_directories=not read_only,
        preservation_policy=policies.AnyPreservationPolicy(kept),
        best_fn=_rank,  # for `best_step`; the policy decides which checkpoints stay
        async_options=ocp.AsyncOptions(post_finalization_callback=self._write_sums),
      )
    # Named here, so that a process can ask for an item's metadata before it restores one.
    handlers = {name: ocp.StandardCheckpointHandler() for name in ("variables", "rest")}
    handlers["progress"] = ocp.JsonCheckpointHandler()
    manager = lambda: ocp.CheckpointManager(self.path, options=options, item_handlers=handlers)
    self._manager = self._listed(manager) if read_only else manager()

  def _listed(self, read: Callable[[], Any]) -> Any:
    """Reads the list of steps, again while a live run removes one of them."""
    for attempt in range(_READS):
      time.sleep(0.1 * (attempt > 0))
      try:
        with _without_warnings():
          return read()
      except Exception as e:  # Orbax raises nearly anything of files that vanish or are damaged
        error = e
    raise UserError(f"{self.path} cannot be read: {reason(error)}") from error

  def _set_damaged_aside(self, aside: pathlib.Path) -> None:
    steps = {int(p.name): p for p in sorted(self.path.glob("*")) if p.name.isdigit()}
    damaged = {step: fault for step, p in steps.items() if (fault := damage(p))}
    sound = max(steps.keys() - damaged, default=None)
    for step, fault in damaged.items():
      what = f"checkpoint {steps[step]} is damaged ({fault})"
      if sound is None:
        raise UserError(f"{what}, and no other is sound; --workdir=NEW starts afresh")
      aside.mkdir(exist_ok=True)
      names = (aside / f"{step}-{i}" for i in itertools.count())
      target = steps[step].rename(next(name for name in names if not name.exists()))
      print(f"{what}: moved to {target}; that of step {sound} is sound", file=sys.stderr)

  def _write_sums(self) -> None:
    """Called when all is written, but before the directory gets its name."""
    (unnamed,) = self.path.glob("*.orbax-checkpoint-tmp*")
    write_sums(unnamed)

  def save(
    self, step: int, state: TrainState, seconds: float, score: float | None, regular: bool = True
  ) -> None:
    """Saves in the background, after the last save has ended.

    Args:
      step: of the state.
      state: that is saved.
      seconds: of training since the last evaluation.
      score: of the state, the higher the better; None if it was not evaluated.
      regular: False of a checkpoint because of a signal, or because it is the best so far: it is not
        among those of `latest_steps`.
    """
    rest = serialization.to_state_dict(state)
    items = ocp.args.Composite(
      variables=ocp.args.StandardSave(rest.pop("variables")),
      rest=ocp.args.StandardSave(rest),
      progress=ocp.args.JsonSave({"format": FORMAT, "seconds": seconds}),
    )
    ranked = {"evaluated": score is not None, "score": float(score or 0.0), "step": step}
    with self._writing():
      self._manager.save(step, args=items, metrics=ranked | {"in_turn": regular})

  def check_saved(self) -> None:
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
      code = re.search(r"os_error_code='(\d+)'", str(e))
      known = os.strerror(int(code[1])) if code else getattr(e, "strerror", None)
      raise directory_lib.unwritten(f"a checkpoint in {self.path}", known or reason(e)) from e

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
    """The steps of so many latest regular checkpoints, in order, of a run that keeps `keep` of them.

    An older one is not among them, though kept as the best. A UserError if there are fewer.
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
    variables = rest.pop("variables")
    with self._reading(step, "progress", "variables", "rest") as progress:
      found = self._read(step, variables=variables, rest=rest)
    state = {**found["rest"], "variables": found["variables"]}
    return serialization.from_state_dict(shapes, state), progress["seconds"]

  def restore_variables(self, which: str, sharding: Any, shapes: Any = None) -> tuple[int, dict]:
    """The step and the variables, all of one sharding, of a checkpoint, whatever devices wrote it.

    Args:
      which: as in `find`; a checkpoint that a live run removes meanwhile gives way to the next.
      sharding: of all arrays.
      shapes: of the variables that are expected, beside averages; None takes those in the file.
    """
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    while True:
      step = self.find(which)
      try:
        with self._reading(step, "progress", "variables"):
          found = jax.tree.map(placed, self._manager.item_metadata(step)["variables"] or {})
          _compare(found, shapes or found)
          return step, self._read(step, variables=found)["variables"]
      except UserError:
        self._listed(self._manager.reload)
        if self.find(which) == step:
          raise

  def _read(self, step: int, **items: Any) -> Any:
    args = {name: ocp.args.StandardRestore(item) for name, item in items.items()}
    return self._manager.restore(step, args=ocp.args.Composite(**args))

  @contextlib.contextmanager
  def _reading(self, step: int, *items: str) -> Iterator[dict[str, Any]]:
    """The progress of a checkpoint whose items are read inside; any error becomes a UserError."""
    what, parts = f"checkpoint {self.path / str(step)}", tuple(f"{name}/" for name in items)
    if self._read_only and (fault := damage(self.path / str(step), parts)):
      others = ", ".join(str(s) for s in sorted(self._manager.all_steps()) if s != step)
      raise UserError(f"{what} is damaged ({fault}); others: {others or 'none'}")
    try:
      args = ocp.args.Composite(progress=ocp.args.JsonRestore())
      progress = self._manager.restore(step, args=args)["progress"]
      if progress.get("format") != FORMAT:  # the arrays may have another layout
        raise UserError(f"{what} is not of format {FORMAT}")
      yield progress
    except UserError:
      raise
    except Exception as e:  # Orbax and TensorStore raise nearly anything of damaged files
      raise UserError(f"{what} cannot be restored: {reason(e)}") from e


class _LatestRegular:
  """A policy of Orbax that keeps so many latest regular checkpoints, and the newest of all."""

  def __init__(self, number: int):
    self._number = number

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    noted = [info.metrics or {} for info in checkpoints]
    regular = [i for i, metrics in enumerate(noted) if metrics.get("in_turn", True)]
    kept = {*regular[-self._number :], len(checkpoints) - 1}
    return [i in kept for i in range(len(checkpoints))]


def _rank(metrics: dict[str, float]) -> tuple[bool, float, int]:
  """Sort key: higher score first, then the earlier step. Checkpoints without a score sort last."""
  evaluated, step = metrics["evaluated"], metrics["step"]
  return evaluated, metrics["score"], -step if evaluated else step


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
  """Raises a ValueError that names an array which differs from the expected one."""
  named = lambda tree: {
    jax.tree_util.keystr(k): x.shape for k, x in jax.tree.leaves_with_path(tree)
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
  except (OSError, ValueError, AttributeError) as e:
    return f"{name} cannot be read: {e}"
  return None
