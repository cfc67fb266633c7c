"""SHA-256 sums of a checkpoint's files: a damaged one is not used."""

import hashlib
import json
import pathlib

FILE = "sha256.json"
# Orbax adds the time to it when it names the directory: it has to be JSON, no more.
_CHANGING = "_CHECKPOINT_METADATA"
_UNREADABLE = (OSError, ValueError, AttributeError, RecursionError)


def write(directory: pathlib.Path) -> None:
  """Notes the sums of all files below a directory in a file of its own there."""
  files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != _CHANGING)
  sums = {p.relative_to(directory).as_posix(): _sha256(p) for p in files}
  (directory / FILE).write_text(json.dumps(sums, indent=1) + "\n")


def damage(directory: pathlib.Path, parts: tuple[str, ...] = ("",)) -> str | None:
  """The fault of the files, in a few words; None if there is none.

  Args:
    directory: one to which `write` was applied.
    parts: beginnings of the paths that are looked at, to read no more than is needed.
  """
  name = FILE
  try:
    sums = json.loads((directory / FILE).read_text()).items()
    name = _CHANGING
    json.loads((directory / name).read_text())
  except _UNREADABLE as e:
    absent = name == FILE and isinstance(e, FileNotFoundError)
    return f"{name} is missing" if absent else f"{name} cannot be read: {e}"
  for name, expected in sums:
    if not name.startswith(parts):
      continue
    try:
      if _sha256(directory / name) != expected:
        return f"{name} is not as it was written"
    except FileNotFoundError:
      return f"{name} is missing"
    except OSError as e:
      return f"{name} cannot be read: {e.strerror}"
  return None


def is_complete(directory: pathlib.Path) -> bool:
  """Whether all files that `write` noted are there, whatever is in them."""
  try:
    names = json.loads((directory / FILE).read_text()).keys()
    return all((directory / name).is_file() for name in names)
  except _UNREADABLE:
    return False


def _sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
