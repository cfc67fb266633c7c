"""Text files line by line: plain, tables with a header, JSON lines; also as .gz and .xz."""

import csv
import gzip
import json
import lzma
import pathlib
from typing import Any, Iterator, Mapping
import zlib

from mixer_jax.errors import UserError, as_user_error

COLUMNS = (".tsv", ".csv", ".jsonl")
KINDS = (".txt", *COLUMNS)
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
  r"""The lines of a file and their numbers from 1; a UserError if it cannot be read.

  A line ends with \n or \r\n. Other separators may be within a sentence.
  """
  opened = _PACKED.get(path.suffix.lower(), open)
  damaged = () if opened is open else (EOFError, zlib.error, lzma.LZMAError)
  with as_user_error(f"{path}: cannot be read", OSError, *damaged), opened(path, "rb") as file:
    for number, line in enumerate(file, 1):
      with as_user_error(f"{path}: line {number} is not UTF-8", UnicodeDecodeError):
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
      yield number, text.removesuffix("\n").removesuffix("\r")


def records(path: pathlib.Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
  """The rows of a .tsv, .csv or .jsonl by column, and their line numbers.

  A .tsv has no quoting: a quotation mark is a character like others. A UserError names the line
  that is not as it has to be.
  """
  if (ending := kind(path)) not in COLUMNS:
    raise UserError(f"{path}: has no columns; allowed: {', '.join(COLUMNS)}")
  if ending == ".jsonl":
    yield from _jsonl(path)
    return
  header = None
  for number, fields in (_tsv if ending == ".tsv" else _csv)(path):
    if header is None:
      header = fields
      if len({*header}) < len(header):
        raise UserError(f"{path}: line 1: a column stands twice in the header: {_named(header)}")
    elif len(fields) != len(header):
      why = f"{len(fields)} fields, but the header has {len(header)}: {_named(header)}"
      raise UserError(f"{path}: line {number}: {why}")
    else:
      yield number, dict(zip(header, fields))


def _tsv(path: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
  return ((number, line.split("\t")) for number, line in lines(path) if line)


def _csv(path: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
  csv.field_size_limit(_LONGEST_FIELD)
  reader, number = csv.reader((line + "\n" for _, line in lines(path)), strict=True), 1
  try:
    for fields in reader:
      if fields:
        yield number, fields
      number = reader.line_num + 1  # a row that is quoted may have several lines
  except csv.Error as error:
    raise UserError(f"{path}: line {number}: broken CSV: {error}") from error


def _jsonl(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  for number, line in lines(path):
    if line.strip():
      with as_user_error(f"{path}: line {number}: broken JSON", ValueError):
        found = json.loads(line)
      if not isinstance(found, dict):
        raise UserError(f"{path}: line {number} is no JSON object")
      yield number, found


def value(where: str, record: Mapping[str, Any], column: str, kinds: Any = str) -> Any:
  """A field of a row; a UserError if there is no such column, or it is of another kind."""
  if column not in record:
    raise UserError(f"{where}: no column {column!r}; columns are {_named(record)}")
  if not isinstance(found := record[column], kinds):
    type_ = "null" if found is None else type(found).__name__
    raise UserError(f"{where}: column {column!r} is {type_}; allowed is text")
  return found


def _named(columns: Any) -> str:
  return ", ".join(map(repr, columns))[:_SHOWN] or "none"
