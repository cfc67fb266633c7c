"""The config of a start: that of a fresh run, or of the run that the start goes on with."""

import filecmp
import json
import pathlib
import shutil
from typing import Any, Mapping

from flax import traverse_util
from ml_collections import ConfigDict

from mixer_jax import config as config_lib
from mixer_jax import tasks
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path
from mixer_jax.rundir import directory as directory_lib

# The names of the fields that the task has filled in at the first start.
_COMPLETED = "completed.json"


def begun(path: str | None) -> pathlib.Path | None:
  """The directory if it holds a run with a checkpoint, from which a start goes on; else None."""
  workdir = directory_lib.absolute(path) if path else None
  # A directory that is still written, STEP.orbax-checkpoint-tmp, is no checkpoint.
  if not workdir or not any(place.name.isdigit() for place in workdir.glob("checkpoints/*")):
    return None
  if not (workdir / directory_lib.CONFIG).exists():
    what = f"has checkpoints and no {directory_lib.CONFIG}"
    raise UserError(f"workdir {workdir} {what}; take an empty or a new directory")
  return workdir


def resolve(config: ConfigDict, workdir: pathlib.Path | None) -> ConfigDict:
  """The whole and checked config of a start.

  The task of a fresh run completes the config. A start that goes on with the run in `workdir` takes
  over what the task filled in then: the files that it was read from may be gone.

  Raises:
    UserError: a field that no run can have, or in which the run in `workdir` differs.
  """
  if workdir is None:
    config_lib.check(config)
    return tasks.find(config.task).complete(config.copy_and_resolve_references())
  config = taken_over(workdir, config)
  config_lib.check(config)
  _check_same(workdir, config)
  check_files(workdir, config)
  return config


def taken_over(workdir: pathlib.Path, config: ConfigDict) -> ConfigDict:
  """The config with the fields that it leaves open and the task filled in at the first start."""
  own, old = _flat(config.to_dict()), _flat(directory_lib.read_config(workdir, copies=False))
  path = workdir / _COMPLETED
  fields = directory_lib.read_json(path) if path.exists() else ()
  config = config.copy_and_resolve_references()
  found = {k: old[k] for k in fields if k in old and k in own and own[k] is None}
  config.update_from_flattened_dict(found)
  return config


def _check_same(workdir: pathlib.Path, config: ConfigDict) -> None:
  """Raises a UserError that names the fields in which a config differs from that of a run."""
  old = config_lib.from_json(directory_lib.read_config(workdir, copies=False))
  old, new = (json.loads(c.to_json()) for c in (old, config))
  if differing := directory_lib.differences(old, new, config_lib.free_fields(config)):
    raise UserError(
      f"workdir {workdir} holds a run of another config: {'; '.join(differing)}."
      " Take another --workdir, or the same config to resume"
    )


def check_files(workdir: pathlib.Path, config: ConfigDict) -> None:
  """Raises a UserError for a file that a field names and that is unlike the run's copy of it."""
  given = _flat(config.to_dict())
  for field, copy in directory_lib.kept_files(workdir).items():
    source = user_path(given.get(field) or copy)
    if source.is_file() and not filecmp.cmp(source, copy, shallow=False):
      raise UserError(f"{field} is {given[field]!r}; allowed: a file like the run's copy, {copy}")


def with_copies(config: ConfigDict, workdir: pathlib.Path) -> ConfigDict:
  """The config whose fields name the copies of files that a run has kept."""
  config = config.copy_and_resolve_references()
  kept = {field: str(copy) for field, copy in directory_lib.kept_files(workdir).items()}
  config.update_from_flattened_dict(kept)
  return config


def store(workdir: pathlib.Path, config: ConfigDict) -> None:
  """Writes the config as the last start has it."""
  directory_lib.write_json(workdir / directory_lib.CONFIG, json.loads(config.to_json()))


def store_first(workdir: pathlib.Path, given: ConfigDict, config: ConfigDict) -> None:
  """Writes what a fresh run keeps beside its config: copies of files, and which fields were open."""
  keep_files(workdir, tasks.find(config.task).files(config))
  was, now = _flat(given.to_dict()), _flat(config.to_dict())
  completed = sorted(k for k, x in was.items() if x is None and now.get(k) is not None)
  directory_lib.write_json(workdir / _COMPLETED, completed)


def keep_files(workdir: pathlib.Path, files: Mapping[str, str]) -> None:
  """Copies files, by the fields of the config that name them."""
  for field, path in files.items():
    source, folder = user_path(path), workdir / directory_lib.FILES / field
    shutil.rmtree(folder, ignore_errors=True)  # of a start that ended before its first checkpoint
    folder.mkdir(parents=True)
    with as_user_error(f"{field} is {path!r}, which cannot be copied", OSError):
      shutil.copyfile(source, folder / source.name)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
  return traverse_util.flatten_dict(config, sep=".")
