"""The exceptions that reach a user as a line instead of a traceback."""

import contextlib
from typing import Any, Iterable, Iterator

__all__ = ("Diverged", "Unwritten", "UserError")
_LONGEST = 300  # characters of another library's message


class UserError(Exception):
  """Something the user can mend: a config field, a file, an environment.

  The message is one line that names the thing, its value and what is allowed. The commands print it
  and exit with `exit_code`, 2.
  """

  exit_code = 2


class Unwritten(UserError):
  """A file could not be written, as on a full disk; nothing saved before is lost. Exit code 75."""

  exit_code = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on later


class Diverged(UserError):
  """Training gave numbers that are not finite, or its task refuses to go on. Exit code 3."""

  exit_code = 3


def reason(error: Exception) -> str:
  """Returns what a library says is wrong, in one line that is not too long."""
  text = " ".join(str(error).split()) or type(error).__name__
  text = "".join(c if c.isprintable() else "?" for c in text)
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def check_list(inputs: Any, kind: str) -> None:
  """Raises a UserError for a text in the place of a list of inputs, whose letters would be inputs."""
  if isinstance(inputs, str | bytes):
    raise UserError(f"the inputs are the text {inputs!r}; allowed: a list of {kind}")


def until_error(results: Iterable[Any]) -> tuple[list[Any], UserError | None]:
  """Returns the results before the first one that raises a UserError, and that error."""
  found = []
  try:
    found.extend(results)
  except UserError as error:
    return found, error
  return found, None


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Is an `object_pairs_hook` of JSON that raises a ValueError for a key that stands twice."""
  found = {}
  for name, value in pairs:
    if name in found:
      raise ValueError(f"the key {name[:_LONGEST]!r} stands twice in an object")
    found[name] = value
  return found


@contextlib.contextmanager
def as_user_error(what: str, *kinds: type[Exception]) -> Iterator[None]:
  """Re-raises the given exception types (all, if none are given) as UserError, prefixed with `what`.

  A UserError stays as it is. If OSError alone is given, the message has the system's words.
  """
  only_system, kinds = kinds == (OSError,), kinds or (Exception,)
  try:
    yield
  except UserError:
    raise
  except kinds as e:
    raise UserError(f"{what}: {(only_system and e.strerror) or reason(e)}") from e
