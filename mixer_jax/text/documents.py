"""Documents, as strings, of a file, of a folder that may be larger than memory, or of TFDS."""

import functools
import logging
import os
import pathlib
from typing import Any, Iterator, Protocol, Sequence

from mixer_jax.data import cache, tfds_source
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path
from mixer_jax.runtime.imports import without
from mixer_jax.text import tables

_LOG = logging.getLogger(__name__)


class Documents(Protocol):
  """Texts that are read anew, one after the other, each time they are iterated over."""

  source: str  # for messages

  def __iter__(self) -> Iterator[str]: ...

  def fingerprint(self) -> str:
    """A hash that changes with the files."""


def documents(
  path: str,
  field: str = "text",
  paragraphs: bool = False,
  split: str = "",
  data_dir: str = "",
  others: Sequence[str] = (),
) -> Documents:
  """Finds documents; a UserError if they are not there.

  Args:
    path: a file, a folder whose files are read in the order of their names, or a name of TFDS.
      Files end as `tables.ENDINGS`; other files in a folder are left out.
    field: the column of a table, or the feature of a TFDS set, that has the text.
    paragraphs: blank lines separate the documents of a .txt; else each line is one.
    split: of the TFDS set that `path` names; "" if it is a file or a folder.
    data_dir: of prepared TFDS sets; "" for TFDS's default.
    others: further values that the caller allows, for messages.
  """
  if split:
    return _Tfds(path, split, field, data_dir, others)
  return _Files(path, field, paragraphs)


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
    files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return cache.fingerprint(("text", self._field, self._paragraphs), files)

  def _read(self, path: pathlib.Path) -> Iterator[str]:
    if tables.kind(path) != ".txt":
      for line, record in tables.records(path, may_be_empty=True):
        text = tables.text(path, line, record, self._field)
        if text.strip():
          yield text
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


class _Tfds:
  def __init__(self, name: str, split: str, field: str, data_dir: str, others: Sequence[str]):
    check = functools.partial(check_text, name, (field,))
    place, _ = tfds_source.find(name, data_dir, check, others)
    self.source, self._field = f"{name}, {split!r}", field
    self._examples = tfds_source.Examples(name, place, split)

  def __iter__(self) -> Iterator[str]:
    for i in range(len(self._examples)):
      text = decoded(self._examples, i, self._field, self._examples.read(i)[self._field])
      if text.strip():
        yield text

  def fingerprint(self) -> str:
    return cache.fingerprint(("text", self._field), [(self._examples.fingerprint(), 0, 0)])


def check_text(name: str, fields: Sequence[str], features: Any) -> dict[str, Any]:
  """The features of a TFDS set by name; a UserError if one of some fields is missing or no text."""
  with without("tensorflow"):
    import tensorflow_datasets as tfds

  features = dict(features) if isinstance(features, tfds.features.FeaturesDict) else {}
  for field in fields:
    if not isinstance(features.get(field), tfds.features.Text):
      found = ", ".join(f"{k}: {type(v).__name__}" for k, v in features.items()) or "none"
      raise UserError(f"{name}: needs the feature {field}: Text, but has {found}")
  return features


def decoded(examples: tfds_source.Examples, i: int, field: str, text: Any) -> str:
  """A text of example i, bytes as a rule; a UserError if it is not UTF-8."""
  try:
    return text.decode() if isinstance(text, bytes) else str(text)
  except UnicodeDecodeError as error:
    raise UserError(f"{examples.where(i)}: feature {field!r} is not UTF-8") from error


def files(path: str) -> list[pathlib.Path]:
  """A file of text, or those of a folder; a UserError if there is none, or of another ending."""
  root = user_path(path).absolute()
  if not path or not root.exists():
    raise UserError(f"{path!r}: no such file or folder of text")
  paths = _listed(root) if root.is_dir() else [root]
  for each in paths:
    tables.kind(each)
  return paths


def _listed(root: pathlib.Path) -> list[pathlib.Path]:
  """The text files of a folder and of its folders, without hidden ones, in order."""
  found = (path for path in _inside(root) if path.name.lower().endswith(tables.ENDINGS))
  with as_user_error(f"{root}: cannot be read", OSError):
    inside = [(path.relative_to(root).parts, path) for path in found if path.is_file()]
  shown = sorted(each for each in inside if not any(part.startswith(".") for part in each[0]))
  if not shown:
    kinds = ", ".join(tables.KINDS)
    raise UserError(f"{root}: no text files in this folder; they end in {kinds}, .gz or .xz")
  return [path for _, path in shown]


def _inside(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """The files of a folder and of its folders but for hidden ones, links followed.

  A folder that several links lead to is read once, by the first of them in order.
  """
  seen = set()
  for folder, folders, names in os.walk(root, followlinks=True):
    if (real := os.path.realpath(folder)) in seen:
      folders.clear()  # a circle would not end
      continue
    seen.add(real)
    folders[:] = sorted(name for name in folders if not name.startswith("."))
    yield from (pathlib.Path(folder, name) for name in names)
