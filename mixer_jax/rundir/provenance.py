"""The origin of a run in its run.json: code, versions, device, data and times."""

import contextlib
import datetime
from importlib import metadata
import itertools
import json
import os
import pathlib
import re
import subprocess
from typing import Any, Iterator, Mapping, Sequence

import jax

import mixer_jax
from mixer_jax.errors import UserError
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.runtime import processes

FILE = "run.json"
_LIBRARIES = ("jax", "flax", "optax", "kfac-jax")
_FIELDS = {"commit", "versions", "device", "data", "started", "ended"}


@contextlib.contextmanager
def session(
  directory: pathlib.Path, step: int, num_devices: int, data: dict, class_names: Sequence[str] = ()
) -> Iterator[None]:
  """Records code, versions, devices, data and the time spent inside: a session from a step on.

  The names of the classes are recorded if there are any. A resumed run has several sessions,
  perhaps of different commits and devices.
  """
  if not processes.is_first():
    yield
    return
  device, now = jax.devices()[0], lambda: datetime.datetime.now(datetime.timezone.utc)
  kind = _cpu() if device.platform == "cpu" else device.device_kind
  record = {
    "commit": commit(),
    "versions": {"mixer_jax": mixer_jax.__version__}
    | {library: _version(library) for library in _LIBRARIES},
    "device": {"platform": device.platform, "kind": kind, "count": num_devices},
    "data": data,
    **({"class_names": [str(name) for name in class_names]} if len(class_names) else {}),
    "from_step": step,
    "started": now().isoformat(timespec="seconds"),
    "ended": None,
  }
  sessions = [*read(directory), record]
  directory_lib.write_json(directory / FILE, {"sessions": sessions})
  try:
    yield
  finally:
    record["ended"] = now().isoformat(timespec="seconds")
    directory_lib.write_json(directory / FILE, {"sessions": sessions})


def _version(library: str) -> str | None:
  """The version that is installed; None without it: only K-FAC needs kfac-jax."""
  try:
    return metadata.version(library)
  except metadata.PackageNotFoundError:
    return None


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
  """The sessions of a run, oldest first, `ended` None if killed; a UserError for a spoiled file."""
  path = directory / FILE
  whole = lambda session: isinstance(session, dict) and _FIELDS <= session.keys()
  match directory_lib.read_json(path) if path.exists() else {"sessions": []}:
    case {"sessions": [*sessions]} if all(map(whole, sessions)):
      return sessions
  raise UserError(f"{path} is not the record of a run's sessions; move it away to go on without")


def class_names(directory: pathlib.Path) -> tuple[str, ...]:
  """The names of a run's classes, as its latest session that has any recorded them; else ()."""
  return tuple(
    next((s["class_names"] for s in reversed(read(directory)) if "class_names" in s), ())
  )


def notes(directory: pathlib.Path) -> dict[str, Any]:
  """Facts about a run's data, as its latest session recorded them; see `Task.notes`."""
  match read(directory):
    case [*_, {"data": dict(found)}]:
      return found
  return {}


def check_data(
  directory: pathlib.Path, examples: int, sample: Mapping[str, Sequence[float]] | None = None
) -> None:
  """A UserError if a run would go on with other training examples than it had.

  `sample` has the mean and the standard deviation of some of them by the name of the array, see
  `data.dataset.sample`; decoders of another machine may differ by a hundredth of the latter.
  """
  match read(directory):
    case [*_, {"data": {"train": int(before)}}] if before != examples:
      had = f"{directory} was trained on {before:,} examples, and the training set has {examples:,}"
      raise UserError(f"{had}: take the same data to resume, or another --workdir")
    case [*_, {"data": {"sample": dict(before)}}]:
      for name in before.keys() & (sample or {}).keys():
        (mean, deviation), own = before[name], sample[name]
        if max(abs(mean - own[0]), abs(deviation - own[1])) > 0.01 * deviation + 1e-6 * abs(mean):
          means = f"a mean {name} of {mean:.4g} in some, which is {own[0]:.4g} here"
          had = f"{directory} was trained on other examples, with {means}"
          raise UserError(f"{had}: take the same data to resume, or another --workdir")


def check_grids(directory: pathlib.Path, notes: Mapping[str, Any]) -> None:
  """A UserError if functions have other grids than those that a run was trained on."""
  match read(directory), json.loads(json.dumps(notes, default=directory_lib.as_json)):
    case [*_, {"data": {"grids": before}}], {"grids": now} if before != now:
      had = f"{directory} was trained on grids {before} (inputs, outputs), and the data have {now}"
      raise UserError(f"{had}: take the same data to resume, or another --workdir")


def check_classes(directory: pathlib.Path, names: Sequence[str]) -> None:
  """A UserError if a label means another class in the data than in the run's record."""
  names = [str(name) for name in names]
  if not names or not (trained := class_names(directory)):
    return
  for label, (own, other) in enumerate(itertools.zip_longest(trained, names)):
    if own != other:
      what = f"label {label} is {own!r} in {directory} and {other!r} in the data (None: no class)"
      raise UserError(f"{what}: give the data the same classes in the same order")


def commit() -> str | None:
  """The commit of this package, "-dirty" if it was changed; None outside its own clone."""
  git = ["git", "-C", str(pathlib.Path(mixer_jax.__file__).parent)]
  options = dict(capture_output=True, text=True, check=True)
  try:
    subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], **options)
    command = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, **options).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return None


def _cpu() -> str:
  """Name and number of the machine's processors: JAX says "cpu" of all of them."""
  try:
    named = re.search(r"^model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
  except OSError:
    return "cpu"
  return f"{len(os.sched_getaffinity(0))} x {named[1] if named else 'cpu'}"
