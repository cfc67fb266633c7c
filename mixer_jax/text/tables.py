"""Text files line by line: plain, tables with a header, JSON lines; also as .gz and .xz."""

import contextlib
import csv
import gzip
import json
import lzma
import os
import pathlib
from typing import Any, BinaryIO, Iterable, Iterator, Mapping
import zlib

from mixer_jax.errors import UserError, as_user_error, once

COLUMNS = (".tsv", ".csv", ".jsonl")
KINDS = (".txt", ".jsonl", ".tsv", ".csv")
_PACKED = {"": open, ".gz": gzip.open, ".xz": lzma.open}
ENDINGS = tuple(kind + packed for kind in KINDS for packed in _PACKED)
_LONGEST_FIELD = 2**31 - 1  # of a .csv; the default of the module is 128 KiB
_SHOWN = 300  # characters of the names of columns, in a message


def kind(path: pathlib.Path) -> str:
  """The ending of a file without .gz or .xz; a UserError if it is none of `KINDS`."""
  name = path.name.lower()
  if not name.endswith(ENDINGS):
    raise UserError(f"{path}: no known ending; allowed: {', '.join(KINDS)}, also with .gz or .xz")
  return "." + name.removesuffix(".gz").removesuffix(".xz").rpartition(".")[2]


def lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
  """The lines of a file and their numbers from 1; a UserError if it cannot be read."""
  with _opened(path) as file:
    for number, line in enumerate(file, 1):
      try:
        decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
      except UnicodeDecodeError as error:
        raise UserError(f"{path}: line {number} is not UTF-8 (byte {error.start + 1})") from error
      text = decoded.removesuffix("\n").removesuffix("\r")
      many = decoded.endswith("\r") or text.count("\r") > 1
      if number == 1 and "\r" in text and many and not decoded.endswith("\n"):  # the whole file
        raise _lone(path)
      yield number, text


def _lone(path: pathlib.Path) -> UserError:
  return UserError(f"{path}: its lines end in \\r alone; allowed: \\n, or \\r\\n")


def _table(path: pathlib.Path, quoting: bool) -> Iterator[tuple[int, str]]:
  """The lines of a table; a UserError if there is a \\r in its header, unless it is quoted."""
  for number, line in lines(path):
    if number == 1 and "\r" in line and not (quoting and '"' in line):
      raise _lone(path)
    yield number, line


def records(
  path: pathlib.Path, may_be_empty: bool = False
) -> Iterator[tuple[int, Mapping[str, Any]]]:
  """The rows of a .tsv, .csv or .jsonl, by column, and their line numbers; or a UserError."""
  readers = {".tsv": _tsv, ".csv": _csv, ".jsonl": _jsonl}
  if (reader := readers.get(kind(path))) is None:
    raise UserError(f"{path}: has no columns; allowed: {', '.join(COLUMNS)}")
  found = None
  for found in reader(path):
    yield found
  if found is None and not may_be_empty:
    raise UserError(f"{path}: is empty; it needs at least one row")


def value(path: pathlib.Path, line: int, record: Mapping[str, Any], column: str) -> Any:
  """A field of a row; a UserError if there is no such column, or no text in it."""
  if column not in record:
    raise UserError(f"{path}: line {line}: no column {column!r}; columns are {_named(record)}")
  found = record[column]
  if found is None or isinstance(found, (list, dict)):
    type_ = "null" if found is None else type(found).__name__
    raise UserError(f"{path}: line {line}: column {column!r} is {type_}; allowed is text")
  return found


def text(path: pathlib.Path, line: int, record: Mapping[str, Any], column: str) -> str:
  """As `value`, of a field that has to be a string."""
  found = value(path, line, record, column)
  if not isinstance(found, str):
    type_ = type(found).__name__
    raise UserError(f"{path}: line {line}: column {column!r} is {type_}; allowed is text")
  return found


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[BinaryIO]:
  packed = _PACKED.get(path.suffix.lower(), open)
  kinds = (OSError,) if packed is open else (OSError, EOFError, zlib.error, lzma.LZMAError)
  with as_user_error(f"{path}: cannot be read", *kinds), packed(os.fspath(path), "rb") as file:
    yield file


def _tsv(path: pathlib.Path) -> Iterator[tuple[int, dict[str, str]]]:
  """Without quoting: tabs separate, and a quotation mark is a character like others."""
  header = None
  for number, line in _table(path, quoting=False):
    fields = line.split("\t")
    if header is None:
      header = _header(path, fields)
    elif line:
      yield number, _row(path, number, header, fields)


def _csv(path: pathlib.Path) -> Iterator[tuple[int, dict[str, str]]]:
  csv.field_size_limit(_LONGEST_FIELD)
  reader = csv.reader((line + "\n" for _, line in _table(path, quoting=True)), strict=True)
  header = None
  while True:
    number = reader.line_num + 1  # a row that is quoted may have several lines
    try:
      fields = next(reader)
    except StopIteration:
      return
    except csv.Error as error:
      raise UserError(f"{path}: line {number}: broken CSV: {error}") from error
    if header is None:
      header = _header(path, fields)
    elif fields:
      yield number, _row(path, number, header, fields)


def _jsonl(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  for number, line in lines(path):
    if not line.strip():
      continue
    try:
      found = json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
      raise UserError(f"{path}: line {number}: broken JSON: {error}") from error
    if not isinstance(found, dict):
      type_ = type(found).__name__
      raise UserError(f"{path}: line {number}: is a JSON {type_}; allowed is an object")
    yield number, found


def _header(path: pathlib.Path, names: list[str]) -> list[str]:
  if double := sorted({name for name in names if names.count(name) > 1}):
    raise UserError(f"{path}: line 1: column {_named(double[:1])} stands twice in the header")
  return names


def _row(path: pathlib.Path, number: int, header: list[str], fields: list[str]) -> dict[str, str]:
  if len(fields) != len(header):
    why = f"{len(fields)} fields, but the header has {len(header)}: {_named(header)}"
    raise UserError(f"{path}: line {number}: {why}")
  return dict(zip(header, fields))


def _named(columns: Iterable[str]) -> str:
  return ", ".join(map(repr, columns))[:_SHOWN] or "none"
