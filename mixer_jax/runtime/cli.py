"""How the commands start and how they fail: one line, no traceback."""

import os

# OpenBLAS threads wait for each other in a spin: next to another process an
# eigendecomposition took 200 times as long with two threads as with one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# ruff: noqa: E402
import functools
import logging as std_logging
import pathlib
import re
import select
import signal
import sys
import sysconfig
import traceback
from typing import Callable, Mapping, Sequence

from absl import app, flags, logging
import jax
from ml_collections import ConfigDict

from mixer_jax.errors import UserError, reason
from mixer_jax.runtime import devices, overrides

# Flags that several commands have.
_SHARED = {
  "workdir": "Directory of the run.",
  "checkpoint": '"latest", "best", a step, or "mean:N", the mean parameters of the N latest.',
  "data_dir": "Where the data are now; default: as trained.",
  "set": "FIELD=VALUE of the config, for a field on which training does not depend.",
  "compilation_cache": "Directory of compiled programs, '' for none; see docs/compilation.md.",
}
_LESS = (
  "less of it takes a smaller batch_size or eval_batch_size, more accum_steps, or model.remat=True"
)
# As ml_collections words them.
_UNKNOWN = re.compile(r"""'(\w+)'(?:\s+Did you mean "(\w+)" .*)?$""", re.DOTALL)
_NO_FUNCTION = "module 'config_config' has no attribute 'get_config'"
_PACKAGE = str(pathlib.Path(__file__).parents[1])
_FIELD = re.compile(r"--config\.([\w.]+)(?:=(.*))?", re.DOTALL)
_MISSING = re.compile(r"\[Errno 2\] No such file or directory: '(.*)'")
flags.disclaim_key_flags()  # they are the command's own in --help


def define(*names: str) -> None:
  """Defines flags that several commands have."""
  for name in names:
    if name == "set":
      flags.DEFINE_multi_string(name, [], _SHARED[name])
      continue
    flags.DEFINE_string(name, "latest" if name == "checkpoint" else None, _SHARED[name])


def workdir() -> str:
  """The flag of this name; a UserError if it is missing."""
  if not flags.FLAGS.workdir:
    raise UserError("--workdir is missing; it names the directory of a run")
  return flags.FLAGS.workdir


def run(main: Callable[[list[str]], None], arguments: bool = False) -> None:
  """Parses flags and calls `main` with the arguments that are no flags, if there may be any.

  A `UserError` becomes a line and its exit code.
  """

  def guarded(argv):
    try:
      if len(argv) > 1 and not arguments:
        raise UserError(f"unknown argument {argv[1]!r}; options start with --")
      main(argv)
      sys.stdout.flush()
    except UserError as e:
      _fail(e, e.exit_code)
    except BrokenPipeError:
      _end_if_unread()
      raise
    except KeyboardInterrupt:
      print("\ninterrupted")
      sys.exit(130)
    except jax.errors.JaxRuntimeError as e:
      if "RESOURCE_EXHAUSTED" not in str(e):
        raise
      _fail(f"memory is too small: {reason(e)}; {_LESS}")

  app.run(guarded, flags_parser=_parse_flags)


def run_commands(
  commands: dict[str, Callable[[list[str]], None]], taken: Mapping[str, str] | None = None
) -> None:
  """As `run`, with the command named by the first argument.

  `taken` are the names of the flags that each command takes, with blanks; None: all take all.
  """

  def main(argv):
    if len(argv) != 2 or argv[1] not in commands:
      given = f"is '{' '.join(argv[1:])}'" if argv[1:] else "is missing"
      raise UserError(f"the command {given}; allowed: {', '.join(commands)}")
    takes = {name: names.split() for name, names in (taken or {}).items()}
    own = takes.get(argv[1], ())
    for name in {name for names in takes.values() for name in names}.difference(own):
      if flags.FLAGS[name].present:
        raise UserError(f"{argv[1]} takes no --{name}; it takes --{', --'.join(own)}")
    commands[argv[1]](argv)

  run(main, arguments=True)


def _parse_flags(argv: list[str]) -> list[str]:
  """Flags; any error of a config or an override becomes one line."""
  try:
    given = [_FIELD.fullmatch(arg) if "config" in flags.FLAGS else None for arg in argv]
    # ml_collections takes no None for a number. The last value of a field holds, None or another.
    cleared = [bool(field and field[2] == "None") for field in given]
    last = {field[1]: none for field, none in zip(given, cleared) if field}
    arguments = flags.FLAGS([arg for arg, none in zip(argv, cleared) if not none])
    for field in (name for name, none in last.items() if none and flags.FLAGS.config is not None):
      overrides.clear(flags.FLAGS.config, field)
    devices.listen()
    if not flags.FLAGS["verbosity"].present:  # Orbax logs pages of checkpoints and of errors
      logging.set_verbosity(logging.FATAL)
      sys.unraisablehook = functools.partial(_heed, sys.unraisablehook)
    own = std_logging.getLogger("mixer_jax")  # to stderr, whatever libraries are allowed to say
    own.setLevel(std_logging.INFO)
    own.propagate = False
    own.addHandler(std_logging.StreamHandler())
    if any(given) and isinstance(flags.FLAGS.config, ConfigDict):
      overrides.tell_epochs(flags.FLAGS.config, last)
    return arguments
  except Exception as e:  # a config file is a program: anything can go wrong in it
    _fail(_told(e, [field[1] for field in map(_FIELD.fullmatch, argv) if field]))


def _told(error: Exception, fields: Sequence[str] = ()) -> str:
  """The mistake in a config or an override of `fields`, without the wrapping of ml_collections."""
  while error.args and isinstance(error.args[0], Exception):
    error = error.args[0]
  text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
  if unknown := _UNKNOWN.match(text):
    near = f"; did you mean {unknown[2]}?" if unknown[2] else ""
    paths = [re.match(rf"(.*\.)?{unknown[1]}(?=\.|$)", field) for field in fields]
    path = next((path[0] for path in paths if path), unknown[1])
    return f"{path} is no field of the config{near}"
  if said := overrides.unfit(text):
    return said
  if missing := _MISSING.search(text):
    return f"--config cannot be used: no such file: {missing[1]}"
  if text == _NO_FUNCTION:
    return "--config cannot be used: its file has no function get_config"
  # Some messages hold a whole traceback: its last line says it.
  text = text.strip().splitlines()[-1] if "Traceback" in text else text
  chain = [error]
  while chain[-1].__context__:
    chain.append(chain[-1].__context__)
  for cause in reversed(chain):  # the first one in the user's code
    if place := _place(cause):
      return f"{place}: {type(cause).__name__}: {cause}"
  return text


def _place(error: BaseException) -> str:
  """File and line of the user's code in which a config's file failed; "": an error says it itself."""
  frames = traceback.extract_tb(error.__traceback__)
  loaders = [i for i, x in enumerate(frames) if x.filename.endswith("/config_flags.py")]
  if isinstance(error, UserError) or not loaders:
    return ""
  libraries = (_PACKAGE, "<", *map(sysconfig.get_path, ("stdlib", "purelib")))
  own = [x for x in frames[loaders[-1] :] if not x.filename.startswith(libraries)]
  return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def checked_config(config):
  """The config of a flag; a UserError if the flag is missing, or its file cannot be read."""
  if config is None and flags.FLAGS["config"].present:
    raise UserError("--config gives None: the get_config of its file returns no config")
  if config is None:
    raise UserError("--config is missing; for example --config=configs/quickstart.py")
  try:
    config.seed  # noqa: B018 (a file that cannot be read raises at the first access)
  except (OSError, AttributeError) as e:
    plain = isinstance(e, AttributeError) and not isinstance(config, ConfigDict)
    why = f"it is a {type(config).__name__}, not a ConfigDict" if plain else _told(e)
    raise UserError(why if why.startswith("--config") else f"--config cannot be used: {why}") from e
  return config


def _end_if_unread() -> None:
  """Ends without a word, as the shell's own commands do, if nothing reads stdout: `| head`."""
  pipe = select.poll()
  pipe.register(sys.stdout, 0)
  if any(event & select.POLLERR for _, event in pipe.poll(0)):
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
    sys.exit(128 + signal.SIGPIPE)


def _heed(hook, unraisable) -> None:
  if str(unraisable.exc_value) != "Event loop is closed":  # TensorStore's, after an error
    hook(unraisable)


def _fail(error: object, exit_code: int = UserError.exit_code) -> None:
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
  sys.exit(exit_code)
