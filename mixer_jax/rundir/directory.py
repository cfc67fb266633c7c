"""The directory of a run: made, proved writable, and told from the directory of another run."""

import contextlib
import datetime
import errno
import filecmp
import json
import os
import pathlib
import re
import shutil
from typing import Any, Iterator, Mapping

from flax import traverse_util
import jax
import ml_collections
import numpy as np

from mixer_jax import config as config_lib
from mixer_jax.errors import Unwritten, UserError, as_user_error, reason
from mixer_jax.paths import user_path

CONFIG, STUDY = "config.json", "study.json"  # of a run, of a study
_FILES = "files"  # copies of files that fields of the config name
_COMPLETED = "completed.json"  # the fields that the task has filled in at the first start
# Of a start that ended before its config was written, and of whoever started it.
_NOT_FOREIGN = ("lock", "checkpoints", "lost+found")
_LOGS = (".log", ".out", ".err", ".txt")
# Orbax looks for a checkpoint's files by a glob pattern that holds the directory's path: with one of
# these characters it finds none, and what it saves cannot be read.
_UNREADABLE = "[\\"
# Such as gs://bucket, which pathlib takes for a folder "gs:".
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")
# Errors that only a write can meet; missing permission is one, too, for the run's files.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_NO_PERMISSION = (errno.EACCES, errno.EPERM)


def create(path: str | None, own: str = CONFIG) -> pathlib.Path:
  """Makes a run's directory, None: a fresh one under `runs/`; a UserError if it cannot be used.

  `own` is the file by which the directory is known, that of a run or of a study.
  """
  if not path:
    if jax.process_count() > 1:
      raise UserError("--workdir is missing; several processes need one that all of them see")
    path = f"runs/{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
  workdir = _absolute(path)
  if special := [c for c in str(workdir) if c in _UNREADABLE]:
    raise UserError(
      f"workdir {workdir} has {special[0]!r}, with which its checkpoints could not be read again;"
      f" allowed: a path without {' and '.join(_UNREADABLE)}"
    )
  probe = workdir / f".writable-{os.getpid()}"
  with as_user_error(f"workdir {workdir} cannot be written", OSError):
    if workdir.is_file():
      raise UserError(f"workdir {workdir} is a file; it has to be a directory, or not to exist")
    if foreign := _foreign(workdir, own):
      why = f"holds {foreign!r} and no {'run' if own == CONFIG else 'study'}"
      raise UserError(f"workdir {workdir} {why}; take an empty or a new directory")
    workdir.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()
  return workdir


def _foreign(workdir: pathlib.Path, own: str) -> str | None:
  """The name of a file of somebody else, in a directory without its `own` file; or None."""
  if not workdir.is_dir() or (workdir / own).exists():
    return None
  if other := [name for name in (CONFIG, STUDY) if (workdir / name).exists()]:
    return other[0]
  known = lambda p: p.name in _NOT_FOREIGN or p.name.startswith(".") or p.suffix in _LOGS
  return min((p.name for p in workdir.iterdir() if not known(p)), default=None)


def _absolute(path: str) -> pathlib.Path:
  if _ADDRESS.match(os.fspath(path)):
    raise UserError(f"workdir is {str(path)!r}; allowed: a folder, such as a mounted bucket")
  return user_path(path).absolute()


@contextlib.contextmanager
def writing(workdir: pathlib.Path) -> Iterator[None]:
  """Within it a file of a run that cannot be written is a UserError that names it."""
  try:
    yield
  except OSError as e:
    path = str(e.filename or workdir)
    if e.errno in _NO_ROOM or e.errno in _NO_PERMISSION and path.startswith(str(workdir)):
      raise unwritten(path, e.strerror) from e
    raise


def unwritten(path: Any, reason: str) -> Unwritten:
  """The error of a write that failed."""
  rest = "mend it, and the same command goes on"
  return Unwritten(f"{path} cannot be written: {reason}. All that was saved before is kept: {rest}")


def existing(path: str) -> pathlib.Path:
  """The absolute path of a run's directory; a UserError if there is none."""
  workdir = _absolute(path)
  if not os.path.isdir(workdir):  # Path's raises where it may not look
    raise UserError(f"workdir {workdir} does not exist, or is below a folder that cannot be read")
  return workdir


def check_config(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
  """A UserError that names the fields in which a config differs from that of the run to resume."""
  if not (path := workdir / CONFIG).exists():
    return
  old, new = config_lib.restored(read_json(path)), config
  old, new = (json.loads(c.to_json()) for c in (old, new))
  if differing := differences(old, new, config_lib.free_fields(config)):
    raise UserError(
      f"workdir {workdir} holds a run of another config: {'; '.join(differing)}."
      " Take another --workdir, or the same config to resume"
    )


def store_config(workdir: pathlib.Path, config: ml_collections.ConfigDict, started: bool) -> None:
  """Keeps the config as the last start has it: metrics of checkpoints repeat its own.

  Once a run has `started`, fields that name its copies of files keep the names of the originals.
  """
  path, new = workdir / CONFIG, json.loads(config.to_json())
  if started and path.exists():
    old, new = (
      traverse_util.flatten_dict(c, keep_empty_nodes=True, sep=".") for c in (read_json(path), new)
    )
    copied = kept_files(workdir).keys()
    new = traverse_util.unflatten_dict(new | {k: old[k] for k in copied & old.keys()}, sep=".")
  write_json(path, new)


def open_fields(config: ml_collections.ConfigDict) -> set[str]:
  """The fields of a config that are None."""
  flat = traverse_util.flatten_dict(config.to_dict(), sep=".")
  return {name for name, value in flat.items() if value is None}


def store_completed(workdir: pathlib.Path, fields: set[str]) -> None:
  """Keeps the names of the fields that the task has filled in, which `resumed` takes over."""
  write_json(workdir / _COMPLETED, sorted(fields))


def resumed(
  workdir: pathlib.Path, config: ml_collections.ConfigDict, stored: ml_collections.ConfigDict
) -> ml_collections.ConfigDict:
  """The config with the fields that it leaves open and the task had filled in at the first start.

  Of a run of an older version, which has not kept their names, these are all that are open now.
  """
  path = workdir / _COMPLETED
  return _taken_over(config, stored, read_json(path) if path.exists() else None)


def _taken_over(config, stored, fields, group=""):
  config = config.copy_and_resolve_references()
  is_group = lambda value: isinstance(value, ml_collections.ConfigDict)
  for name, value in stored.items():
    if is_group(value) and is_group(own := config.get(name)):
      if name != "optimizer" and own.get("name") == value.get("name"):
        config[name] = _taken_over(own, value, fields, f"{group}{name}.")
    elif name in config and config[name] is None and (fields is None or group + name in fields):
      config[name] = value
  return config


def differences(old: dict[str, Any], new: dict[str, Any], free: frozenset[str]) -> list[str]:
  """The differing fields of two configs, a phrase each; `free` fields may differ."""
  old, new = (traverse_util.flatten_dict(c, sep=".") for c in (old, new))
  differing = [k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and k not in free]
  return [f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in sorted(differing)]


def stored_config(path: str | None) -> ml_collections.ConfigDict | None:
  """The config of the run to be resumed in a directory; None if there is none yet."""
  workdir = _absolute(path or "")
  # A directory that is still written, STEP.orbax-checkpoint-tmp, is no checkpoint.
  begun = path and any(place.name.isdigit() for place in workdir.glob("checkpoints/*"))
  if begun and not (workdir / CONFIG).exists():
    raise UserError(
      f"workdir {workdir} has checkpoints and no {CONFIG}; take an empty or a new directory"
    )
  return load_config(workdir) if begun else None


def load_config(workdir: pathlib.Path) -> ml_collections.ConfigDict:
  """The config of a run, as it was started last; a UserError if none can be read."""
  path = workdir / CONFIG
  if not path.exists():
    raise UserError(f"{workdir} holds no run (no {CONFIG} in it)")
  try:
    return with_files(workdir, config_lib.restored(read_json(path)))
  except (UserError, KeyError) as e:
    raise UserError(f"{path} is not the config of a run: {reason(e)}") from e


def with_files(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> ml_collections.ConfigDict:
  """The config whose fields name the run's own copies of files, if it has kept any.

  A config of another task may lack such a field; `check_config` tells what differs.
  """
  known = traverse_util.flatten_dict(config.to_dict(), sep=".")
  copies = {field: str(copy) for field, copy in kept_files(workdir).items() if field in known}
  config.update_from_flattened_dict(copies)
  return config


def kept_files(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
  """The run's own copies of files, by the fields that name the originals."""
  files = sorted((workdir / _FILES).glob("*/[!.]*"), reverse=True)
  return {path.parent.name: path for path in files}


def check_files(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
  """A UserError for a file that a field names, that is there and unlike the run's copy."""
  given = traverse_util.flatten_dict(config.to_dict(), sep=".")
  for field, copy in kept_files(workdir).items():
    source = user_path(given.get(field) or str(copy))
    with as_user_error(f"{field} is {given.get(field)!r}, which cannot be read", OSError):
      if source.is_file() and not filecmp.cmp(source, copy, shallow=False):
        raise UserError(f"{field} is {given[field]!r}; allowed: a file like the run's copy, {copy}")


def keep_files(workdir: pathlib.Path, files: Mapping[str, str]) -> None:
  """Copies files, by the fields of the config that name them; see `with_files`."""
  for field, path in files.items():
    source = user_path(path)
    copy = workdir / _FILES / field / source.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    for other in set(copy.parent.iterdir()) - {copy}:  # of a start that ended before its first step
      other.unlink()
    with as_user_error(f"{field} is {path!r}, which cannot be copied", OSError):
      if not copy.exists() or not copy.samefile(source):
        shutil.copyfile(source, copy)


def read_json(path: pathlib.Path) -> Any:
  """The value in a JSON file; a UserError if it cannot be read."""
  with as_user_error(f"{path} cannot be read", OSError, ValueError, RecursionError):
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
