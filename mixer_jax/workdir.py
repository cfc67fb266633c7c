"""The directory of a run: its config, its metrics, its logs."""

import datetime
import json
import os
import pathlib
from typing import Any, Iterator

import ml_collections
from tensorboardX import SummaryWriter

from mixer_jax.errors import UserError

METRICS = "metrics.jsonl"
CONFIG = "config.json"


def create(path: str | None) -> pathlib.Path:
  """Makes a run's directory, absolute and proved writable.

  Args:
    path: the directory, or None for a fresh one under `runs/`.

  Raises:
    UserError: it cannot be written.
  """
  if not path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = os.path.join("runs", f"{now}-{os.getpid()}")
  workdir = pathlib.Path(os.path.expanduser(path)).absolute()
  probe = workdir / f".writable-{os.getpid()}"
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()
  except OSError as e:
    raise UserError(f"workdir {workdir} cannot be written: {e.strerror}") from e
  return workdir


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
  "data.dir",
  "data.cache_dir",
  "data.stream",
  "data.workers",
  "data.read_ahead",
  "require_accelerator",
)


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
  old, new = dict(_flatten(_read_json(path))), dict(_flatten(new))
  differing = [
    f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
    for key in sorted(old.keys() | new.keys())
    if old.get(key) != new.get(key) and key not in OF_THE_MACHINE
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
  config = _read_json(path)
  if not isinstance(config, dict):
    raise UserError(f"{path} is not the config of a run")
  return ml_collections.ConfigDict(config)


def _read_json(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError) as e:
    raise UserError(f"{path} cannot be read: {e}") from e


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
  if isinstance(tree, dict):
    for key, value in tree.items():
      yield from _flatten(value, f"{prefix}{key}.")
  else:
    yield prefix[:-1], tree


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """The rows of `metrics.jsonl`, one an epoch; a torn last line is dropped."""
  path = workdir / METRICS
  rows = []
  for line in path.read_text().splitlines() if path.exists() else ():
    try:
      rows.append(json.loads(line))
    except ValueError:
      break
  return rows


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
    purge = kept[-1]["step"] + 1 if kept else None
    self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=purge)

  def write(self, row: dict[str, Any]) -> None:
    """Appends one row, at once on disk; it has the keys `epoch` and `step`."""
    self._file.write(json.dumps(row) + "\n")
    self._file.flush()
    for name, value in row.items():
      if name not in ("epoch", "step"):
        self._board.add_scalar(name, value, row["step"])
    self._board.flush()

  def close(self) -> None:
    self._file.close()
    self._board.close()
