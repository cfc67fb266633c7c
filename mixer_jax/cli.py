"""How the commands start and how they fail: one line, no traceback."""

import os

# OpenBLAS threads wait for each other in a spin: next to another process an
# eigendecomposition took 200 times as long with two threads as with one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# ruff: noqa: E402
import logging as std_logging
import sys
from typing import Callable

from absl import app, flags, logging

from mixer_jax.errors import UserError


def run(main: Callable[[list[str]], None]) -> None:
  """Parses flags and calls `main`; a `UserError` becomes a line and its exit code."""
  app.run(_guarded(_only_flags(main)), flags_parser=_parse_flags)


def run_commands(commands: dict[str, Callable[[list[str]], None]]) -> None:
  """As `run`, with the command named by the first argument."""

  def main(argv):
    if len(argv) != 2 or argv[1] not in commands:
      raise UserError(f"the command is {argv[1:]}; allowed: {', '.join(commands)}")
    commands[argv[1]](argv)

  app.run(_guarded(main), flags_parser=_parse_flags)


def _only_flags(main):
  def call(argv):
    if len(argv) > 1:
      raise UserError(f"unknown argument {argv[1]!r}; options start with --")
    main(argv)

  return call


def _guarded(main):
  def call(argv):
    try:
      main(argv)
    except UserError as e:
      _fail(e, e.exit_code)
    except KeyboardInterrupt:
      print("\ninterrupted; the same --config and --workdir resume from the last checkpoint")
      sys.exit(130)

  return call


def _parse_flags(argv: list[str]) -> list[str]:
  """Flags, with whatever a config or an override raises told in one line."""
  try:
    arguments = flags.FLAGS(argv)
    if not flags.FLAGS["verbosity"].present:
      _quiet_libraries()
    _show_own_messages()
    return arguments
  except flags.Error as e:
    _fail(e)
  except Exception as e:  # a config file is a program: anything can go wrong in it
    # ml_collections puts a whole traceback into the message: its last line says it.
    text = str(e.args[0] if isinstance(e, KeyError) and e.args else e)
    _fail(text.strip().splitlines()[-1] if "Traceback" in text else text)


def checked_config(config):
  """The config of a flag, once it is known to exist.

  Raises:
    UserError: the flag is missing, or its file cannot be read.
  """
  if config is None:
    raise UserError("--config is missing; for example --config=configs/quickstart.py")
  try:
    config.seed  # noqa: B018 (a file that cannot be read raises at the first access)
  except (OSError, AttributeError) as e:
    raise UserError(f"--config cannot be used: {e}") from e
  return config


def _quiet_libraries() -> None:
  """Orbax logs a page per checkpoint, and several of what it then raises."""
  logging.set_verbosity(logging.FATAL)
  hook = sys.unraisablehook

  def heed(unraisable):
    if str(unraisable.exc_value) != "Event loop is closed":  # TensorStore's, after an error
      hook(unraisable)

  sys.unraisablehook = heed


def _show_own_messages() -> None:
  """Messages of this package go to stderr, whatever libraries are allowed to say."""
  own = std_logging.getLogger("mixer_jax")
  own.setLevel(std_logging.INFO)
  own.propagate = False
  own.addHandler(std_logging.StreamHandler())


def _fail(error: object, exit_code: int = UserError.exit_code) -> None:
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
  sys.exit(exit_code)
