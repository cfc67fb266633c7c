"""What made a run: code, versions, device, data and times, in its run.json."""

import contextlib
import datetime
from importlib import metadata
import json
import os
import pathlib
import subprocess
from typing import Any, Iterator

import jax

import mixer_jax
from mixer_jax import processes, workdir
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment

FILE = "run.json"
_LIBRARIES = ("jax", "flax", "optax", "kfac-jax")


@contextlib.contextmanager
def session(directory: pathlib.Path, run: Experiment, epoch: int) -> Iterator[None]:
  """Records the time spent inside as one session of a run.

  A run that is resumed has several, perhaps of different commits and devices.

  Args:
    directory: the run's.
    run: what is trained.
    epoch: epochs finished before.
  """
  if not processes.is_first():
    yield
    return
  record = describe(run) | {"from_epoch": epoch + 1, "started": _now(), "ended": None}
  sessions = [*read(directory), record]
  _write(directory, sessions)
  try:
    yield
  finally:
    record["ended"] = _now()
    _write(directory, sessions)


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
  """The sessions of a run, oldest first; one that was killed has `ended` None.

  Raises:
    UserError: the file is spoiled.
  """
  path = directory / FILE
  if not path.exists():
    return []
  match workdir.read_json(path):
    case {"sessions": list(sessions)} if all(map(_is_session, sessions)):
      return sessions
  raise UserError(f"{path} is not the record of a run's sessions; move it away to go on without")


def _is_session(value: Any) -> bool:
  match value:
    case {
      "commit": None | str(), "versions": dict(), "started": str(), "ended": None | str(),
      "device": {"count": int(), "platform": str(), "kind": str()},
      "data": {"name": str(), "train_images": int(), "train_split": str(),
               "test_images": int(), "test_split": str(), "classes": int()},
    }:  # fmt: skip
      return True
  return False


def describe(run: Experiment) -> dict[str, Any]:
  """Code, versions, device and data of a run, as JSON."""
  device, data, config = jax.devices()[0], run.dataset, run.config.data
  versions = {name: _version(name) for name in _LIBRARIES}
  return {
    "commit": commit(),
    "versions": {"mixer_jax": mixer_jax.__version__, **versions},
    "device": {
      "platform": device.platform,
      "kind": _cpu() if device.platform == "cpu" else device.device_kind,
      "count": run.mesh.size,
    },
    "data": {
      "name": data.name,
      "train_split": config.train_split,
      "train_images": len(data.train),
      "test_split": config.test_split,
      "test_images": len(data.test),
      "classes": data.num_classes,
    },
  }


def commit() -> str | None:
  """The commit that this package is at, "-dirty" if it was changed; None without git.

  A package installed into the clone of some other project has none.
  """
  here = pathlib.Path(__file__).parent

  def git(*args: str) -> str:
    command = ["git", "-C", str(here), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

  try:
    git("ls-files", "--error-unmatch", "__init__.py")
    return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
  except (OSError, subprocess.CalledProcessError):
    return None


def _version(library: str) -> str | None:
  try:
    return metadata.version(library)
  except metadata.PackageNotFoundError:
    return None


def _cpu() -> str:
  """Name and number of the machine's processors: JAX says "cpu" of all of them."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    lines = []
  names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
  return f"{len(os.sched_getaffinity(0))} x {next(names, 'cpu')}" if lines else "cpu"


def _now() -> str:
  return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _write(directory: pathlib.Path, sessions: list[dict[str, Any]]) -> None:
  temporary = directory / f"{FILE}.tmp"
  temporary.write_text(json.dumps({"sessions": sessions}, indent=1) + "\n")
  temporary.replace(directory / FILE)
