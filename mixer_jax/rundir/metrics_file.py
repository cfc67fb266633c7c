"""The metrics of a run: rows of `metrics.jsonl`, and the same for TensorBoard."""

import json
import os
import pathlib
import time
from typing import Any

from mixer_jax.errors import UserError
from mixer_jax.runtime.imports import without

with without("torch", "tensorflow"):  # tensorboardX imports both where they are installed
  from tensorboardX import summary
  from tensorboardX.event_file_writer import EventsWriter
  from tensorboardX.proto import event_pb2

FILE = "metrics.jsonl"
Row = dict[str, Any]
_ALWAYS = {"step", "epoch", "seconds"}


def read(directory: pathlib.Path) -> list[Row]:
  """The rows of `metrics.jsonl`, one an evaluation; a torn last line is dropped.

  Another spoiled line is a UserError: going on would lose the lines after it.
  """
  path = directory / FILE
  try:
    lines = path.read_text().splitlines() if path.exists() else []
  except (OSError, ValueError) as e:
    raise UserError(f"{path} cannot be read: {e}") from e
  rows = [_row(line) for line in lines]
  if rows and rows[-1] is None:
    rows.pop()
  last = 0
  for number, row in enumerate(rows, 1):
    if row is None or row["step"] <= last:
      raise UserError(f"{path} is spoiled in line {number}: {lines[number - 1][:60]!r}")
    last = row["step"]
  return rows


def _row(line: str) -> Row | None:
  """The numbers of an evaluation; None if the line does not hold them."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(row, dict) or not row.keys() >= _ALWAYS or not isinstance(row["step"], int):
    return None
  return row if all(isinstance(value, int | float) for value in row.values()) else None


class Writer:
  """Writes rows to `metrics.jsonl` and to TensorBoard.

  Args:
    directory: the run's.
    step: steps already done; later rows, of a killed run after its checkpoint, are removed.

  Attributes:
    rows: all rows so far.
  """

  def __init__(self, directory: pathlib.Path, step: int):
    self.rows = [row for row in read(directory) if row["step"] <= step]
    path = directory / FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
    temporary.replace(path)
    self._file = path.open("a")
    board = directory / "tensorboard"
    board.mkdir(exist_ok=True)
    # SummaryWriter has a thread, which dies of a full disk while everyone waits for it.
    self._board = EventsWriter(str(board / "events"), f".{os.getpid()}.{step}")
    if step:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # later events are void
      self._event(step + 1, session_log=start)

  def _event(self, step: int, **content: Any) -> None:
    self._board.write_event(event_pb2.Event(wall_time=time.time(), step=step, **content))

  def write(self, row: Row) -> None:
    """Appends one row, at once on disk; it has the keys `step`, `epoch` and `seconds`."""
    self.rows.append(row)
    self._file.write(json.dumps(row) + "\n")
    self._file.flush()
    for name, value in row.items():
      if name != "step":
        self._event(row["step"], summary=summary.scalar(name, value))
    self._board.flush()

  def close(self) -> None:
    self._file.close()
    self._board.close()
