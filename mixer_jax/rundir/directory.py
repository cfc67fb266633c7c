"""The directory of a run: how it is made, and what is read from it."""

import contextlib
import datetime
import errno
import json
import os
import pathlib
import re
from typing import Any, Iterator

from flax import traverse_util
import jax
import numpy as np

from mixer_jax.errors import Unwritten, UserError, as_user_error
from mixer_jax.paths import user_path

_WEIGHTS = (".safetensors", ".bin", ".pth")
CONFIG, STUDY = "config.json", "study.json"  # of a run, of a study
FILES = "files"  # copies of files that fields of the config name
# A start that ended before it wrote its config leaves these; so does whoever started it.
_NOT_FOREIGN = ("lock", "checkpoints", "lost+found")
_LOGS = (".log", ".out", ".err", ".txt")
# Orbax looks for the files of a checkpoint by a glob pattern that holds the directory's path. With one
# of these characters it finds none, and a saved checkpoint cannot be read again.
_UNREADABLE = "[\\"
# An address such as gs://bucket, which pathlib takes for a folder "gs:".
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")
# Errors that only a write can meet. Missing permission is one, too, for the files of a run.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_NO_PERMISSION = (errno.EACCES, errno.EPERM)


def create(path: str | None, own: str = CONFIG) -> pathlib.Path:
  """Makes the directory of a run and returns its absolute path.

  Args:
    path: of the directory; None makes a fresh one under `runs/`.
    own: the file by which the directory is known, `CONFIG` of a run or `STUDY` of a study.

  Raises:
    UserError: the directory cannot be written, the library of checkpoints finds another one by its
      name, or it holds files of somebody else.
  """
  if not path:
    if jax.process_count() > 1:
      raise UserError("--workdir is missing; several processes need one that all of them see")
    path = f"runs/{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
  workdir = absolute(path)
  if special := [c for c in str(workdir) if c in _UNREADABLE]:
    raise UserError(
      f"workdir {workdir} has {special[0]!r}, with which its checkpoints could not be read again;"
      f" allowed: a path without {' and '.join(_UNREADABLE)}"
    )
  with as_user_error(f"workdir {workdir} cannot be written", OSError):
    if foreign := _foreign(workdir, own):
      why = f"holds {foreign!r} and no {'run' if own == CONFIG else 'study'}"
      raise UserError(f"workdir {workdir} {why}; take an empty or a new directory")
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / f".writable-{os.getpid()}"
    probe.write_text("")
    try:
      check_place(probe)
    finally:
      probe.unlink()
  return workdir


def check_place(path: pathlib.Path) -> None:
  """Raises a UserError if the library that writes and reads checkpoints finds no such file.

  TensorStore takes a name as UTF-8; Python has it from bytes in the encoding of the locale.
  """
  import tensorstore  # a tenth of a second, for those who train or restore

  spec = {"driver": "file", "path": f"{path.parent}/"}
  try:
    found = tensorstore.KvStore.open(spec).result().read(path.name).result().state
  except RuntimeError:  # of bytes that are no UTF-8
    found = "missing"
  if found == "missing":
    allowed = "a path of ASCII letters, or one of UTF-8 with PYTHONUTF8=1"
    raise UserError(
      f"workdir {str(path.parent)!r}: checkpoints would be elsewhere, because their library reads names as"
      f" UTF-8; allowed: {allowed}"
    )


def _foreign(workdir: pathlib.Path, own: str) -> str | None:
  """The name of a file of somebody else in a directory without its `own` file, or None."""
  if not workdir.is_dir() or (workdir / own).exists():
    return None
  known = lambda p: p.name in _NOT_FOREIGN or p.name.startswith(".") or p.suffix in _LOGS
  return min((p.name for p in workdir.iterdir() if not known(p)), default=None)


def absolute(path: str | os.PathLike) -> pathlib.Path:
  """The absolute path of a directory; a UserError for an address such as gs://bucket."""
  if _ADDRESS.match(os.fspath(path)):
    raise UserError(f"workdir is {str(path)!r}; allowed: a folder, such as a mounted bucket")
  return user_path(path).absolute()


def existing(path: str | os.PathLike) -> pathlib.Path:
  """The absolute path of the directory of a run; a UserError if there is none."""
  workdir = absolute(path)
  if not os.path.isdir(workdir):  # Path's raises where it may not look
    raise UserError(f"workdir {workdir} does not exist, or is below a folder that cannot be read")
  return workdir


@contextlib.contextmanager
def writing(workdir: pathlib.Path) -> Iterator[None]:
  """Turns the error of a file of a run that cannot be written into a UserError that names it."""
  try:
    yield
  except OSError as e:
    path = str(e.filename or workdir)
    if e.errno in _NO_ROOM or (e.errno in _NO_PERMISSION and path.startswith(str(workdir))):
      raise unwritten(path, e.strerror) from e
    raise


def unwritten(path: Any, reason: str) -> Unwritten:
  """The error of a write that failed."""
  rest = "mend it, and the same command goes on"
  return Unwritten(f"{path} cannot be written: {reason}. All that was saved before is kept: {rest}")


def read_config(workdir: pathlib.Path, copies: bool = True) -> dict[str, Any]:
  """The config of a run, as JSON has it; a UserError if none can be read.

  With `copies` the fields that name files name the copies that the run has kept of them.
  """
  path = workdir / CONFIG
  if not path.exists():
    raise UserError(f"{workdir} holds no run (no {CONFIG} in it){_weights_in(workdir)}")
  config = read_json(path)
  if not isinstance(config, dict) or "task" not in config:
    raise UserError(f"{path} is not the config of a run{_weights_in(workdir)}")
  flat = traverse_util.flatten_dict(config, keep_empty_nodes=True, sep=".")
  kept = {field: str(copy) for field, copy in kept_files(workdir).items() if field in flat}
  return traverse_util.unflatten_dict(flat | kept, sep=".") if copies else config


def _weights_in(workdir: pathlib.Path) -> str:
  """A hint for a message: the public weights in a folder that is no run; "" if there are none."""
  found = min((p for p in workdir.glob("*") if p.suffix in _WEIGHTS), default=None)
  return f"; for the weights in it take {str(found)!r}" if found else ""


def kept_files(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
  """The copies of files that a run has kept, by the fields that name the originals."""
  files = sorted((workdir / FILES).glob("*/[!.]*"), reverse=True)
  return {path.parent.name: path for path in files}


def differences(old: dict[str, Any], new: dict[str, Any], free: frozenset[str]) -> list[str]:
  """The differing fields of two configs, a phrase each; `free` fields may differ."""
  old, new = (traverse_util.flatten_dict(c, sep=".") for c in (old, new))
  differing = [k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and k not in free]
  return [f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in sorted(differing)]


def read_json(path: pathlib.Path) -> Any:
  """The value in a JSON file; a UserError if it cannot be read."""
  with as_user_error(f"{path} cannot be read", OSError, ValueError):
    return json.loads(path.read_text())


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file, which is there whole or as it was before."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    temporary.write_text(json.dumps(value, indent=1, default=as_json) + "\n")
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)


def as_json(value: Any) -> Any:
  """An array, or a number of NumPy, as JSON has it, for `json.dumps`; a TypeError of all else."""
  if isinstance(value, np.generic | np.ndarray | jax.Array):
    return np.asarray(value).tolist()
  raise TypeError(f"{value!r} cannot be written as JSON")
