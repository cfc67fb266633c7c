"""Labelled texts, alone or in pairs, of a table or of TFDS; they are held in memory."""

import functools
import pathlib
from typing import Any, NamedTuple, Sequence

import numpy as np

from mixer_jax.data import tfds_source
from mixer_jax.errors import UserError
from mixer_jax.paths import user_path
from mixer_jax.text import tables
from mixer_jax.text.documents import check_text, decoded


class Rows(NamedTuple):
  """Texts with their second texts and labels, as strings, if there are any."""

  source: str
  texts: list[str]
  pairs: list[str] | None
  labels: list[str] | None
  places: Sequence[int]  # line numbers; of TFDS, records
  names: tuple[str, ...] = ()  # the classes of a TFDS ClassLabel, in its order

  def where(self, i: int) -> str:
    """The file and line of a row, or its record, for messages."""
    return f"{self.source}{self.places[i]}"


def rows(
  path: str,
  text: str,
  pair: str = "",
  label: str = "label",
  split: str = "",
  data_dir: str = "",
  others: Sequence[str] = (),
) -> Rows:
  """Reads all rows; a UserError names the file and the line that is not as it has to be.

  Args:
    path: a .tsv without quoting or .csv, both with a header, a .jsonl, or a name of TFDS.
    text: the column, or feature, of the first text.
    pair: likewise of the second; "" for none.
    label: likewise of the label; "" for none. Of a TFDS ClassLabel the name of the class is given.
    split: of the TFDS set that `path` names; "" if it is a file.
    data_dir: of prepared TFDS sets; "" for TFDS's default.
    others: further values that the caller allows, for messages.
  """
  if split:
    return _read_tfds(path, text, pair, label, split, data_dir, others)
  return _read_table(user_path(path).absolute(), text, pair, label)


def _read_table(path: pathlib.Path, text: str, pair: str, label: str) -> Rows:
  found = {column: [] for column in (text, pair, label) if column}
  places = []
  if path.is_dir():
    raise UserError(f"{path}: is a folder; allowed: a table, {', '.join(tables.COLUMNS)}")
  for line, record in tables.records(path):
    places.append(line)
    for column, values in found.items():
      read = tables.value if column == label else tables.text
      if not (value := str(read(path, line, record, column)).strip()):
        raise UserError(f"{path}: line {line}: column {column!r} is empty")
      values.append(value)
  source = f"{path}: line "
  return Rows(source, found[text], found.get(pair), found.get(label), places)


def _read_tfds(
  name: str, text: str, pair: str, label: str, split: str, data_dir: str, others: Sequence[str]
) -> Rows:
  columns = [column for column in (text, pair) if column]
  check = functools.partial(_check, name, columns, label)
  place, features = tfds_source.find(name, data_dir, check, others)
  examples = tfds_source.Examples(name, place, split)
  found, labels = {column: [] for column in columns}, []
  for i in range(len(examples)):
    example = examples.read(i)
    for column, values in found.items():
      values.append(decoded(examples, i, column, example[column]).strip())
      if not values[-1]:
        raise UserError(f"{examples.where(i)}: feature {column!r} is empty")
    if label:
      labels.append(_label(examples, i, features[label], example[label]))
  if not found[text]:
    raise UserError(f"{name}: split {split!r} has no examples")
  source = f"{place}, {split!r}, record "
  names = tuple(getattr(features[label], "names", None) or ()) if label else ()
  places = range(len(found[text]))
  return Rows(source, found[text], found.get(pair), labels if label else None, places, names)


def _check(name: str, columns: Sequence[str], label: str, features: Any) -> dict[str, Any]:
  features = check_text(name, columns, features)
  if label and label not in features:
    raise UserError(f"{name}: has no feature {label!r}; features are {', '.join(features)}")
  return features


def _label(examples: tfds_source.Examples, i: int, feature: Any, value: Any) -> str:
  """The name of a class, or a number, or a text."""
  if isinstance(value, bytes):
    return decoded(examples, i, "label", value)
  value = np.asarray(value).item()
  if (names := getattr(feature, "names", None)) and value < 0:  # as in test splits of GLUE
    raise UserError(f"{examples.where(i)}: label is {value}: this split has no labels")
  return names[value] if names else str(value)
