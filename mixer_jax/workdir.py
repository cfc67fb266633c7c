"""The directory of a run: its config, its metrics, its logs."""

import contextlib
import datetime
import errno
import json
import os
import pathlib
import time
from typing import Any, Iterator

import jax
import ml_collections
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from mixer_jax import check
from mixer_jax.errors import UserError

METRICS = "metrics.jsonl"
CONFIG = "config.json"
# What reports need of each row of the metrics, beside epoch and step.
COLUMNS = {
  "test/top1",
  "test/loss",
  "test/best_top1",
  "test/target_epoch",
  "seconds_per_epoch",
}


def create(path: str | None) -> pathlib.Path:
  """Makes a run's directory, absolute and proved writable.

  Args:
    path: the directory, or None for a fresh one under `runs/`.

  Raises:
    UserError: it cannot be written.
  """
  if not path:
    if jax.process_count() > 1:
      raise UserError("--workdir is missing; several processes need one that all of them see")
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = os.path.join("runs", f"{now}-{os.getpid()}")
  workdir = pathlib.Path(os.path.expanduser(path)).absolute()
  probe = workdir / f".writable-{os.getpid()}"
  if workdir.is_file():
    raise UserError(f"workdir {workdir} is a file; it has to be a directory, or not to exist")
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()
  except OSError as e:
    raise UserError(f"workdir {workdir} cannot be written: {e.strerror}") from e
  return workdir


# What only a write can fail of; a lack of rights, too, if it is one of the run's files.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_NO_RIGHTS = (errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def writing(workdir: pathlib.Path) -> Iterator[None]:
  """Within it a file of a run that cannot be written is an error of one line.

  Raises:
    UserError: names the file, or the directory where the file is not known.
  """
  try:
    yield
  except OSError as e:
    path = str(e.filename or workdir)
    if e.errno in _NO_ROOM or (e.errno in _NO_RIGHTS and path.startswith(str(workdir))):
      raise UserError(unwritten(path, e.strerror)) from e
    raise


def unwritten(path: Any, reason: str) -> str:
  """The line about a write that failed."""
  return (
    f"{path} cannot be written: {reason}. All that was saved before is kept: mend it, and the same"
    " --config with the same --workdir goes on"
  )


def existing(path: str) -> pathlib.Path:
  """The absolute path of a run's directory.

  Raises:
    UserError: there is no such directory.
  """
  workdir = pathlib.Path(os.path.expanduser(path)).absolute()
  if not workdir.is_dir():
    raise UserError(f"workdir {workdir} does not exist")
  return workdir


# Where a run is, not what it is: a resumed run may have moved.
OF_THE_MACHINE = (
  "mesh.data",
  "mesh.model",
  "data.dir",
  "data.cache_dir",
  "data.stream",
  "data.workers",
  "data.read_ahead",
  "require_accelerator",
  "steps_per_dispatch",
  "model.remat",
)
# What changes no finite step, and may be changed when one was not.
_ON_TROUBLE = ("on_nonfinite",)
# Fields that runs of earlier versions do not have.
_LATER = {
  "on_nonfinite": "stop",
  "mesh.model": 1,
  "model.remat": None,
  "model.scan_blocks": None,
  "data.stream": "never",
  "data.crop": "",
  "data.smallest_crop": 0.05,
  "data.workers": -1,
  "data.read_ahead": 64,
}


def store_config(workdir: pathlib.Path, config: ml_collections.ConfigDict, started: bool) -> None:
  """Keeps the config beside the checkpoints, or compares it with the one kept.

  Args:
    workdir: the run's directory.
    config: of the run now.
    started: whether there is a checkpoint; without one nothing has to fit.

  Raises:
    UserError: the run was started with another config; names what differs.
  """
  path = workdir / CONFIG
  new = json.loads(config.to_json())
  if not (started and path.exists()):
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(new, indent=2, sort_keys=True) + "\n")
    temporary.replace(path)
    return
  old, new = _LATER | dict(_flatten(read_json(path))), dict(_flatten(new))
  differing = [
    f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
    for key in sorted(old.keys() | new.keys())
    if old.get(key) != new.get(key) and key not in OF_THE_MACHINE + _ON_TROUBLE
  ]
  if differing:
    raise UserError(
      f"workdir {workdir} holds a run of another config: {'; '.join(differing)}."
      " Take another --workdir, or the same config to resume"
    )


def stored_config(path: str | None) -> ml_collections.ConfigDict | None:
  """The config of the run to be resumed in a directory; None if there is none yet."""
  workdir = pathlib.Path(os.path.expanduser(path)).absolute() if path else None
  if workdir is None or not any(workdir.glob("checkpoints/[0-9]*")):
    return None
  return load_config(workdir)


def load_config(workdir: pathlib.Path) -> ml_collections.ConfigDict:
  """The config that a run was started with.

  Raises:
    UserError: there is none, or it cannot be read.
  """
  path = workdir / CONFIG
  if not path.exists():
    raise UserError(f"{workdir} holds no run (no {CONFIG} in it)")
  try:
    return restored_config(read_json(path))
  except UserError as e:
    raise UserError(f"{path} is not the config of a run: {e}") from e


def restored_config(stored: Any) -> ml_collections.ConfigDict:
  """The config that was written as JSON.

  Raises:
    UserError: it is no config, or one that no run can have.
  """
  try:
    config = ml_collections.ConfigDict(stored)
    for field, value in _LATER.items():
      parent, _, name = field.rpartition(".")
      node = config.get(parent) if parent else config
      if isinstance(node, ml_collections.ConfigDict):
        node[name] = node.get(name, value)
  except (TypeError, ValueError, AttributeError) as e:
    raise UserError(f"it has no fields: {e}") from e
  check.check(config)
  return config


def read_json(path: pathlib.Path) -> Any:
  """What a JSON file holds.

  Raises:
    UserError: it cannot be read.
  """
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError, RecursionError) as e:
    raise UserError(f"{path} cannot be read: {e}") from e


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
  if isinstance(tree, dict):
    for key, value in tree.items():
      yield from _flatten(value, f"{prefix}{key}.")
  else:
    yield prefix[:-1], tree


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """The rows of `metrics.jsonl`, one an epoch; a torn last line is dropped.

  Raises:
    UserError: another line is spoiled. Going on would lose what is behind it.
  """
  path = workdir / METRICS
  try:
    lines = path.read_text().splitlines() if path.exists() else []
  except (OSError, ValueError) as e:
    raise UserError(f"{path} cannot be read: {e}") from e
  rows = [_row(line) for line in lines]
  if rows and rows[-1] is None:
    rows.pop()
  epochs = [row and row["epoch"] for row in rows]
  for number, epoch in enumerate(epochs, 1):
    if epoch is None or epoch in epochs[: number - 1]:
      raise UserError(f"{path} is spoiled in line {number}: {lines[number - 1][:60]!r}")
  return rows


def _row(line: str) -> dict[str, Any] | None:
  """The numbers of an epoch; None if the line does not hold them."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return None
  match row:
    case {"epoch": int(), "step": int()} if row.keys() >= COLUMNS:
      return row if all(isinstance(value, int | float) for value in row.values()) else None
  return None


class MetricWriter:
  """Writes an epoch's metrics to `metrics.jsonl` and to TensorBoard.

  Args:
    workdir: the run's directory.
    epoch: epochs already done; later rows, written before a kill but after the
      last checkpoint, are removed.
  """

  def __init__(self, workdir: pathlib.Path, epoch: int):
    kept = [row for row in read_metrics(workdir) if row["epoch"] <= epoch]
    path = workdir / METRICS
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    temporary.replace(path)
    self._file = path.open("a")
    board = workdir / "tensorboard"
    board.mkdir(exist_ok=True)
    # Not SummaryWriter: its thread would die of a full disk, and everyone wait for it.
    self._board = EventsWriter(str(board / "events"), f".{os.getpid()}.{epoch}")
    if kept:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # what was later is void
      self._event(kept[-1]["step"] + 1, session_log=start)

  def _event(self, step: int, **content: Any) -> None:
    self._board.write_event(event_pb2.Event(wall_time=time.time(), step=step, **content))

  def write(self, row: dict[str, Any]) -> None:
    """Appends one row, at once on disk; it has the keys `epoch` and `step`."""
    self._file.write(json.dumps(row) + "\n")
    self._file.flush()
    for name, value in row.items():
      if name not in ("epoch", "step"):
        self._event(row["step"], summary=summary.scalar(name, value))
    self._board.flush()

  def close(self) -> None:
    self._file.close()
    self._board.close()
