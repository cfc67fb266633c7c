"""Paths as users write them."""

import os
import pathlib


def user_path(path: str | os.PathLike) -> pathlib.Path:
  """A path whose leading ~ is the home of a user: a shell leaves the one of --workdir=~/run alone.

  `os.path` looks it up: of "~name" without such a user `Path.expanduser` makes a RuntimeError.
  """
  return pathlib.Path(os.path.expanduser(path))
