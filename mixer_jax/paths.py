"""Paths as users write them, and what was read from them."""

import functools
import hashlib
import os
import pathlib
import re
from typing import Any, Callable

import platformdirs

# A flag or nothing, the file, the argument of a config file.
_CONFIG = re.compile(r"((?:--?\w+=)?)(configs/[\w/]+\.py)((?::.*)?)", re.DOTALL)


def user_path(path: str | os.PathLike) -> pathlib.Path:
  """A path whose leading ~ is the home of a user: a shell leaves the one of --workdir=~/run alone.

  `os.path` looks it up: of "~name" without such a user `Path.expanduser` makes a RuntimeError.
  """
  return pathlib.Path(os.path.expanduser(path))


def cache_path() -> pathlib.Path:
  """The user's cache of this package: on Linux `$XDG_CACHE_HOME/mixer_jax`, else `~/.cache/mixer_jax`."""
  return platformdirs.user_cache_path("mixer_jax")


def shipped(argument: str) -> str:
  """A command's argument with the package's own configs/NAME.py where that file is not here.

  `--config=configs/quickstart.py:kfac` so works in any folder, and in a clone means the clone's file.
  """
  if not (found := _CONFIG.fullmatch(argument)) or os.path.exists(found[2]):
    return argument
  own = pathlib.Path(__file__).parent / found[2]
  return f"{found[1]}{own}{found[3]}" if own.is_file() else argument


def sha256(path: str | os.PathLike) -> str:
  """The SHA-256 of a file in hexadecimal digits."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def remembered(read: Callable[..., Any], number: int = 1) -> Callable[..., Any]:
  """A function of arguments, the last of them a path, that keeps its latest results.

  It reads again once the file has another size or time. `forget` empties it.
  """

  @functools.lru_cache(number)
  def kept(state, *args):
    return read(*args)

  @functools.wraps(read)
  def call(*args):
    return kept(_state(args[-1]), *args)

  call.forget = kept.cache_clear
  return call


def _state(path: str | os.PathLike) -> tuple[int, ...] | None:
  """Size, time and inode of a file; None of an address, a name or a missing file."""
  try:
    found = os.stat(user_path(path))
  except OSError:
    return None
  return found.st_size, found.st_mtime_ns, found.st_ino
