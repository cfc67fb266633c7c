"""The origin of a run in its run.json: code, versions, device, data and times."""

import contextlib
import datetime
from importlib import metadata
import os
import pathlib
import subprocess
from typing import Any, Iterator

import jax

import mixer_jax
from mixer_jax.errors import UserError
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.runtime import processes

FILE = "run.json"
_LIBRARIES = ("jax", "flax", "optax", "kfac-jax")


@contextlib.contextmanager
def session(directory: pathlib.Path, record: dict[str, Any], step: int) -> Iterator[None]:
  """Records (see `describe`) the time spent inside as a session of a run, from a step on.

  A run that is resumed has several, perhaps of different commits and devices.
  """
  if not processes.is_first():
    yield
    return
  record = record | {"from_step": step, "started": _now(), "ended": None}
  sessions = [*read(directory), record]
  directory_lib.write_json(directory / FILE, {"sessions": sessions})
  try:
    yield
  finally:
    record["ended"] = _now()
    directory_lib.write_json(directory / FILE, {"sessions": sessions})


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
  """The sessions of a run, oldest first, `ended` None if killed; a UserError for a spoiled file."""
  path = directory / FILE
  if not path.exists():
    return []
  match directory_lib.read_json(path):
    case {"sessions": list(sessions)} if all(map(_is_session, sessions)):
      return sessions
  raise UserError(f"{path} is not the record of a run's sessions; move it away to go on without")


def _is_session(value: Any) -> bool:
  match value:
    case {
      "commit": None | str(), "versions": dict(), "started": str(), "ended": None | str(),
      "device": {"count": int(), "platform": str(), "kind": str()}, "data": dict(),
    }:  # fmt: skip
      return True
  return False


def describe(num_devices: int, data: dict[str, Any]) -> dict[str, Any]:
  """Code, versions, device (of a mesh of so many) and data of a run, as JSON."""
  device = jax.devices()[0]
  kind = _cpu() if device.platform == "cpu" else device.device_kind
  return {
    "commit": commit(),
    "versions": {"mixer_jax": mixer_jax.__version__} | {n: _version(n) for n in _LIBRARIES},
    "device": {"platform": device.platform, "kind": kind, "count": num_devices},
    "data": data,
  }


def commit() -> str | None:
  """The commit of this package, "-dirty" if it was changed; None outside its own clone."""
  here = pathlib.Path(mixer_jax.__file__).parent

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
