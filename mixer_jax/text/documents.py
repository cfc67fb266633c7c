"""Documents, as strings, of a file, of a folder that may be larger than memory, or of TFDS."""

import logging
import os
import pathlib
from typing import Iterator, Protocol

from mixer_jax.data import cache
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path
from mixer_jax.text import tables
from mixer_jax.text.records import TableRecords, TfdsRecords

_LOG = logging.getLogger(__name__)


class Documents(Protocol):
  """Texts that are read anew, one after the other, each time they are iterated over."""

  source: str  # for messages

  def __iter__(self) -> Iterator[str]: ...

  def fingerprint(self) -> str:
    """A hash that changes with the files."""


def documents(
  path: str, field: str = "text", paragraphs: bool = False, split: str = "", data_dir: str = ""
) -> Documents:
  """Finds documents; a UserError if they are not there.

  Args:
    path: a file, a folder whose files are read in the order of their names, or a name of TFDS.
      Files end as `tables.ENDINGS`; other files in a folder are left out.
    field: the column of a table, or the feature of a TFDS set, that has the text.
    paragraphs: blank lines separate the documents of a .txt; else each line is one.
    split: of the TFDS set that `path` names; "" if it is a file or a folder.
    data_dir: of prepared TFDS sets; "" for TFDS's default.
  """
  return _Tfds(path, split, [field], "", data_dir) if split else _Files(path, field, paragraphs)


class _Tfds(TfdsRecords):
  def __iter__(self) -> Iterator[str]:
    return (text for _, [text] in super().__iter__() if text.strip())


class _Files:
  def __init__(self, path: str, field: str, paragraphs: bool):
    self.source, self._field, self._paragraphs = path, field, paragraphs
    self._paths = files(path)

  def __iter__(self) -> Iterator[str]:
    empty = []
    for path in self._paths:
      found = False
      for text in self._read(path):
        found = True
        yield text
      if not found:
        empty.append(path)
    if len(empty) == len(self._paths):
      raise UserError(f"{empty[0]}: is empty; it needs at least one document")
    if empty:
      number = f"{len(empty):,} of {len(self._paths):,}"
      _LOG.warning("%s: %s files are empty, such as %s", self.source, number, empty[0])

  def fingerprint(self) -> str:
    with as_user_error(f"{self.source}: cannot be read", OSError):
      stats = [(str(path), path.stat()) for path in self._paths]
    found = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return cache.fingerprint(("text", self._field, self._paragraphs), found)

  def _read(self, path: pathlib.Path) -> Iterator[str]:
    if tables.kind(path) != ".txt":
      yield from (text for _, [text] in TableRecords(path, [self._field]) if text.strip())
      return
    together = []
    for _, line in tables.lines(path):
      if line := line.strip():
        together.append(line)
      if together and not (self._paragraphs and line):
        yield " ".join(together)
        together = []
    if together:
      yield " ".join(together)


def files(path: str) -> list[pathlib.Path]:
  """A file of text, or those of a folder; a UserError if there is none, or of another ending."""
  root = user_path(path).absolute()
  if not path or not root.exists():
    raise UserError(f"{path!r}: no such file or folder of text")
  if not root.is_dir():
    tables.kind(root)
    return [root]
  found = sorted(_inside(root), key=lambda file: file.relative_to(root).parts)
  if not found:
    kinds = ", ".join(tables.KINDS)
    raise UserError(f"{root}: no text files in this folder; they end in {kinds}, .gz or .xz")
  return found


def _inside(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """The text files of a folder and of its folders but for hidden ones, links followed.

  A folder that several links lead to is read once, by the first of them in order.
  """
  seen = set()
  for folder, folders, names in os.walk(root, followlinks=True):
    if (real := os.path.realpath(folder)) in seen:
      folders.clear()  # a circle would not end
      continue
    seen.add(real)
    folders[:] = sorted(name for name in folders if not name.startswith("."))
    for name in names:
      path = pathlib.Path(folder, name)
      if not name.startswith(".") and name.lower().endswith(tables.ENDINGS) and path.is_file():
        yield path
