"""Rows of texts with a label or without, of a table or of TFDS."""

import pathlib
from typing import Any, Iterator, NamedTuple, Protocol, Sequence

import numpy as np

from mixer_jax.data import cache, tfds_source
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path
from mixer_jax.text import tables


class Records(Protocol):
  """Rows that are read anew each time they are iterated over."""

  source: str  # for messages
  class_names: tuple[str, ...]  # of a TFDS ClassLabel, in its order; () of another label

  def __iter__(self) -> Iterator[tuple[str, list[str]]]:
    """The place of each row in words, and its columns; a UserError names a row that is broken."""


def records(
  path: str, columns: Sequence[str], label: str = "", split: str = "", data_dir: str = ""
) -> Records:
  """Finds rows of texts; a UserError if they are not there.

  Args:
    path: a .tsv without quoting or .csv, both with a header, a .jsonl, or a name of TFDS.
    columns: columns, or features, of the texts.
    label: likewise of the label, which is the last of a row; "": none. Of a TFDS ClassLabel it is
      the name of the class.
    split: of the TFDS set that `path` names; "" if it is a file.
    data_dir: of prepared TFDS sets; "" for TFDS's default.
  """
  if split:
    return TfdsRecords(path, split, columns, label, data_dir)
  file = user_path(path).absolute()
  if file.is_dir():
    raise UserError(f"{file}: is a folder; allowed: a table, {', '.join(tables.COLUMNS)}")
  return TableRecords(file, columns, label)


class TableRecords:
  """The rows of a file as `Records`."""

  class_names = ()

  def __init__(self, path: pathlib.Path, columns: Sequence[str], label: str = ""):
    self.source, self._path, self._columns, self._label = str(path), path, columns, label

  def __iter__(self) -> Iterator[tuple[str, list[str]]]:
    for line, record in tables.records(self._path):
      where = f"{self.source}: line {line}"
      row = [tables.value(where, record, column) for column in self._columns]
      if self._label:
        row.append(str(tables.value(where, record, self._label, (str, int, float))))
      yield where, row


class TfdsRecords:
  """The examples of a TFDS split as `Records`."""

  def __init__(
    self, name: str, split: str, columns: Sequence[str], label: str = "", data_dir: str = ""
  ):
    kinds = dict.fromkeys(columns, "Text") | ({label: "FeatureConnector"} if label else {})
    check = lambda features: tfds_source.named_features(name, features, kinds)
    place, features = tfds_source.find(name, data_dir, check)
    self.source, self._columns, self._label = f"{name}, {split!r}", columns, label
    self.class_names = tuple(getattr(features[label], "names", None) or ()) if label else ()
    self._examples = tfds_source.Examples(name, place, split)

  def __iter__(self) -> Iterator[tuple[str, list[str]]]:
    for i in range(len(self._examples)):
      where, example = self._examples.where(i), self._examples.read(i)
      row = [_text(where, example[column]) for column in self._columns]
      yield where, [*row, self._named(where, example[self._label])] if self._label else row

  def _named(self, where: str, label: Any) -> str:
    """The name of a class, or a number, or a text."""
    if isinstance(label, bytes):
      return _text(where, label)
    label = np.asarray(label).item()
    if self.class_names and label < 0:  # as in test splits of GLUE
      raise UserError(f"{where}: label is {label}: this split has no labels")
    return self.class_names[label] if self.class_names else str(label)

  def fingerprint(self) -> str:
    return cache.fingerprint(("text", *self._columns), [(self._examples.fingerprint(), 0, 0)])


def _text(where: str, text: Any) -> str:
  with as_user_error(f"{where} is not UTF-8", UnicodeDecodeError):
    return text.decode() if isinstance(text, bytes) else str(text)


class Rows(NamedTuple):
  """Texts with their second texts and labels, as strings, if there are any, in memory."""

  texts: list[str]
  pairs: list[str] | None
  labels: list[str] | None
  places: list[str]  # of each row, in words
  class_names: tuple[str, ...] = ()  # as of `Records`


def rows(
  path: str,
  text: str,
  pair: str = "",
  label: str = "label",
  split: str = "",
  data_dir: str = "",
) -> Rows:
  """Reads all rows, without blanks around texts; arguments as of `records`.

  A UserError names the file and the line that is not as it has to be, as one with an empty text.
  """
  columns = [text, *([pair] if pair else [])]
  read, found, places = records(path, columns, label, split, data_dir), [], []
  for where, row in read:
    found.append([value.strip() for value in row])
    places.append(where)
    if not all(found[-1]):
      raise UserError(f"{where}: a column is empty; allowed: a text in {', '.join(columns)}")
  if not found:
    raise UserError(f"{read.source}: is empty; it needs at least one row")
  of_column = list(map(list, zip(*found)))
  labels = of_column.pop() if label else None
  return Rows(of_column[0], of_column[1] if pair else None, labels, places, read.class_names)
