"""How the commands start and how they fail: one line, no traceback."""

import os
import sys

# Of a command that was started without a standard stream, as by >&-, the next file that is opened
# would be that stream.
while (_descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
  pass
os.close(_descriptor)
sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))

# OpenBLAS threads wait for each other in a spin: next to another process an
# eigendecomposition took 200 times as long with two threads as with one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# ruff: noqa: E402
import errno
import functools
import logging as std_logging
import re
import select
import signal
import traceback
from typing import Callable, Mapping, NoReturn

from absl import app, flags, logging
import jax
from ml_collections import ConfigDict

from mixer_jax.errors import Unwritten, UserError, as_user_error, reason
from mixer_jax.paths import shipped
from mixer_jax.runtime import devices, overrides

# Flags that several commands have.
_SHARED = {
  "workdir": "Directory of the run.",
  "checkpoint": '"latest", "best", a step, or "mean:N", the mean parameters of the N latest.',
  "data_dir": "Where the data are now; default: as trained.",
  "set": "FIELD=VALUE of the config, for a field on which training does not depend.",
  "compilation_cache": "Directory of compiled programs, '' for none; see docs/devices.md.",
}
_LESS = (
  "less of it takes a smaller batch_size or eval_batch_size, more accum_steps, or model.remat=True"
)
_FIELD = re.compile(r"--config\.([\w.]+)=(.*)", re.DOTALL)
flags.disclaim_key_flags()  # they are the command's own in --help


def define(*names: str) -> None:
  """Defines flags that several commands have."""
  for name in names:
    if name == "set":
      flags.DEFINE_multi_string(name, [], _SHARED[name])
      continue
    flags.DEFINE_string(name, "latest" if name == "checkpoint" else None, _SHARED[name])


def without_devices() -> None:
  """Leaves accelerators alone: for commands that compute nothing, before JAX looks for devices."""
  jax.config.update("jax_platforms", "cpu")


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
    except OSError as e:
      if e.errno != errno.ENOSPC or e.filename:
        raise
      _silence()
      _fail(f"the standard output cannot be written: {e.strerror}", Unwritten.exit_code)
    except KeyboardInterrupt:
      print("\ninterrupted")
      sys.exit(130)
    except jax.errors.JaxRuntimeError as e:
      if "RESOURCE_EXHAUSTED" not in str(e):
        raise
      _fail(f"memory is too small: {reason(e)}; {_LESS}")
    except (RuntimeError, AssertionError) as e:
      _fail_without_devices(e)
      raise

  sys.argv[1:] = map(shipped, sys.argv[1:])  # ml_collections reads them there
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
  """The arguments that are no flags; a mistake in a flag becomes one line."""
  fields = [_FIELD.fullmatch(arg) for arg in argv]
  given = dict(field.groups() for field in fields if field)  # the last value of a field holds
  cleared = [f"{name}=None" for name, value in given.items() if value == "None"]
  try:
    # ml_collections takes no None for a number.
    is_none = [bool(field and field[2] == "None") for field in fields]
    arguments = flags.FLAGS([arg for arg, none in zip(argv, is_none) if not none])
    if cleared:
      overrides.override(checked_config(flags.FLAGS.config), cleared)
  except (UserError, flags.Error) as e:
    if "Traceback" in str(e):  # of a config file, which is a program
      raise
    _fail(e)
  except (AttributeError, KeyError) as e:
    if "ml_collections" not in traceback.extract_tb(e.__traceback__)[-1].filename:
      raise
    field = e.args[0].args[0] if isinstance(e.args[0], KeyError) else e.args[0]
    _fail(f"--config has no such field: {field}")
  devices.listen()
  if not flags.FLAGS["verbosity"].present:  # Orbax logs pages of checkpoints and of errors
    logging.set_verbosity(logging.FATAL)
    sys.unraisablehook = functools.partial(_without_event_loops, sys.unraisablehook)
  own = std_logging.getLogger("mixer_jax")  # to stderr, whatever libraries are allowed to say
  own.setLevel(std_logging.INFO)
  own.propagate = False
  own.addHandler(std_logging.StreamHandler())
  if "config" in flags.FLAGS and isinstance(flags.FLAGS.config, ConfigDict):
    overrides.warn_of_epochs(flags.FLAGS.config, given)
  return arguments


def checked_config(config: ConfigDict | None) -> ConfigDict:
  """The config of a flag; a UserError if the flag is missing, or its file cannot be read."""
  if config is None:
    raise UserError("--config is missing, or its get_config returns nothing")
  with as_user_error("--config cannot be used", OSError, AttributeError):
    _ = config.task  # a file that cannot be read raises at the first access
  return config


def _end_if_unread() -> None:
  """Ends quietly, as the shell's own commands do, if nothing reads stdout any more, as in `| head`."""
  pipe = select.poll()
  pipe.register(sys.stdout, 0)
  if any(event & select.POLLERR for _, event in pipe.poll(0)):
    _silence()
    sys.exit(128 + signal.SIGPIPE)


def _silence() -> None:
  """Ends the output: Python flushes it once more at its end."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail_without_devices(error: Exception) -> None:
  """Fails if it is JAX's search for devices that raised: an assertion, or an error with a reason."""
  if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("xla_bridge.py"):
    why = reason(error) if isinstance(error, RuntimeError) else "JAX finds no such device"
    _fail(f"JAX_PLATFORMS is {jax.config.jax_platforms!r}: {why}")


def _without_event_loops(hook, unraisable) -> None:
  if str(unraisable.exc_value) != "Event loop is closed":  # TensorStore's, after an error
    hook(unraisable)


def _fail(error: object, exit_code: int = UserError.exit_code) -> NoReturn:
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
  sys.exit(exit_code)
