"""How the commands start and how they fail: one line, no traceback."""

import sys
from typing import Callable

from absl import app, flags, logging

from mixer_jax.errors import UserError


def run(main: Callable[[list[str]], None]) -> None:
  """Parses flags and calls `main`; a `UserError` becomes a line and exit code 2."""
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
      _fail(e)
    except KeyboardInterrupt:
      print("\ninterrupted; the same --config and --workdir resume from the last checkpoint")
      sys.exit(130)

  return call


def _parse_flags(argv: list[str]) -> list[str]:
  """Flags, with whatever a config or an override raises told in one line."""
  try:
    arguments = flags.FLAGS(argv)
    if not flags.FLAGS["verbosity"].present:  # libraries log a page per checkpoint
      logging.set_verbosity(logging.WARNING)
    return arguments
  except flags.Error as e:
    _fail(e)
  except (UserError, AttributeError, KeyError, TypeError, ValueError, OSError, ImportError) as e:
    _fail(e.args[0] if isinstance(e, KeyError) and e.args else e)


def _fail(error: object) -> None:
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
  sys.exit(2)
