"""The record of a run, run.json: its sessions with code, versions, device, data and times."""

import pathlib
from typing import Any

from mixer_jax.errors import UserError
from mixer_jax.rundir import directory as directory_lib

FILE = "run.json"


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
  """The sessions of a run, oldest first; `ended` is None of one that was killed."""
  path = directory / FILE
  match directory_lib.read_json(path) if path.exists() else {"sessions": []}:
    case {"sessions": [*sessions]}:
      return sessions
  raise UserError(f"{path} is not the record of a run's sessions; move it away to go on without")


def latest(directory: pathlib.Path, name: str, default: Any) -> Any:
  """A part of a run's record as its latest session that has the part wrote it, or the default."""
  return next((s[name] for s in reversed(read(directory)) if name in s), default)


def class_names(directory: pathlib.Path) -> tuple[str, ...]:
  """The names of a run's classes in the order of their labels; () if it has recorded none."""
  return tuple(latest(directory, "class_names", ()))


def notes(directory: pathlib.Path) -> dict[str, Any]:
  """Facts about the data of a run, see `Task.notes`."""
  return dict(latest(directory, "data", {}))
