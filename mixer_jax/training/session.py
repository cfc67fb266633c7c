"""What a start writes into the record of its run, and compares with the sessions before it."""

import contextlib
import datetime
import functools
from importlib import metadata
import inspect
import itertools
import logging
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
from typing import Any, Iterator, Sequence

import jax

import mixer_jax
from mixer_jax import tasks
from mixer_jax.data.dataset import sample
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.paths import sha256, user_path
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.rundir import provenance
from mixer_jax.runtime import processes

_LOG = logging.getLogger(__name__)
_LIBRARIES = ("jax", "flax", "optax", "kfac-jax")
_CONFIG_FILE = "the config file"
# Modules of the package and of libraries, whose versions are in the record.
_NOT_OWN = (
  str(pathlib.Path(mixer_jax.__file__).parent),
  *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


@contextlib.contextmanager
def session(
  directory: pathlib.Path, step: int, run: Experiment, config_file: str | None = None
) -> Iterator[None]:
  """Records code, versions, devices, data and the time spent inside, a session from a step on.

  A resumed run has several sessions, perhaps of different commits and devices.
  """
  if not processes.is_first():
    yield
    return
  now = lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  session = _described(run, config_file) | {"from_step": step, "started": now(), "ended": None}
  sessions = [*provenance.read(directory), session]
  write = lambda: directory_lib.write_json(directory / provenance.FILE, {"sessions": sessions})
  write()
  try:
    yield
  finally:
    session["ended"] = now()
    write()


def _described(run: Experiment, config_file: str | None) -> dict[str, Any]:
  device, names = jax.devices()[0], run.task.class_names
  kind = _cpu() if device.platform == "cpu" else device.device_kind
  return {
    "commit": commit(),
    "versions": {"mixer_jax": mixer_jax.__version__} | {k: _version(k) for k in _LIBRARIES},
    "code": code(tasks.find(run.config.task), config_file),
    "device": {"platform": device.platform, "kind": kind, "count": run.mesh.size},
    "data": {"name": (run.config.get("data") or {}).get("name", run.config.task)} | _data(run),
    **({"class_names": [str(name) for name in names]} if len(names) else {}),
  }


def _data(run: Experiment) -> dict[str, Any]:
  """Sizes of the splits, shapes and a sample of the training examples, and the notes of the task."""
  train, sizes = run.datasets["train"], {k: len(split) for k, split in run.datasets.items()}
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  shapes = {name(k): list(x.shape) for k, x in jax.tree.leaves_with_path(train.spec)}
  return sizes | {"shapes": shapes, "sample": sample(train), **run.task.notes()}


def code(task: type[tasks.Task], config_file: str | None = None) -> dict[str, str]:
  """SHA-256 sums of the files of a task outside the package, by module, and of the config file.

  They are those of its class, of the classes that it is made of, and of the modules that these import.
  """
  waiting, files = [cls.__module__ for cls in task.__mro__], {}
  while waiting:
    name = waiting.pop()
    file = getattr(sys.modules.get(name), "__file__", None)
    if name in files or not file or file.startswith(_NOT_OWN):
      continue
    files[name] = file
    for value in vars(sys.modules[name]).values():
      module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
      if isinstance(module, str):
        waiting.append(module)
  if config_file:
    files[_CONFIG_FILE] = user_path(config_file)
  return {name: sha256(file) for name, file in sorted(files.items()) if os.path.isfile(file)}


def warn_of_changes(
  directory: pathlib.Path, task: type[tasks.Task], config_file: str | None = None
) -> None:
  """Logs a warning that names the modules of a task, or the config file, that have changed since a run."""
  before, now = provenance.latest(directory, "code", {}), code(task, config_file)
  if changed := [name for name in now if before.get(name, now[name]) != now[name]]:
    names = ", ".join(changed)
    _LOG.warning(f"{directory} was trained with other code: {names} has changed since then")


def check_data(directory: pathlib.Path, run: Experiment) -> None:
  """Raises a UserError if a run would go on with other training data than it had.

  Decoders of another machine may change the mean of an array by a hundredth of its deviation.
  """
  check_classes(directory, run.task.class_names)
  before, now = provenance.notes(directory), _data(run)
  changed = []
  if before.get("train", now["train"]) != now["train"]:
    changed.append(f"{before['train']:,} examples, now {now['train']:,}")
  for name, shape in before.get("shapes", {}).items():
    if now["shapes"].get(name, shape) != shape:
      changed.append(f"{name} of shape {shape}, now {now['shapes'][name]}")
  for name, (mean, deviation) in before.get("sample", {}).items():
    own = now["sample"].get(name, (mean, deviation))
    if max(abs(mean - own[0]), abs(deviation - own[1])) > 0.01 * deviation + 1e-6 * abs(mean):
      changed.append(f"some {name} of mean {mean:.4g}, now {own[0]:.4g}")
  if changed:
    told = f"{directory} was trained on other data: {'; '.join(changed)}"
    raise UserError(f"{told}. Take the same data to resume, or another --workdir")


def check_classes(directory: pathlib.Path, names: Sequence[str]) -> None:
  """Raises a UserError if a label means another class in the data than in the run's record."""
  names, trained = [str(name) for name in names], provenance.class_names(directory)
  for label, (own, other) in enumerate(itertools.zip_longest(trained, names)):
    if names and trained and own != other:
      what = f"label {label} is {own!r} in {directory} and {other!r} in the data (None: no class)"
      raise UserError(f"{what}: give the data the same classes in the same order")


def _version(library: str) -> str | None:
  """The version that is installed; None without it: only K-FAC needs kfac-jax."""
  try:
    return metadata.version(library)
  except metadata.PackageNotFoundError:
    return None


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
    named = re.search(
      r"^model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE
    )
  except OSError:
    return "cpu"
  return f"{len(os.sched_getaffinity(0))} x {named[1] if named else 'cpu'}"
