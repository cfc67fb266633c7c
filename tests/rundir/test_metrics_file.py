"""The rows of a run: what a restart keeps of them, and what makes them unreadable."""

import json
import os

import pytest
from tensorboardX.proto import event_pb2

from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file


def row(epoch, **values):
  return {"step": 10 * epoch, "epoch": float(epoch), "seconds": 0.5} | values


def test_rows_after_the_last_checkpoint_are_dropped(tmp_path):
  rows = [row(e, **{"train/loss": 1.0}) for e in (1, 2, 3)]
  text = "".join(json.dumps(r) + "\n" for r in rows)
  (tmp_path / "metrics.jsonl").write_text(text + '{"epoch": 4, "st')
  writer = metrics_file.Writer(tmp_path, step=25)
  assert metrics_file.read(tmp_path) == rows[:2]
  writer.write(row(3, **{"train/loss": 0.5, "validation/top1": 0.25}))
  writer.close()
  assert [r["train/loss"] for r in metrics_file.read(tmp_path)] == [1.0, 1.0, 0.5]
  assert metrics_file.read(tmp_path)[-1]["validation/top1"] == 0.25
  assert list((tmp_path / "tensorboard").glob("events*"))


def shown(board, tag):
  """Steps and values as TensorBoard shows them: a START voids earlier events from its step on."""
  events = []
  for path in sorted(board.iterdir()):
    content, position = path.read_bytes(), 0
    while position < len(content):  # a record: its length, 4 bytes, the event, 4 bytes
      end = position + 12 + int.from_bytes(content[position : position + 8], "little")
      event = event_pb2.Event.FromString(content[position + 12 : end])
      if event.session_log.status == event_pb2.SessionLog.START:
        events = [e for e in events if e.step < event.step]
      events.append(event)
      position = end + 4
  values = ((e.step, v) for e in events for v in e.summary.value)
  return [(step, v.simple_value) for step, v in values if v.tag == tag]


@pytest.mark.parametrize("step, kept", [(0, []), (10, [(10, 3.0)])])
def test_the_board_voids_the_steps_after_the_last_checkpoint(step, kept, tmp_path, monkeypatch):
  """Also if a start left no checkpoint at all."""
  for process, (start, epochs) in enumerate(((0, (1, 2, 3)), (step, (2,)))):
    monkeypatch.setattr(os, "getpid", lambda process=process: process)  # in the file's name
    writer = metrics_file.Writer(tmp_path, start)
    for epoch in epochs:
      writer.write(row(epoch, **{"train/loss": 3.0 - process}))
    writer.close()
  assert shown(tmp_path / "tensorboard", "train/loss") == [*kept, (20, 2.0)]


@pytest.mark.parametrize("spoiled", ["", "{", "3", "[]", "{}", "\x00" * 40])
def test_a_spoiled_line_is_named_and_the_lines_after_it_are_kept(tmp_path, spoiled):
  path = tmp_path / "metrics.jsonl"
  lines = [json.dumps(row(e)) for e in (1, 2, 3)]
  path.write_text("\n".join([lines[0], spoiled, lines[2]]) + "\n")
  before = path.read_text()
  for call in (lambda: metrics_file.read(tmp_path), lambda: metrics_file.Writer(tmp_path, 10)):
    with pytest.raises(UserError, match=f"{path} is spoiled in line 2: "):
      call()
  assert path.read_text() == before
  path.write_text("\n".join([*lines[:2], spoiled]))  # the last line may be torn
  assert [r["epoch"] for r in metrics_file.read(tmp_path)] == [1, 2]


def test_rows_that_come_twice(tmp_path):
  lines = [json.dumps(row(e)) + "\n" for e in (1, 2, 3)]
  (tmp_path / "metrics.jsonl").write_text("".join([*lines, lines[1], lines[2]]))
  with pytest.raises(UserError, match="is spoiled in line 4"):
    metrics_file.read(tmp_path)
