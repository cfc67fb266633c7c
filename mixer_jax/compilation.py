"""Compiled programs kept on disk, so that a second start is quick.

JAX looks a program up by its operations, the compiler, its options and the device;
a program that differs in anything is compiled afresh.
"""

import os
import pathlib
import sys

import jax

from mixer_jax.errors import UserError


def keep_in(directory: str | None) -> None:
  """Looks for compiled programs in a directory, and keeps there what takes a second or more.

  Args:
    directory: "": nowhere. None: the one that JAX_COMPILATION_CACHE_DIR names, else
      `$XDG_CACHE_HOME/mixer_jax/compiled` on an accelerator, where it can be made. On a
      CPU it has to be asked for: XLA prints a page about the machine's features for every
      program found, and they are no use to a CPU of another kind.

  Raises:
    UserError: the directory cannot be made.
  """
  if directory == "":
    jax.config.update("jax_compilation_cache_dir", None)
  elif directory is not None:
    try:
      jax.config.update("jax_compilation_cache_dir", _made(directory))
    except OSError as e:
      raise UserError(f"--compilation_cache={directory} cannot be made: {e.strerror}") from e
  elif jax.config.jax_compilation_cache_dir is None and jax.default_backend() != "cpu":
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
      jax.config.update("jax_compilation_cache_dir", _made(f"{home}/mixer_jax/compiled"))
    except OSError as e:
      print(f"compiled programs are not kept: {e}", file=sys.stderr)


def _made(directory: str) -> str:
  path = pathlib.Path(directory).expanduser().absolute()
  path.mkdir(parents=True, exist_ok=True)
  return str(path)
