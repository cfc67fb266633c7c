"""The metrics of a run: rows of `metrics.jsonl`, and the same for TensorBoard."""

import json
import os
import pathlib
import time
from typing import Any

from mixer_jax.errors import UserError, as_user_error
from mixer_jax.runtime.imports import without

with without("torch", "tensorflow"):  # tensorboardX imports both where they are installed
  from tensorboardX import summary
  from tensorboardX.event_file_writer import EventsWriter
  from tensorboardX.proto import event_pb2

FILE = "metrics.jsonl"
Row = dict[str, Any]


def read(directory: pathlib.Path) -> list[Row]:
  """The rows of `metrics.jsonl` but for a torn last line; another spoiled one is a UserError."""
  path, rows = directory / FILE, []
  with as_user_error(f"{path} cannot be read", OSError, ValueError):
    lines = path.read_text().splitlines() if path.exists() else []
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
      if row["step"] <= (rows[-1]["step"] if rows else 0):
        raise ValueError
      rows.append(row)
    except (ValueError, LookupError, TypeError) as e:
      if number < len(lines):
        raise UserError(f"{path} is spoiled in line {number}: {line[:60]!r}") from e
  return rows


class Writer:
  """Writes rows to `metrics.jsonl` and to TensorBoard.

  The rows up to `step` stay; a killed run wrote later ones after its last checkpoint.
  """

  def __init__(self, directory: pathlib.Path, step: int):
    path = directory / FILE
    temporary = path.with_suffix(".tmp")
    kept = [row for row in read(directory) if row["step"] <= step]
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    temporary.replace(path)
    self._file = path.open("a")
    board = directory / "tensorboard"
    board.mkdir(exist_ok=True)
    resumed = any(board.iterdir())
    # SummaryWriter has a thread, which dies of a full disk while everyone waits for it.
    self._board = EventsWriter(str(board / "events"), f".{os.getpid()}.{step}")
    if resumed:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # later events are void
      self._event(step + 1, session_log=start)

  def _event(self, step: int, **content: Any) -> None:
    self._board.write_event(event_pb2.Event(wall_time=time.time(), step=step, **content))

  def write(self, row: Row) -> None:
    """Appends one row, at once on disk; it has the keys `step`, `epoch` and `seconds`."""
    self._file.write(json.dumps(row) + "\n")
    self._file.flush()
    for name, value in row.items():
      if name != "step":
        self._event(row["step"], summary=summary.scalar(name, value))
    self._board.flush()

  def close(self) -> None:
    self._file.close()
    self._board.close()
