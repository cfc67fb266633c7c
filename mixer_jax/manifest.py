"""SHA-256 sums of a checkpoint's files: what is damaged is not used."""

import hashlib
import json
import pathlib

FILE = "sha256.json"
# Orbax adds the time to it when it names the directory: it has to be JSON, no more.
_CHANGING = "_CHECKPOINT_METADATA"


def write(directory: pathlib.Path) -> None:
  """Notes the sums of all files below a directory in a file of its own there."""
  files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != _CHANGING)
  sums = {p.relative_to(directory).as_posix(): _sha256(p) for p in files}
  (directory / FILE).write_text(json.dumps(sums, indent=1) + "\n")


def damage(directory: pathlib.Path, parts: tuple[str, ...] = ("",)) -> str | None:
  """What is wrong with the files, in a few words; None if nothing is.

  Args:
    directory: one to which `write` was applied.
    parts: what the paths looked at start with, to read no more than is needed.
  """
  path = directory / FILE
  try:
    sums = {str(name): expected for name, expected in json.loads(path.read_text()).items()}
  except FileNotFoundError:
    return f"{FILE} is missing"
  except (OSError, ValueError, AttributeError, RecursionError) as e:
    return f"{FILE} cannot be read: {e}"
  try:
    json.loads((directory / _CHANGING).read_text())
  except (OSError, ValueError, RecursionError) as e:
    return f"{_CHANGING} cannot be read: {e}"
  for name, expected in sums.items():
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


def _sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
