"""Compiled programs kept on disk, so that a second start is quick."""

import sys

import jax

from mixer_jax.errors import UserError
from mixer_jax.paths import cache_path, user_path


def keep_in(directory: str | None) -> None:
  """Looks for compiled programs in a directory, and keeps there each that took a second or more.

  "" is nowhere. None is the one that JAX_COMPILATION_CACHE_DIR names, else, on an accelerator,
  `compiled` in the cache of the user, if it can be made. On a CPU it has to be asked for: XLA
  prints a page for every program found, of no use to other CPUs. A UserError if the directory
  cannot be made.
  """
  path = user_path(directory).absolute() if directory else None
  if directory is None:
    if jax.config.jax_compilation_cache_dir is not None or jax.default_backend() == "cpu":
      return
    path = cache_path() / "compiled"
  try:
    if path:
      path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path) if path else None)
  except OSError as e:
    if directory:
      raise UserError(f"--compilation_cache={directory} cannot be made: {e.strerror}") from e
    print(f"compiled programs are not kept: {e}", file=sys.stderr)
